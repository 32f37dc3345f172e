"""What is logged of scored groups."""

from itertools import combinations, permutations
from statistics import fmean

import pytest

from grpo_lit.metrics.rollout import MOST_COMPARED, neighbour_similarities, rollout_rates
from grpo_lit.rollout import Completion, Group, Prompt


def group(domain: str, *correct: bool | None) -> Group:
    samples = tuple(Completion((5, 2), (-1.0, -1.0), "x", "stop", 0) for _ in correct)
    rewards = [None if flag is None else float(flag) for flag in correct]
    prompt = Prompt(domain, "", domain=domain, token_ids=(1,))
    return Group(prompt, 0, samples, scores={"r": list(rewards)}, rewards=list(rewards), correct=list(correct))


def test_each_domain_has_a_solve_rate_over_all_ranks_whatever_a_rank_has_drawn() -> None:
    """Field bug F5: one rank has only math samples, another only code."""
    domains = ("code", "logic", "math")
    one = rollout_rates([group("math", True, False, False, None), group("math", True, True)], ["r"], domains)
    two = rollout_rates([group("code", False, False)], ["r"], domains)
    assert set(one._sums) == set(two._sums)
    values = one.merge(two).compute()
    assert values["reward/correct/math"] == 3 / 5  # the one that nobody could judge does not count
    assert values["reward/correct/code"] == 0.0
    assert values["reward/correct/logic"] != values["reward/correct/logic"]  # nan, which is not logged
    assert values["reward/correct"] == 3 / 7


def test_one_domain_needs_no_rate_of_its_own() -> None:
    assert not [
        name for name in rollout_rates([group("math", True)], ["r"])._sums if name.startswith("reward/correct/")
    ]


def answers(*token_ids: tuple[int, ...]) -> Group:
    samples = tuple(Completion(ids, (-1.0,) * len(ids), "x", "stop", 0) for ids in token_ids)
    nothing = [None] * len(samples)
    return Group(Prompt("q", ""), 0, samples, scores={"r": nothing}, rewards=nothing, correct=nothing)


def test_similarity_of_answers_by_hand() -> None:
    # 5 6 7 2 and 5 7 2 share 5 7 2: 2 * 3 / (4 + 3). 5 7 2 and 7 5 2 share 5 2 or 7 2: 2 * 2 / 6. 7 5 2 and 9: nothing.
    group = answers((5, 6, 7, 2), (5, 7, 2), (7, 5, 2), (9,))
    assert neighbour_similarities(group) == pytest.approx([6 / 7, 2 / 3, 0.0])
    assert neighbour_similarities(answers((5, 2), (5, 2))) == [1.0]
    assert neighbour_similarities(answers((), ())) == [1.0]
    assert neighbour_similarities(answers((), (5,))) == [0.0]
    assert neighbour_similarities(answers((5,))) == []
    alike = (5,) * MOST_COMPARED
    assert neighbour_similarities(answers((*alike, 7, 7), (*alike, 8))) == [1.0]  # beyond, nothing is compared
    rates = rollout_rates([group, answers((5, 2), (5, 2))], ["r"])
    assert rates.compute()["exploration/group_similarity"] == pytest.approx((6 / 7 + 2 / 3 + 0 + 1) / 4)


def test_neighbours_estimate_the_mean_over_all_pairs() -> None:
    # Over all orders of the samples, the mean over neighbours is the mean over pairs, exactly.
    samples = [(5, 6, 2), (5, 2), (6, 6, 6, 2), (2,)]
    pairs = [neighbour_similarities(answers(a, b))[0] for a, b in combinations(samples, 2)]
    orders = [fmean(neighbour_similarities(answers(*order))) for order in permutations(samples)]
    assert fmean(orders) == pytest.approx(fmean(pairs))
