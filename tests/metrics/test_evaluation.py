"""Held-out figures against enumeration and values by hand; intervals against the distribution they estimate."""

import itertools
import math
from fractions import Fraction
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from grpo_lit.metrics.evaluation import ENDS, HeldOutFigures, interval, majority, pass_at, prompt_figures
from grpo_lit.metrics.intervals import wilson
from grpo_lit.ranks import Ranks
from grpo_lit.rollout import Completion, Group, Prompt


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_j_is_the_share_of_subsets_that_hold_a_right_sample(n: int) -> None:
    for c, j in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([True] * c + [False] * (n - c), j))
        assert pass_at(n, c, j) == float(Fraction(sum(map(any, subsets)), len(subsets)))


def test_pass_at_j_is_unbiased_and_the_naive_estimate_is_not() -> None:
    p, n, j = 0.3, 5, 2
    law = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    expected = sum(chance * pass_at(n, c, j) for c, chance in enumerate(law))
    assert expected == pytest.approx(1 - (1 - p) ** j, abs=1e-15)
    naive = sum(chance * (1 - (1 - c / n) ** j) for c, chance in enumerate(law))
    assert naive < expected - 0.01


def test_pass_at_j_is_exact_for_numbers_whose_binomials_no_float_holds() -> None:
    # C(4999, 2500) / C(5000, 2500) = 1/2: the sample that is right is drawn or it is not.
    assert pass_at(5000, 1, 2500) == 0.5
    assert pass_at(5000, 0, 2500) == 0.0
    assert pass_at(5000, 2501, 2500) == 1.0


@pytest.mark.parametrize(
    ("answers", "correct", "expected"),
    [
        ("7 7 9", "yyn", 1.0),
        ("7 9 9", "ynn", 0.0),
        ("7 7 9 9", "yynn", 1 / 2),  # a tie of two answers, one right
        ("7 9 8", "ynn", 1 / 3),  # all tied
        ("7 7 9 9 8", "yynnn", 1 / 2),  # the third answer takes no part
        ("9 7 9 7", "nyny", 1 / 2),
        ("7 - - -", "ynnn", 1.0),  # what gives no answer does not vote
        ("- -", "nn", 0.0),
        ("7 7 7 9", "ynnn", 1 / 3),  # the verifier told three samples of one answer apart
    ],
)
def test_majority_by_hand(answers: str, correct: str, expected: float) -> None:
    said = [None if answer == "-" else answer for answer in answers.split()]
    assert majority(said, [flag == "y" for flag in correct]) == pytest.approx(expected, abs=1e-15)


def test_majority_equals_the_mean_over_all_ways_to_break_its_ties() -> None:
    for answers in itertools.product("abc", repeat=5):
        votes = {answer: answers.count(answer) for answer in answers}
        winners = [answer for answer, count in votes.items() if count == max(votes.values())]
        expected = Fraction(sum(answer == "a" for answer in winners), len(winners))
        assert majority(answers, [answer == "a" for answer in answers]) == pytest.approx(float(expected), abs=1e-15)


def group(flags: str, lengths: list[int] | None = None, form: list[float | None] | None = None) -> Group:
    """``y``, ``n`` and ``?`` per completion; every completion longer than 3 tokens is cut."""
    lengths = lengths or [1] * len(flags)
    completions = tuple(
        Completion((5,) * size, (0.0,) * size, "x", "length" if size > 3 else "stop", 0) for size in lengths
    )
    correct = [{"y": True, "n": False, "?": None}[flag] for flag in flags]
    scores = {"answer": [None if flag is None else float(flag) for flag in correct]}
    if form is not None:
        scores["format"] = form
    return Group(Prompt("q", "q"), 0, completions, scores=scores, correct=correct)


def test_figures_of_a_prompt_by_hand() -> None:
    greedy = group("n", [4], [1.0])
    sampled = group("yynnn", [2, 2, 2, 2, 7], [1.0, 0.0, None, 0.5, 0.5])
    assert prompt_figures(greedy, sampled, [7, 7, 9, 9, 8], "answer") == {
        "greedy": 0.0,
        "length": 4.0,
        "truncated": 1.0,
        "reward_format": 1.0,
        "avg@5": 0.4,
        "pass@2": 0.7,  # 1 - C(3, 2) / C(5, 2)
        "pass@4": 1.0,  # only three are wrong
        "pass@5": 1.0,
        "maj@5": 0.5,
        "length@5": 3.0,
        "truncated@5": 0.2,
        "reward_format@5": 0.5,  # of the four it spoke on
    }


def test_without_samples_there_is_the_greedy_answer_alone() -> None:
    assert prompt_figures(group("y"), None, [], "answer") == {"greedy": 1.0, "length": 1.0, "truncated": 0.0}


def test_a_sample_that_nobody_could_judge_is_no_sample() -> None:
    figures = prompt_figures(group("?"), group("y?n?"), ["7", "9", "9", "9"], "answer")
    assert math.isnan(figures["greedy"])
    assert figures["avg@4"] == 0.5
    assert figures["pass@2"] == 1.0
    assert math.isnan(figures["pass@4"])  # of two samples, four cannot be drawn
    assert figures["maj@4"] == 0.5  # one vote each
    nothing = prompt_figures(group("?"), group("??"), ["7", "7"], "answer")
    assert all(math.isnan(nothing[name]) for name in ("greedy", "avg@2", "pass@2", "maj@2"))


def test_bounds_are_percentiles_of_the_resampled_mean() -> None:
    values = np.array([0.75] * 20 + [0.25] * 30)
    # The sum of a resample is binomial: its exact percentiles, one count apart at most.
    cumulative = np.cumsum([math.comb(50, x) * 0.4**x * 0.6 ** (50 - x) for x in range(51)])
    exact = [0.25 + int(np.searchsorted(cumulative, q)) / 100 for q in (0.025, 0.975)]
    assert interval(values) == pytest.approx(exact, abs=0.01)
    assert interval(values) == interval(values)
    assert interval(np.ones(50), share=False) == (1.0, 1.0)  # answers of one token each
    uneven = np.linspace(0.0, 1.0, 50) ** 2
    assert interval(uneven) != interval(uneven, seed=1)
    assert interval(np.array([0.25] * 5)) == (0.25, 0.25)


@pytest.mark.parametrize("right", [0, 1, 20, 50])
def test_bounds_of_prompts_that_are_right_or_wrong_are_wilsons_and_never_a_point(right: int) -> None:
    low, high = interval(np.array([1.0] * right + [0.0] * (50 - right)))
    assert (low, high) == wilson(right / 50, 50)
    assert high - low > 0.07  # 3.84 / 53.84 with none right


def test_many_samples_of_few_prompts_do_not_narrow_the_interval() -> None:
    figures = HeldOutFigures()
    for place, flag in enumerate("ynynynynyn"):
        alike = group(flag * 8)
        figures.add("sums", place, prompt_figures(group(flag), alike, ["7"] * 8, "answer"))
    bounds = figures.bounds()
    for end in ENDS:
        assert bounds[f"val/sums/avg@8/{end}"] == bounds[f"val/sums/greedy/{end}"]
    assert bounds["val/sums/greedy/ci_high"] - bounds["val/sums/greedy/ci_low"] > 0.5


def as_rank(parts: list[HeldOutFigures]) -> Ranks:
    return Mock(spec=Ranks, gather=lambda value: [part._sets for part in parts])


def test_ranks_together_know_what_one_would_and_count_no_prompt_twice() -> None:
    rows = [{"greedy": float(i % 3 == 0), "length": 0.1 * i} for i in range(7)]
    alone, parts = HeldOutFigures(), [HeldOutFigures(), HeldOutFigures(), HeldOutFigures()]
    for place, row in enumerate(rows):
        alone.add("sums", place, row)
        parts[place % 2].add("sums", place, row)
    parts[1].add("sums", 0, rows[0])  # a sampler that fills up its last batch asks some prompts again
    together = parts[1].gathered(as_rank(parts))  # the third rank has no prompt at all
    assert together.means() == alone.means() == {"val/sums/greedy": 3 / 7, "val/sums/length": pytest.approx(0.3)}
    assert together.bounds() == alone.bounds()


def test_unknown_values_leave_the_mean_and_its_interval() -> None:
    figures, known = HeldOutFigures(), HeldOutFigures()
    for place, value in enumerate([1.0, math.nan, 0.0, 1.0]):
        figures.add("sums", place, {"greedy": value, "avg@2": math.nan})
        if not math.isnan(value):
            known.add("sums", place, {"greedy": value})
    means: dict[str, Any] = figures.means()
    assert means["val/sums/greedy"] == 2 / 3
    assert math.isnan(means["val/sums/avg@2"])
    assert figures.bounds() == known.bounds()
