import pytest

from qinfer.engine.payoff import PLAIN_EVERY, PROBE_AFTER, Payoff, Rate, StepCosts


def make(*, per_step: float = 1.0, per_token: float = 0.0, draft: float = 0.0) -> Payoff:
    """Return a payoff that knows what steps of up to 64 tokens and drafted tokens cost."""
    payoff = Payoff(4)
    for size in range(1, 65):
        know(payoff.steps, size, per_step + per_token * size)
    payoff.add_draft(1, draft)
    return payoff


def know(costs: StepCosts, size: int, seconds: float) -> None:
    """Let a size be known: two steps of it were measured."""
    costs.add(size, seconds)
    costs.add(size, seconds)


def teach(payoff: Payoff, request_id: str, num_right: int, times: int = 30) -> None:
    for _ in range(times):
        payoff.add_result(request_id, 4, num_right)


def test_step_costs_between_and_beyond_what_was_measured() -> None:
    costs = StepCosts()
    assert costs.estimate(3) == 0.0
    know(costs, 1, 1.0)
    assert costs.estimate(5) == 1.0
    assert costs.extra(1, 4) == 0.0  # unknown: worth a try
    know(costs, 5, 3.0)
    assert costs.estimate(2) == pytest.approx(1.5)
    assert costs.estimate(9) == 3.0
    assert costs.extra(1, 4) == pytest.approx(2.0)
    know(costs, 600, 99.0)  # prefill
    assert costs.estimate(600) == 3.0


def test_the_first_step_of_a_size_may_have_had_to_prepare_for_it() -> None:
    costs = StepCosts()
    costs.add(4, 70.0)
    assert not costs.knows(4)
    costs.add(4, 1.0)
    assert costs.knows(4)
    assert costs.knows(5)
    assert not costs.knows(3)
    assert costs.estimate(4) == 1.0


def test_step_costs_follow_slowly_and_shrug_off_outliers() -> None:
    costs = StepCosts()
    know(costs, 1, 1.0)
    costs.add(1, 1000.0)
    assert costs.estimate(1) < 1.5
    for _ in range(60):
        costs.add(1, 2.0)
    assert costs.estimate(1) == pytest.approx(2.0, rel=0.01)


def test_a_longer_step_is_never_taken_for_a_shorter_one() -> None:
    costs = StepCosts()
    know(costs, 1, 2.0)
    know(costs, 3, 1.0)  # noise
    assert costs.extra(1, 2) == 0.0


def test_rate_counts_tokens_up_to_the_first_wrong_one() -> None:
    rate = Rate()
    assert rate.value(0.6) == pytest.approx(0.6)
    rate.add(4, 1, 1.0)
    assert (rate.hits, rate.trials) == (1, 2)
    rate.add(4, 4, 1.0)
    assert (rate.hits, rate.trials) == (5, 6)


def test_everything_is_tried_while_only_the_plain_step_is_known() -> None:
    payoff = Payoff(4)
    assert payoff.lengths(["a", "b"], [4, 2]) == [0, 0]
    know(payoff.steps, 2, 1.0)
    assert payoff.lengths(["a", "b"], [4, 2]) == [4, 2]
    assert payoff.lengths(["a"], [4]) == [0]  # a smaller step was not seen yet


def test_what_comes_true_is_drafted_and_what_does_not_is_not() -> None:
    payoff = make(per_step=1.0, per_token=0.2)
    teach(payoff, "good", 4)
    teach(payoff, "bad", 0)
    assert payoff.lengths(["good", "bad"], [4, 4]) == [4, 0]
    assert payoff.lengths(["good"], [3]) == [3]
    assert payoff.lengths(["good"], [0]) == [0]
    assert payoff.lengths([], []) == []


def test_a_step_whose_tokens_cost_as_much_as_they_yield_is_not_made_longer() -> None:
    payoff = make(per_step=0.0, per_token=1.0)
    teach(payoff, "a", 3)
    assert payoff.lengths(["a"], [4]) == [0]


def test_the_price_of_the_drafter_counts() -> None:
    for draft, expected in ((0.1, [4]), (0.9, [0])):
        payoff = make(per_step=1.0, per_token=0.02, draft=draft)
        teach(payoff, "a", 3)
        assert payoff.lengths(["a"], [4]) == expected


def test_a_dear_second_row_does_not_hide_cheap_further_ones() -> None:
    payoff = Payoff(4)
    for size, seconds in ((1, 1.0), (2, 2.2), (3, 2.2), (4, 2.2), (5, 2.2)):
        know(payoff.steps, size, seconds)
    teach(payoff, "a", 4)
    assert payoff.lengths(["a"], [4]) == [4]
    assert payoff.lengths(["a"], [1]) == [0]


def test_full_batches_draft_less() -> None:
    """Where the step is long already, a token must be likelier to be worth its place."""
    payoff = make(per_step=1.0, per_token=0.1)
    ids = [f"r{index}" for index in range(12)]
    for request_id in ids:
        teach(payoff, request_id, 2)
    alone = payoff.lengths(ids[:1], [4])
    together = payoff.lengths(ids, [4] * 12)
    assert sum(together) / 12 < alone[0]


def test_what_was_left_out_is_probed_ever_more_seldom() -> None:
    payoff = make(per_step=1.0, per_token=0.5)
    teach(payoff, "a", 0)
    lengths = [payoff.lengths(["a"], [4])[0] for _ in range(7 * PROBE_AFTER)]
    probes = [step + 1 for step, length in enumerate(lengths) if length]
    assert probes == [PROBE_AFTER, 3 * PROBE_AFTER, 7 * PROBE_AFTER]
    assert set(lengths) == {0, 4}
    teach(payoff, "a", 4)
    assert payoff.lengths(["a"], [4]) == [4]


def test_a_new_request_starts_with_what_the_others_showed() -> None:
    payoff = make(per_step=1.0, per_token=0.4)
    teach(payoff, "a", 0, times=100)
    assert payoff.lengths(["new"], [4]) == [0]
    payoff.forget("a")
    payoff.forget("unknown")
    payoff.add_result("new", 0, 0)  # nothing was drafted, nothing is learnt
    assert payoff.lengths(["new"], [4]) == [0]


def test_plain_steps_are_measured_now_and_then() -> None:
    payoff = make(per_step=1.0, per_token=0.01)
    teach(payoff, "a", 4)
    lengths = [payoff.lengths(["a"], [4])[0] for _ in range(2 * PLAIN_EVERY + 2)]
    assert [step for step, length in enumerate(lengths) if length == 0] == [
        PLAIN_EVERY,
        2 * PLAIN_EVERY + 1,
    ]
