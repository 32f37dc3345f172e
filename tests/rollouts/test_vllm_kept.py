"""What was possible is read from vLLM's log-probs, or the run ends: it is never guessed. Needs no vLLM."""

import math
from types import SimpleNamespace

import pytest

from grpo_lit.errors import EngineError
from grpo_lit.rollout import Sampling
from grpo_lit.rollouts.vllm_kept import kept_tokens, logprobs_to_ask

NEVER = -math.inf


def flat(*steps: list[tuple[int, float]]) -> SimpleNamespace:
    """Log-probs of each step as vLLM lays them out: the drawn token, then the likeliest in descending order."""
    starts = [sum(len(step) for step in steps[:i]) for i in range(len(steps))]
    return SimpleNamespace(
        start_indices=starts,
        end_indices=[start + len(step) for start, step in zip(starts, steps, strict=True)],
        token_ids=[token for step in steps for token, _ in step],
        logprobs=[logprob for step in steps for _, logprob in step],
    )


def test_the_finite_ones_were_possible_and_the_drawn_one_counts_once() -> None:
    first = [(9, -1.5), (4, -0.3), (9, -1.5), (6, NEVER), (0, NEVER)]
    second = [(2, 0.0), (2, 0.0), (1, NEVER), (0, NEVER), (3, NEVER)]
    kept = kept_tokens(flat(first, second), vocabulary=1000)
    assert kept.steps() == [(4, 9), (2,)]


def test_nothing_was_drawn() -> None:
    assert kept_tokens(flat(), vocabulary=1000).steps() == []


def test_a_list_that_may_have_been_cut_is_refused() -> None:
    step = [(9, -1.5), (4, -0.3), (9, -1.5)]
    with pytest.raises(EngineError, match=r"`data\.sampling\.top_k` expected at most 2 .*float32"):
        kept_tokens(flat(step), vocabulary=1000)
    # Of a vocabulary of two nothing can be missing.
    assert kept_tokens(flat(step), vocabulary=2).steps() == [(4, 9)]


@pytest.mark.parametrize(
    ("sampling", "vocabulary", "expected"),
    [
        (Sampling(), 50_000, 0),
        (Sampling(temperature=0.0, top_k=5), 50_000, 0),
        (Sampling(top_k=5), 50_000, 37),  # 5 + 32: room for logits that equal the fifth
        (Sampling(top_k=200, top_p=0.9), 50_000, 300),
        (Sampling(top_k=200), 260, 260),
        (Sampling(top_k=10**6), 260, 260),
    ],
)
def test_more_are_listed_than_top_k_and_none_where_all_are_possible(
    sampling: Sampling, vocabulary: int, expected: int
) -> None:
    assert logprobs_to_ask(sampling, vocabulary) == expected
