import pytest
import torch

from qinfer.engine.logprobs import top_logprobs


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_logprobs_are_those_of_the_model_and_exactly_as_many(count: int) -> None:
    """E10: raw log-softmax, the chosen token always there, exactly N others."""
    row = torch.randn(500, generator=torch.Generator().manual_seed(6)) * 3
    expected = row.double().log_softmax(-1)
    result = top_logprobs(row, 13, count)
    assert result.token_id == 13
    assert result.logprob == pytest.approx(float(expected[13]), abs=1e-5)
    assert [token for token, _ in result.top] == torch.topk(expected, count).indices.tolist()
    assert all(value <= 0 for _, value in result.top)


def test_equal_logprobs_are_listed_by_id() -> None:
    row = torch.zeros(50)
    row[[30, 20, 10]] = 2.0
    assert [token for token, _ in top_logprobs(row, 0, 4).top] == [10, 20, 30, 0]
