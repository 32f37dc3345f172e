"""The queue of rollouts: prompts on their way through engine and rewards, handed out in the order they were taken."""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from typing import Any

import torch

from grpo_lit.ranks import Ranks
from grpo_lit.rollout import Group, Prompt, Sampling
from grpo_lit.rollouts.asynchronous import Asynchronous, Drawn, Producer, Round
from grpo_lit.rollouts.handover import Handover, HandoverUpdates
from grpo_lit.rollouts.sampler import Sampler

#: Returns that many new prompts with their epochs, or fewer, the same on every rank.
Take = Callable[[int], list[tuple[Prompt, int]]]


@dataclass
class Asked:
    """Prompts and what was drawn for them.

    Attributes:
        prompts: Over all ranks, each with its epoch.
        groups: Scored groups that this rank holds, by their place among the prompts.
        versions: Oldest weights that sampled each on any rank.
        counts: What the rewards counted of them on this rank.
        too_stale: How many prompts' groups were dropped as too stale and drawn again, over all ranks.
        dropped: Lengths of their completions, those of this rank [tokens].
    """

    prompts: list[tuple[Prompt, int]] = field(default_factory=list)
    groups: dict[int, Group] = field(default_factory=dict)
    versions: list[int] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    too_stale: int = 0
    dropped: list[int] = field(default_factory=list)


class RolloutQueue:
    """Hands out scored groups in the order in which their prompts were taken, however long each took: none is passed
    over for being slow.

    All decisions (which prompts, in which order, with which weights) are made in the thread of the learner, the same on
    every rank; without ``settings`` everything is drawn there too, when it is asked for.

    Args:
        sampler: Draws and scores.
        settings: Of asynchronous rollouts; ``None``: synchronous ones.

    Attributes:
        handover: Brings the weights.
    """

    def __init__(self, sampler: Sampler, settings: Asynchronous | None = None) -> None:
        self.sampler, self.settings = sampler, settings
        self.handover = Handover(sampler.engine)
        if settings is not None and settings.in_flight != "wait":
            sampler.updates = HandoverUpdates(settings.in_flight == "resume", self.handover)
        self._producer = Producer(sampler, self.handover, threaded=settings is not None)
        self._rounds: deque[Round] = deque()
        #: Prompts of the first round that were handed out.
        self._handed_out = 0
        self._seconds: dict[str, float] = {}

    def __len__(self) -> int:
        """Return how many prompts are on their way or wait, over all ranks."""
        return sum(len(part.prompts) for part in self._rounds) - self._handed_out

    @property
    def ready(self) -> int:
        """How many of them are drawn and scored on this rank."""
        done = sum(len(part.prompts) for part in self._rounds if part.outcome is not None)
        return done - self._handed_out if done else 0

    @property
    def takes_newest(self) -> bool:
        """Whether what is begun takes the newest weights there are, not those decided for it."""
        return self.settings is not None and self.settings.takes_newest

    # ------------------------------------------------------------------ in and out

    def ask(self, count: int, take: Take, sampling: Sampling, ranks: Ranks, oldest: int | None = None) -> Asked:
        """Return the groups of the next prompts; all ranks must call.

        Args:
            count: How many; fewer where ``take`` gives no more.
            take: Gives new prompts for those that are not on their way yet.
            sampling: How new ones are drawn.
            ranks: All processes.
            oldest: Groups of older weights are dropped, and their prompts drawn again with the newest.
        """
        self._begin_again(sampling, ranks)
        if count > len(self):
            self._begin(take(count - len(self)), sampling, ranks)
        asked = Asked()
        self._hand_out(asked, self._pop(count))
        if self.settings is not None:
            asked.versions = [-v for v in ranks.max(-torch.tensor(asked.versions)).tolist()]
        if oldest is not None and (late := [i for i, v in enumerate(asked.versions) if v < oldest]):
            self._draw_again(asked, late, sampling, ranks)
        return asked

    def fill(self, sizes: Iterable[int], take: Take, sampling: Sampling, ranks: Ranks) -> None:
        """Begin what the next rollouts will ask for, as far as it is not on its way; all ranks must call.

        Args:
            sizes: Prompts of the first round of each.
            take: Gives new prompts.
            sampling: How they are drawn.
            ranks: All processes.
        """
        self._begin_again(sampling, ranks)
        needed = 0
        for size in sizes:
            needed += size
            if needed > len(self):
                self._begin(take(needed - len(self)), sampling, ranks)

    def _begin(self, prompts: list[tuple[Prompt, int]], sampling: Sampling, ranks: Ranks) -> None:
        part = Round.of(prompts, ranks, sampling)
        self._rounds.append(part)
        self._start(part)

    def _start(self, part: Round) -> None:
        part.version = None if self.takes_newest else self.handover.version
        self._producer.start(part)

    def _begin_again(self, sampling: Sampling, ranks: Ranks) -> None:
        """Begin rounds that were interrupted: by the end of the run whose checkpoint they come from, or of a fit."""
        for part in self._rounds:
            if part.drawn is None and part.future is None:
                part.mine, part.sampling = Round.of(part.prompts, ranks, sampling).mine, sampling
                self._start(part)

    def _pop(self, count: int) -> list[tuple[Round, range]]:
        """Take prompts off the queue: rounds, and places in each."""
        popped = []
        while self._rounds and count > 0:
            first, start = self._rounds[0], self._handed_out
            self._handed_out = min(start + count, len(first.prompts))
            popped.append((first, range(start, self._handed_out)))
            count -= self._handed_out - start
            if self._handed_out == len(first.prompts):
                self._rounds.popleft()
                self._handed_out = 0
        return popped

    def _hand_out(self, asked: Asked, popped: Iterable[tuple[Round, Sequence[int]]]) -> None:
        for part, places in popped:
            drawn = self._awaited(part)
            for phase, seconds in drawn.seconds.items():
                self._took(phase, seconds)
            asked.counts.update(drawn.counts)
            drawn.seconds.clear()
            drawn.counts.clear()
            mine = dict(zip(part.mine, drawn.groups, strict=True))
            for place in places:
                if place in mine:  # copied: a checkpoint may yet write what the rewards said
                    asked.groups[len(asked.prompts)] = mine[place].copied()
                asked.prompts.append(part.prompts[place])
                # Only who holds a group knows its oldest token; without settings, versions are not brought together.
                is_known = self.settings is not None and place in mine
                asked.versions.append(mine[place].oldest_version if is_known else drawn.version)

    def _awaited(self, part: Round) -> Drawn:
        started, waits = time.perf_counter(), part.outcome is None
        drawn = part.result()
        if self.settings is not None:
            self._took("wait_rollout", time.perf_counter() - started if waits else 0.0)
        return drawn

    def _took(self, phase: str, seconds: float) -> None:
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    def _draw_again(self, asked: Asked, late: list[int], sampling: Sampling, ranks: Ranks) -> None:
        """Put groups of the newest weights in the place of those that are too stale."""
        part = Round.of([asked.prompts[i] for i in late], ranks, sampling)
        self._start(part)
        new = Asked()
        self._hand_out(new, [(part, range(len(late)))])
        asked.too_stale += len(late)
        for place, i in enumerate(late):
            if old := asked.groups.pop(i, None):
                asked.dropped += [len(completion.token_ids) for completion in old.completions]
            if place in new.groups:
                asked.groups[i] = new.groups[place]
        asked.groups = dict(sorted(asked.groups.items()))
        versions = [-v for v in ranks.max(-torch.tensor(new.versions)).tolist()]
        for i, version in zip(late, versions, strict=True):
            asked.versions[i] = version
        asked.counts.update(new.counts)

    # ------------------------------------------------------------------ the thread that draws

    def check(self) -> None:
        """Raise what has ended a round badly, as soon as it has."""
        for part in self._rounds:
            if part.failure is not None:
                raise part.failure

    def wait_for_copy(self) -> None:
        """Wait until the weights handed over last are in the engine, where a round is to be drawn with them."""
        for part in self._rounds:
            if part.future is not None and part.version is not None and part.version == self.handover.version:
                part.begun.wait()
                return

    def settle(self) -> None:
        """Wait until nothing is being drawn: from then on, and until the next prompts, the engine is the caller's."""
        wait([part.future for part in self._rounds if part.future is not None])

    def take_seconds(self) -> dict[str, float]:
        """Return the seconds of each phase that made what was handed out since the last call.

        ``wait_rollout`` is the time that the learner waited for groups, ``wait_learner`` that in which nothing was
        there to be drawn.
        """
        seconds, self._seconds = self._seconds, {}
        return seconds

    def give_up(self) -> None:
        """Begin nothing more, and let what is being drawn end as soon as it can; :meth:`join` must follow."""
        self._producer.give_up()

    def join(self) -> None:
        """Wait for the end of the thread; what it did not finish is drawn again when it is asked for."""
        self._producer.join()
        self.handover.reset()
        for part in self._rounds:
            if part.outcome is None:
                part.future = None

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return where the queue stands; its rounds are written out by :mod:`grpo_lit.data.state`, once they count."""
        return {"handed_out": self._handed_out, "rounds": list(self._rounds)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken."""
        self._handed_out, self._rounds = state["handed_out"], deque(state["rounds"])
