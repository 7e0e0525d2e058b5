"""Log-probabilities under the model's own distribution: before temperature, penalties and masks."""

import torch

from qinfer.engine.request import Request, TokenLogprob


def top_logprobs(logits: torch.Tensor, token_id: int, count: int) -> TokenLogprob:
    """Return a token's log-probability under `logits` `[vocab]`, and the `count` most likely.

    Among equal ones the lower id comes first.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    top: tuple[tuple[int, float], ...] = ()
    if count > 0:
        count = min(count, logprobs.shape[0])
        lowest = torch.topk(logprobs, count).values[-1]
        ids = (logprobs >= lowest).nonzero().flatten()
        values, order = torch.sort(logprobs[ids], descending=True, stable=True)
        top = tuple(zip(ids[order[:count]].tolist(), values[:count].tolist(), strict=True))
    return TokenLogprob(token_id, float(logprobs[token_id]), top)


class PromptScores:
    """Collects the log-probabilities of a prompt's tokens as their rows are computed.

    Args:
        request: wants them; its `prompt_next` is moved on, and None when all are there.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._entries: list[TokenLogprob | None] = [None]  # nothing predicts the first token
        self._finish()

    def add(self, position: int, logits: torch.Tensor) -> None:
        """Take the rows after the prompt's tokens from `position` on, as far as they are wanted.

        Args:
            position: of the token whose row is the first; not behind `prompt_next`.
            logits: float32 `[rows, vocab]`, finite; rows beyond the prompt are left alone.
        """
        request = self._request
        count = request.params.prompt_logprobs or 0
        while request.prompt_next is not None and request.prompt_next < position + len(logits):
            row, token = logits[request.prompt_next - position], request.prompt_next + 1
            self._entries.append(top_logprobs(row, request.tokens[token], count))
            request.prompt_next += 1
            self._finish()

    def take(self) -> tuple[TokenLogprob | None, ...] | None:
        """Return all entries, one per token of the prompt, once; None if there are no news."""
        if self._request.prompt_next is not None or not self._entries:
            return None
        entries, self._entries = tuple(self._entries), []
        return entries

    def _finish(self) -> None:
        if self._request.prompt_next == self._request.num_prompt - 1:
            self._request.prompt_next = None
