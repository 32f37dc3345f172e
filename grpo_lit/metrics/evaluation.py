"""What is logged of answers to held-out prompts: figures of each prompt, and their means over all prompts."""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from grpo_lit.metrics.intervals import LEVEL, wilson
from grpo_lit.ranks import Ranks
from grpo_lit.rollout import Group

#: Last part of the name of an interval's ends; a domain may well be called low or high.
ENDS = ("ci_low", "ci_high")
#: Enough for bounds with a standard error of 2 % of the interval's width (that of a normal's 2.5 % quantile).
RESAMPLES = 1000


def pass_at(n: int, c: int, j: int) -> float:
    """Return the chance that at least one of j samples is right, drawn without replacement from n of which c are.

        pass@j = 1 - C(n - c, j) / C(n, j)

    Unbiased for the chance that one of j fresh samples is right (https://arxiv.org/abs/2107.03374). Computed in
    integers and rounded once, so that no n is too large for it.

    Args:
        n: Samples that were judged.
        c: Right ones among them.
        j: Samples drawn, 1 to n.
    """
    every = math.comb(n, j)
    return (every - math.comb(n - c, j)) / every


def majority(answers: Sequence[Hashable | None], correct: Sequence[bool]) -> float:
    """Return the chance that the most frequent answer is right (https://arxiv.org/abs/2203.11171).

    Of several answers that are equally frequent, one is drawn: the value is the expectation over that draw, exactly.
    Should a verifier disagree with itself on samples of one answer, the share of right ones stands for it. Samples
    without an answer do not vote; if none votes, the value is 0.

    Args:
        answers: What each sample answers; ``None`` for nothing.
        correct: Whether it is right.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    most = max(votes.values(), default=0)
    # As many samples for each tied answer, so that the mean over samples is the mean over answers.
    chosen = [
        flag for answer, flag in zip(answers, correct, strict=True) if answer is not None and votes[answer] == most
    ]
    return sum(chosen) / len(chosen) if chosen else 0.0


def prompt_figures(
    greedy: Group, sampled: Group | None, answers: Sequence[Hashable | None], correct: str
) -> dict[str, float]:
    """Return what is logged of one prompt, by the last part of its name; NaN where nobody could tell.

    Samples that the verifier abstained on are no samples to avg@k, pass@j and maj@k.

    Args:
        greedy: One answer at temperature 0.
        sampled: k answers at the sampling temperature; ``None`` for k = 0.
        answers: What each of the k answers says, for the vote.
        correct: Name of the reward that says correct: its mean is the accuracy, and not logged again.
    """
    figures = {"greedy": _mean(greedy.correct), **_shape_of(greedy, correct, "")}
    if sampled is None:
        return figures
    k = len(sampled.completions)
    judged = [(answer, flag) for answer, flag in zip(answers, sampled.correct, strict=True) if flag is not None]
    flags = [flag for _, flag in judged]
    figures[f"avg@{k}"] = _mean(flags)
    for j in sorted({2**i for i in range(1, k.bit_length())} | {k} - {1}):  # pass@1 is avg@k
        figures[f"pass@{j}"] = pass_at(len(flags), sum(flags), j) if len(flags) >= j else math.nan
    figures[f"maj@{k}"] = majority([answer for answer, _ in judged], flags) if judged else math.nan
    return figures | _shape_of(sampled, correct, f"@{k}")


def interval(values: np.ndarray, seed: int = 0, share: bool = True) -> tuple[float, float]:
    """Return the bounds of an interval of the mean over prompts, at :data:`LEVEL`.

    Where each prompt is right or wrong, and all values 0 or 1, Wilson's: a bootstrap of 0 right of 50 would be the
    point 0. Else percentiles over resamples of the values (Efron). Prompts are resampled, not samples: those of one
    prompt are alike, and an interval that took them for independent would be too narrow
    (https://arxiv.org/abs/2411.00640).

    Args:
        values: One per prompt, at least one.
        seed: Of the resamples: the same for equally many values, so that figures of one set can be compared.
        share: Whether 0 and 1 mean wrong and right; they do not for lengths.
    """
    if share and np.isin(values, (0.0, 1.0)).all():
        return wilson(float(values.mean()), len(values))
    draw = np.random.default_rng(seed)
    means = [values[draw.integers(len(values), size=len(values))].mean() for _ in range(RESAMPLES)]
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


class HeldOutFigures:
    """Figures of every prompt of every held-out set, each prompt once however often and on whatever rank it came."""

    def __init__(self) -> None:
        self._sets: dict[str, dict[int, dict[str, float]]] = {}

    def add(self, name: str, place: int, figures: dict[str, float]) -> None:
        """Add one prompt.

        Args:
            name: The set's key under ``data.val``.
            place: Of the prompt in the set, the same on every rank.
            figures: See :func:`prompt_figures`.
        """
        self._sets.setdefault(name, {})[place] = figures

    def gathered(self, ranks: Ranks) -> "HeldOutFigures":
        """Return those of all ranks, the same on each; all ranks must call."""
        merged = HeldOutFigures()
        for part in ranks.gather(self._sets):
            for name, places in part.items():
                for place, figures in places.items():
                    merged.add(name, place, figures)
        return merged

    def means(self) -> dict[str, float]:
        """Return the mean of each figure over prompts, as ``val/<set>/<figure>``; NaN where no prompt has it."""
        return {name: math.fsum(values) / len(values) if len(values) else math.nan for name, values in self._columns()}

    def bounds(self) -> dict[str, float]:
        """Return the ends of each mean's interval, as ``val/<set>/<figure>/ci_low`` and ``/ci_high``."""
        intervals = {
            name: interval(values, share=not name.rpartition("/")[2].startswith("length"))
            for name, values in self._columns()
            if len(values)
        }
        return {f"{name}/{end}": at for name, ends in intervals.items() for end, at in zip(ENDS, ends, strict=True)}

    def _columns(self) -> Iterable[tuple[str, np.ndarray]]:
        """Return each figure's name with its values in the order of the prompts, NaN left out."""
        for name, places in self._sets.items():
            rows = [places[place] for place in sorted(places)]
            for figure in dict.fromkeys(key for row in rows for key in row):
                values = np.array([row.get(figure, math.nan) for row in rows], dtype=np.float64)
                yield f"val/{name}/{figure}", values[~np.isnan(values)]


def _shape_of(group: Group, correct: str, suffix: str) -> dict[str, float]:
    """Return length, truncation and what the other rewards say: format, say."""
    figures = {
        "length": _mean([float(len(c.token_ids)) for c in group.completions]),
        "truncated": _mean([c.finish_reason == "length" for c in group.completions]),
        **{f"reward_{name}": _mean(scores) for name, scores in group.scores.items() if name != correct},
    }
    return {f"{name}{suffix}": value for name, value in figures.items()}


def _mean(values: Iterable[float | bool | None]) -> float:
    known = [float(value) for value in values if value is not None]
    return sum(known) / len(known) if known else math.nan
