"""Several named rewards, their weighted sum, and the flag that says which completions are correct."""

import difflib
import inspect
import math
import time
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor

from grpo_lit.errors import ConfigError, RewardError
from grpo_lit.metrics.names import TAKEN
from grpo_lit.rewards.reward import Reward
from grpo_lit.rollout import Group, Prompt

#: Batches hold rewards in float32, in which a larger number is infinite.
LARGEST = float(np.finfo(np.float32).max)


@dataclass
class WeightedReward:
    """A reward and what it counts for.

    Args:
        reward: Who scores.
        weight: Factor in the sum; 0 logs it only, a negative one punishes.
        conditional: Count in the sum only for completions that are correct, so that a wrong answer in the right format
            earns nothing. It is logged for all of them.

    Raises:
        ConfigError: For a weight that is not finite.
    """

    reward: Reward
    weight: float = 1.0
    conditional: bool = False

    def __post_init__(self) -> None:
        """Refuse a weight that would make every sum NaN."""
        if not math.isfinite(self.weight):
            raise ConfigError(f"`weight` expected a finite number, but got {self.weight}")


class RewardCombination:
    """The total reward ``sum_k weight_k * score_k`` over the rewards that count, and the correct flag.

    A reward that abstained does not count, nor does a conditional one on a completion that is not known to be correct.
    A sample on which no reward counts gets the total ``None`` and is left out of the step as if never drawn.

    Args:
        rewards: Rewards by the name they are logged under.
        correct: Which of them says that a completion is correct; the first by default.
        correct_at: Its score from which on a completion is correct.

    Attributes:
        seconds: Wall time that each reward has taken so far, by name [s]; whoever logs it may clear it.

    Raises:
        ConfigError: Without rewards, for a name that means something else on TensorBoard, a ``correct`` that is none of
            them, or one that is conditional on itself.
    """

    def __init__(self, rewards: dict[str, WeightedReward], correct: str | None = None, correct_at: float = 1.0) -> None:
        if not rewards:
            raise ConfigError("`rewards` expected at least one reward, but got none: nothing could be learnt")
        for name in rewards:
            if name in TAKEN or "/" in name or not name:
                raise ConfigError(
                    f"`rewards` expected names without '/' that are none of {', '.join(TAKEN)}, but got {name!r}: "
                    f"`reward/{name}` on TensorBoard is another figure. Rename it"
                )
        if correct is not None and correct not in rewards:
            close = difflib.get_close_matches(correct, rewards, n=1) or list(rewards)
            raise ConfigError(
                f"`correct` expected the name of a reward, but got {correct!r}: set it to {' or '.join(close)}"
            )
        self.rewards = rewards
        if clash := sorted(rewards.keys() & self.counters().keys()):
            raise ConfigError(
                f"`rewards` expected names that are no counter of another reward, but got {clash[0]!r}: rename it"
            )
        self.correct = correct or next(iter(rewards))
        self.correct_at = correct_at
        self.seconds: Counter[str] = Counter()
        if self.rewards[self.correct].conditional:
            raise ConfigError(
                f"`correct` expected a reward that is not conditional, but got {self.correct!r}, which would count "
                "only where it says so itself: set its `conditional` to false"
            )

    def score(self, group: Group) -> None:
        """Fill ``group.scores``, ``group.rewards`` and ``group.correct``.

        Raises:
            RewardError: Where a reward fails or returns anything but one finite number or ``None`` per completion, or
                where a total is too large.
        """
        scores = {name: self._timed_scores(name, part.reward, group) for name, part in self.rewards.items()}
        correct = [None if s is None else s >= self.correct_at for s in scores[self.correct]]
        group.scores, group.correct = scores, correct
        group.rewards = [
            self._total({name: column[i] for name, column in scores.items()}, correct[i] is True, group, i)
            for i in range(len(group.completions))
        ]

    def problem(self, prompt: Prompt) -> str | None:
        """Return what keeps the ``correct`` reward from judging a prompt; see :meth:`Reward.problem`.

        ``None`` where another one that looks at prompts at all can judge it: each domain may have its own.
        """
        found = self.rewards[self.correct].reward.problem(prompt)
        if found is None:
            return None
        others = [part.reward for name, part in self.rewards.items() if name != self.correct]
        looking = [reward for reward in others if type(reward).problem is not Reward.problem]
        return None if any(reward.problem(prompt) is None for reward in looking) else found

    def answers(self, group: Group) -> list[Hashable | None]:
        """Return what each completion answers, as the reward that says ``correct`` reads it.

        Raises:
            RewardError: Where that reward fails, or returns what cannot be counted.
        """
        reward = self.rewards[self.correct].reward
        with _named(f"{_where(self.correct, reward, group)} failed to tell answers"):
            found = [reward.answer(group.prompt, completion) for completion in group.completions]
            for answer in found:
                hash(answer)
        return found

    def counters(self) -> dict[str, int]:
        """Return what the rewards have counted since they were made, as ``<name of the reward>_<counter>``."""
        return {
            f"{name}_{counter}": count
            for name, part in self.rewards.items()
            for counter, count in part.reward.counters().items()
        }

    def close(self) -> None:
        """End all processes of the rewards; scoring starts them anew."""
        with ExitStack() as rewards:  # one that fails to close keeps no other from it
            for part in self.rewards.values():
                rewards.callback(part.reward.close)

    def _timed_scores(self, name: str, reward: Reward, group: Group) -> list[float | None]:
        started = time.perf_counter()
        scores = checked_scores(name, reward, group)
        self.seconds[name] += time.perf_counter() - started  # type: ignore[assignment]  # typed for whole counts
        return scores

    def _total(self, scores: dict[str, float | None], correct: bool, group: Group, sample: int) -> float | None:
        parts = {
            name: self.rewards[name].weight * score
            for name, score in scores.items()
            if score is not None and (correct or not self.rewards[name].conditional)
        }
        total = sum(parts.values())
        if not abs(total) <= LARGEST:
            name = max(parts, key=lambda part: abs(parts[part]))
            raise RewardError(
                f"the total reward of prompt {group.prompt.id!r}, sample {sample}, expected a number that float32 "
                f"holds, but got {total:.6g}: {name!r} counts {parts[name]:.3g} in it, lower its scores or its `weight`"
            )
        return total if parts else None


def checked_scores(name: str, reward: Reward, group: Group) -> list[float | None]:
    """Return what a reward says of a group, as plain floats.

    Args:
        name: What to call the reward in errors.
        reward: Who scores.
        group: The completions; G of them.

    Returns:
        G scores, ``None`` where the reward abstained.

    Raises:
        RewardError: Where the reward fails or returns anything but G finite numbers or ``None``.
    """
    where = _where(name, reward, group)
    with _named(f"{where} failed"):
        scores: Any = reward(group.prompt, group.completions)
    if inspect.iscoroutine(scores):
        scores.close()
        raise RewardError(f"{where} expected scores, but got a coroutine: make its `__call__` a plain `def`")
    if not isinstance(scores, (list, tuple, np.ndarray, Tensor)) or getattr(scores, "ndim", 1) == 0:
        raise RewardError(f"{where} expected a list of scores, but got {type(scores).__name__} {scores!r:.80}")
    if len(scores) != len(group.completions):
        raise RewardError(
            f"{where} expected one score per completion ({len(group.completions)}), but got {len(scores)}: return None "
            "for a completion it cannot judge"
        )
    return [_number(score, f"{where}, sample {i}") for i, score in enumerate(scores)]


def _where(name: str, reward: Reward, group: Group) -> str:
    return f"reward {name!r} ({type(reward).__name__}) on prompt {group.prompt.id!r}"


@contextmanager
def _named(failure: str) -> Iterator[None]:
    """Turn whatever a reward raises into an error that says whose it is."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise RewardError(f"{failure}: {type(error).__name__}: {error}") from error


def _number(score: Any, where: str) -> float | None:
    """Return a Python float for any real number, whoever's type it is."""
    if score is None:
        return None
    arrays = (Tensor, np.generic, np.ndarray)
    value = score.item() if isinstance(score, arrays) and math.prod(score.shape) == 1 else score
    if not isinstance(value, Real):
        raise RewardError(f"{where} expected a number or None, but got {type(score).__name__} {score!r:.80}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= LARGEST:
        too_large = ", which float32 does not hold" if math.isfinite(number) else ""
        raise RewardError(
            f"{where} expected a finite number, but got {number}{too_large}: return None where it cannot judge"
        )
    return number
