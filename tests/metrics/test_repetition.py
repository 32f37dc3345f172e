"""A completion that ends in a loop is told from one that only has something twice."""

import pytest

from grpo_lit.metrics.rollout import ends_in_a_loop, rollout_rates
from grpo_lit.rollout import Completion, Group, Prompt

A, B, C = 5, 6, 7
STOP = 2


def completion(ids: list[int], reason: str = "length") -> Completion:
    return Completion(tuple(ids), (-1.0,) * len(ids), "", reason, 0)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([A] * 16, True),
        ([A] * 15, False),  # fewer than 16 tokens: 1000000 is no loop
        ([B] + [A] * 15, False),
        ([B] + [A] * 16, True),
        ([A] * 16 + [B], False),  # it got out again
        ([A, B] * 8, True),
        ([A, B] * 7 + [A], False),  # 15 tokens
        ([C] + [B] + [A, B] * 7, False),  # B and then 7 pairs: 15 tokens
        ([A, B] * 8 + [A], True),  # in the middle of a pair
        ([*range(100, 106)] * 3, True),  # 3 times 6 tokens are 18
        ([0] + [*range(101, 106)] + [*range(100, 106)] * 2, False),  # 17 of the 18
        ([*range(100, 164)] * 3, True),  # the longest n-gram
        ([*range(100, 165)] * 3, False),  # longer than that
        ([*range(100, 164)] * 2, False),  # said twice
        ([], False),
    ],
)  # fmt: skip
def test_a_loop_is_an_ngram_three_times_over_at_least_16_tokens(ids: list[int], expected: bool) -> None:
    assert ends_in_a_loop(completion(ids)) is expected


def test_the_stop_token_is_no_part_of_it():
    assert ends_in_a_loop(completion([A] * 16 + [STOP], "stop"))
    assert not ends_in_a_loop(completion([A] * 15 + [STOP], "stop"))
    assert not ends_in_a_loop(completion([STOP], "stop"))


def test_the_share_of_completions_is_logged():
    completions = tuple(completion([i] * n) for i, n in enumerate((16, 20, 4, 15)))
    group = Group(Prompt("p", "?"), 0, completions, {"r": [0.0] * 4}, [0.0] * 4, [False] * 4)
    assert rollout_rates([group], ["r"]).compute()["length/repetition"] == 0.5
