"""The sampler: prompts in, scored groups out."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import islice

from grpo_lit.errors import EngineError
from grpo_lit.rewards.combination import RewardCombination
from grpo_lit.rollout import Completion, Group, Prompt, Request, Sampling, group_requests
from grpo_lit.rollouts.dynamic import DynamicSampling
from grpo_lit.rollouts.engine import Engine
from grpo_lit.rollouts.in_flight import Updates


class Sampler:
    """Draws and scores completions.

    Args:
        engine: Who draws.
        rewards: Who scores.
        seed: The run's seed.
        parts: Calls of the engine that the prompts are cut into. With several, the rewards of one are computed, in a
            thread, while the next is drawn.
        dynamic: May ask for a probe of every prompt.

    Attributes:
        ended: Set from another thread to end :meth:`scored_groups` as soon as the group that is being scored is done.
        updates: Where the engine finds new weights while it draws; ``None``: it gets them between two calls only.
    """

    def __init__(
        self,
        engine: Engine,
        rewards: RewardCombination,
        seed: int,
        parts: int = 1,
        dynamic: DynamicSampling | None = None,
    ) -> None:
        self.engine, self.rewards, self.seed, self.parts, self.dynamic = engine, rewards, seed, parts, dynamic
        self.ended = threading.Event()
        self.updates: Updates | None = None
        #: Seconds of each phase since the last :meth:`take_seconds`.
        self._seconds = {"rollout": 0.0, "reward": 0.0, "reward_wait": 0.0}

    def scored_groups(self, prompts: Sequence[tuple[Prompt, int]], sampling: Sampling) -> list[Group]:
        """Return one scored group per (prompt, epoch), in order, to train on.

        Where dynamic sampling asks for a probe, a group that shows no signal in it has no further samples. The others
        are what they would be without a probe, and are scored again as a whole.
        """
        if self.dynamic is None or self.dynamic.probe is None:
            return self.whole_groups(prompts, sampling)
        groups = self.whole_groups(prompts, replace(sampling, completions=self.dynamic.probe))
        promising = [i for i, group in enumerate(groups) if self.dynamic.shows_signal(group)]
        begun = [groups[i] for i in promising]
        whole = self.whole_groups([prompts[i] for i in promising], sampling, begun)
        for i, group in zip(promising, whole, strict=True):
            groups[i] = group
        return groups

    def whole_groups(
        self, prompts: Sequence[tuple[Prompt, int]], sampling: Sampling, begun: Sequence[Group] = ()
    ) -> list[Group]:
        """Return one scored group per (prompt, epoch), in order, with all samples.

        An error or Ctrl-C gets out as soon as the group that is being scored is done.

        Args:
            prompts: Each with its epoch.
            sampling: How completions are drawn.
            begun: Equally many first samples of each prompt; empty: there are none.

        Raises:
            EngineError: It was ended from another thread.
        """
        size = max(-(-len(prompts) // self.parts), 1)
        pending: list[Future[list[Group]]] = []
        scorer, failed = ThreadPoolExecutor(1, "grpo-lit-rewards"), threading.Event()
        try:
            for start in range(0, len(prompts), size):
                self._go_on()
                drawn = self._drawn(prompts[start : start + size], sampling, begun[start : start + size])
                for part in pending:
                    if part.done():
                        part.result()  # a reward that failed meanwhile ends the rollout here
                pending.append(scorer.submit(self._scored, drawn, failed))
            waiting = time.perf_counter()
            groups = [group for part in pending for group in part.result()]
            self._go_on()
        finally:
            failed.set()
            scorer.shutdown(wait=True, cancel_futures=True)
        self._seconds["reward_wait"] += time.perf_counter() - waiting
        return groups

    def _drawn(self, prompts: Sequence[tuple[Prompt, int]], sampling: Sampling, begun: Sequence[Group]) -> list[Group]:
        started, there = time.perf_counter(), len(begun[0].completions) if begun else 0
        new = iter(self._completions(group_requests(prompts, sampling, self.seed, there), sampling))
        self._seconds["rollout"] += time.perf_counter() - started
        before = [group.completions for group in begun] or [()] * len(prompts)
        return [
            Group(prompt, epoch, (*first, *islice(new, sampling.completions - there)))
            for (prompt, epoch), first in zip(prompts, before, strict=True)
        ]

    def _completions(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        if self.updates is None:
            return self.engine.generate(requests, sampling)
        return self.engine.generate_through(requests, sampling, self.updates)

    def _go_on(self) -> None:
        if self.ended.is_set():
            raise EngineError("sampling was ended before it was done")

    def _scored(self, groups: list[Group], failed: threading.Event) -> list[Group]:
        started = time.perf_counter()
        for group in groups:
            if failed.is_set() or self.ended.is_set():
                break  # nobody waits for the groups any more
            self.rewards.score(group)
        self._seconds["reward"] += time.perf_counter() - started
        return groups

    def take_seconds(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call.

        ``reward`` is the rewards' own time, ``reward_<name>`` that of each; ``reward_wait`` is the part of it in which
        nothing was drawn.
        """
        seconds, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        seconds |= {f"reward_{name}": self.rewards.seconds[name] for name in self.rewards.rewards}
        self.rewards.seconds.clear()
        return seconds
