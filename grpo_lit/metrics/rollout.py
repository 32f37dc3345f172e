"""What is logged of a rollout before anything is trained on it."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from rapidfuzz.distance import Indel

from grpo_lit.metrics.memory import engine_memory
from grpo_lit.metrics.rates import Rates
from grpo_lit.objectives.advantages import EQUAL_SHARE
from grpo_lit.ranks import Ranks
from grpo_lit.rollout import Completion, Group
from grpo_lit.rollouts.minibatch import Rollout


def rollout_rates(groups: Sequence[Group], reward_names: Sequence[str], domains: Sequence[str] = ()) -> Rates:
    """Return reward, length and exploration rates of scored groups.

    Dropped samples (reward ``None``) do not count; a reward's own mean is over the samples it spoke on. Every name is
    present whatever the groups hold, so that all ranks add the same ones.

    Args:
        groups: What was drawn.
        reward_names: Names of the rewards.
        domains: Domains to give a solve rate of their own.
    """
    rates = Rates()
    samples = [(c, g.correct[i], g.rewards[i]) for g in groups for i, c in enumerate(g.completions)]
    lengths = [(len(c.token_ids), correct) for c, correct, _ in samples]
    rates.add("reward/total", _floats(reward for *_, reward in samples))
    for name in reward_names:
        rates.add(f"reward/{name}", _floats(score for g in groups for score in g.scores[name]))
    rates.add("reward/correct", _floats(correct for _, correct, _ in samples))
    for domain in domains:
        flags = (flag for g in groups if g.prompt.domain == domain for flag in g.correct)
        rates.add(f"reward/correct/{domain}", _floats(flags))
    rates.add("length/mean", _floats(length for length, _ in lengths))
    rates.add("length/correct", _floats(length for length, correct in lengths if correct))
    rates.add("length/incorrect", _floats(length for length, correct in lengths if correct is False))
    rates.add("length/truncated", _floats(c.finish_reason == "length" for c, *_ in samples))
    rates.add("length/repetition", _floats(ends_in_a_loop(c) for c, *_ in samples))
    judged = [g for g in groups if any(flag is not None for flag in g.correct)]
    rates.add("exploration/solve_all", _floats(all(g.correct) for g in judged))
    rates.add("exploration/solve_none", _floats(not any(g.correct) for g in judged))
    rates.add("exploration/zero_signal", _floats(not has_signal(g.rewards) for g in groups))
    rates.add(
        "exploration/group_diversity",
        _floats(len({c.text for c in g.completions}) / len(g.completions) for g in groups),
    )
    rates.add("exploration/group_similarity", _floats(s for g in groups for s in neighbour_similarities(g)))
    return rates


#: Tokens that are compared of an answer: the cost is quadratic, 0.6 ms a pair at this length and 50 ms at 16,384.
MOST_COMPARED = 2048


def neighbour_similarities(group: Group) -> list[float]:
    """Return how alike each sample of a group and the next one are, 0 to 1; G - 1 values.

        similarity(a, b) = 2 LCS(a, b) / (len a + len b)

    over token ids; LCS is the length of the longest common subsequence (the normalised Indel similarity), and two empty
    answers are alike. Samples of a group are exchangeable, so the mean over neighbours has the expectation of the mean
    over all G (G - 1) / 2 pairs, at linear cost. Of longer answers, the first :data:`MOST_COMPARED` tokens.
    """
    samples = [completion.token_ids[:MOST_COMPARED] for completion in group.completions]
    return [Indel.normalized_similarity(one, other) for one, other in pairwise(samples)]


def rollout_values(rollouts: Sequence[Rollout], ranks: Ranks) -> dict[str, float]:
    """Return what is logged of the rollouts that an optimizer step began, those without signal included."""
    rates, seconds = Rates(), Counter[str]()
    for rollout in rollouts:
        rates.merge(rollout.rates)
        seconds.update(rollout.seconds)
    values = rates.compute(ranks.sum, ranks.max)
    slowest = float(ranks.max(torch.tensor(float(seconds["rollout"]))))  # all ranks draw at the same time
    values["system/rollout_tokens_per_s"] = sum(rollout.tokens for rollout in rollouts) / max(slowest, 1e-9)
    values["system/memory_rollout"] = max(rollout.memory for rollout in rollouts)
    values["system/memory_engine"] = engine_memory()
    return values | {f"system/time_{phase}": value for phase, value in seconds.items()}


def has_signal(values: Sequence[float | bool | None]) -> bool:
    """Return whether the known ones among a group's rewards or flags differ by more than rounding: else A is 0."""
    known = [float(value) for value in values if value is not None]
    return bool(known) and max(known) - min(known) > EQUAL_SHARE * max(map(abs, known))


def solve_rate(group: Group) -> float:
    """Return the share of right samples among those that could be judged; 0 where none could."""
    judged = [flag for flag in group.correct if flag is not None]
    return sum(judged) / len(judged) if judged else 0.0


#: Longest n-gram that is looked for at the end of a completion, fewest times it must stand there, and fewest tokens of
#: all of them: numbers such as 1000000 and a row of dashes are no loop.
LONGEST_NGRAM, FEWEST_TIMES, FEWEST_TOKENS = 64, 3, 16


def ends_in_a_loop(completion: Completion) -> bool:
    """Return whether the end of a completion is one n-gram over and over: a sampler that no longer gets anywhere.

    For some n from 1 to 64, each of the last max(3 n, 16) tokens, the stop token apart, equals the one n before it
    wherever that one is among them too.
    """
    ids = completion.token_ids[:-1] if completion.finish_reason == "stop" else completion.token_ids
    for n in range(1, LONGEST_NGRAM + 1):
        size = max(FEWEST_TIMES * n, FEWEST_TOKENS)
        if size > len(ids):
            return False
        if ids[-1] == ids[-1 - n] and ids[len(ids) - size + n :] == ids[len(ids) - size : -n]:
            return True
    return False


def _floats(values: Iterable[float | None]) -> torch.Tensor:
    return torch.tensor([float(value) for value in values if value is not None])
