"""The sampler: prompts in, scored groups out."""

import time
from collections.abc import Sequence

from grpo_lit.rewards.combination import RewardCombination
from grpo_lit.rollout import Group, Prompt, Sampling, group_requests
from grpo_lit.rollouts.engine import Engine


class Sampler:
    """Draws and scores completions.

    Args:
        engine: Who draws.
        rewards: Who scores.
        seed: The run's seed.
    """

    def __init__(self, engine: Engine, rewards: RewardCombination, seed: int) -> None:
        self.engine, self.rewards, self.seed = engine, rewards, seed
        #: Wall time of each phase since the last :meth:`take_seconds`.
        self._seconds = {"rollout": 0.0, "reward": 0.0}

    def scored_groups(self, prompts: Sequence[tuple[Prompt, int]], sampling: Sampling) -> list[Group]:
        """Return one scored group per (prompt, epoch), in order."""
        started = time.perf_counter()
        requests = group_requests(prompts, sampling, self.seed)
        completions = self.engine.generate(requests, sampling) if requests else []
        drawn = time.perf_counter()
        size = sampling.completions
        groups = [
            Group(prompt, epoch, tuple(completions[i * size : (i + 1) * size]))
            for i, (prompt, epoch) in enumerate(prompts)
        ]
        for group in groups:
            self.rewards.score(group)
        self._seconds["rollout"] += drawn - started
        self._seconds["reward"] += time.perf_counter() - drawn
        return groups

    def take_seconds(self) -> dict[str, float]:
        """Return the wall time of each phase since the last call [s]."""
        seconds, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return seconds
