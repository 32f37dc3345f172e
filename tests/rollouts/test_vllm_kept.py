"""What was possible is read from vLLM's log-probs, or the run ends: it is never guessed. Needs no vLLM."""

import math
from types import SimpleNamespace

import pytest

from grpo_lit.errors import EngineError
from grpo_lit.rollout import Sampling
from grpo_lit.rollouts.vllm_kept import ListedLogprobs, kept_tokens, logprobs_to_ask

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


def step(drawn: int, *listed: tuple[int, float]) -> dict:
    """One step as a server writes it: the drawn token first, at its own place no more, and -9999 for -inf and NaN."""
    found = [{"token_id": token, "logprob": logprob, "rank": 1} for token, logprob in listed]
    return {"token_id": drawn, "logprob": dict(listed)[drawn], "top_logprobs": found}


def test_a_servers_answer_says_the_same_as_vllm_in_this_process() -> None:
    found = ListedLogprobs.of([step(9, (9, -1.5), (4, -0.3), (6, -9999.0)), step(2, (2, 0.0), (1, -9999.0))])
    assert [found.logprobs[i] for i in found.start_indices] == [-1.5, 0.0]
    assert kept_tokens(found, vocabulary=1000).steps() == [(4, 9), (2,)]


def test_a_servers_list_that_may_have_been_cut_is_refused_and_the_whole_vocabulary_is_not() -> None:
    found = ListedLogprobs.of([step(9, (9, -1.5), (4, -0.3))])
    with pytest.raises(EngineError, match=r"`data\.sampling\.top_k` expected at most 2 "):
        kept_tokens(found, vocabulary=1000)
    whole = ListedLogprobs.of([step(1, (1, -0.5), (0, -0.9))])
    assert kept_tokens(whole, vocabulary=2).steps() == [(0, 1)]


def test_field_bug_f9_a_logprob_that_was_not_a_number_is_none_again() -> None:
    found = ListedLogprobs.of([step(9, (9, -9999.0))])
    assert math.isnan(found.logprobs[0])
