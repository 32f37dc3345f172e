"""Asynchronous rollouts: a thread keeps the engine drawing while the learner trains, within a bound on staleness."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

import torch

from grpo_lit.errors import ConfigError
from grpo_lit.ranks import Ranks
from grpo_lit.rollout import Group, Prompt, Sampling
from grpo_lit.rollouts.handover import Handover
from grpo_lit.rollouts.in_flight import InFlight
from grpo_lit.rollouts.sampler import Sampler


@dataclass(frozen=True)
class Asynchronous:
    """Settings of asynchronous rollouts.

    Rollouts are drawn ahead while the learner trains on earlier ones. Whatever else is set, no sample is trained on
    that is staler than ``max_staleness``, the last of the steps on its rollout included:

        staleness = global_step - weight_version <= max_staleness

    Of ``steps = data.num_updates * data.num_epochs`` on a rollout the last is ``steps - 1`` later than the first. With
    ``max_staleness = steps - 1`` nothing is drawn ahead, which is the synchronous run, bit for bit; each further
    ``steps`` let one more rollout be. The ratio of a stale sample compares with the weights that sampled it. Sources:
    one-step off-policy RLHF (https://arxiv.org/abs/2410.18252), the staleness bound and interruptible rollouts of AReaL
    (https://arxiv.org/abs/2505.24298), in-flight updates with old keys and values (https://arxiv.org/abs/2509.19128).

    Where completions go on across a weight update (``in_flight``), every token keeps the version and the log-prob it
    was sampled with; a sample is as stale as its oldest token. What is drawn then depends on timing.

    Args:
        max_staleness: Most optimizer steps between the weights that sample and those that are trained.
        weight_sync_steps: Optimizer steps after which the engine gets new weights; see ``in_flight``. A resumed run
            begins with those of its checkpoint: it equals one never stopped where it got them at that step too.
        when_stale: ``wait``: nothing is begun that could become too stale, and every rollout has weights that are
            decided beforehand: the same run again gives the same numbers, bit for bit. ``drop``: the engine never waits
            for the learner while the queue has room, and takes the newest weights each time; what is too stale when
            its turn comes is dropped, counted with its lengths, and its prompts are asked again, so that none is
            missed for being slow. What is dropped depends on timing.
        queue_size: Most rollouts drawn ahead.
        in_flight: When the engine takes new weights. ``wait``: between two of its calls, when all completions are
            there; the longest is waited for. ``keep``: at once; completions in progress go on behind keys and values
            of the old weights, so that their later log-probs are of neither policy alone, though near the new one.
            ``resume``: at once; prompt and tokens so far are computed again, and later log-probs are exactly the new
            policy's. Corrections of the sampler (``TruncatedIS``, ``MaskedIS``) see each token's own log-prob.
        stale_old_policy: Old policy of stale samples. ``sampler``: the weights that sampled them; the ratio, and what
            clips it, then holds all of the gap, and corrections see none. ``learner``: the weights before the first
            step on the rollout, as for fresh samples; corrections alone then hold the gap (AReaL's decoupled
            objective). With ``model.old_policy: sampler`` it is the sampler either way.

    Raises:
        ConfigError: For a number out of range.
    """

    max_staleness: int = 1
    weight_sync_steps: int = 1
    when_stale: Literal["wait", "drop"] = "wait"
    queue_size: int = 2
    in_flight: InFlight = "wait"
    stale_old_policy: Literal["sampler", "learner"] = "sampler"

    def __post_init__(self) -> None:
        """Refuse numbers without meaning."""
        for name, bound in {"max_staleness": 0, "weight_sync_steps": 1, "queue_size": 1}.items():
            value = getattr(self, name)
            if value < bound:
                raise ConfigError(f"`data.rollout.asynchronous.{name}` expected to be >= {bound}, but got {value}")

    @property
    def takes_newest(self) -> bool:
        """Whether what is drawn takes the newest weights there are, not those decided for it."""
        return self.when_stale == "drop" or self.in_flight != "wait"

    def slack(self, steps: int) -> int:
        """Return the most staleness that is left for the first of ``steps`` optimizer steps on a rollout."""
        return self.max_staleness - (steps - 1)

    def rollouts_ahead(self, steps: int, staleness: int) -> int:
        """Return how many rollouts may be drawn beyond the one at hand.

        Args:
            steps: Optimizer steps on each.
            staleness: Of the engine's weights now [optimizer steps].
        """
        if self.when_stale == "drop":
            return self.queue_size
        return max(0, min(self.queue_size, (self.slack(steps) - staleness) // steps))


@dataclass
class Drawn:
    """What came of a round.

    Attributes:
        groups: Scored, in the order of the round's ``mine``.
        version: Weights that drew them; the newest of them, where they changed meanwhile.
        seconds: Of each phase; whoever logs them takes them out.
        counts: What the rewards counted meanwhile; taken out alike.
    """

    groups: list[Group]
    version: int
    seconds: dict[str, float] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)


@dataclass
class Round:
    """Prompts that go through engine and rewards together.

    Attributes:
        prompts: Those of all ranks, each with its epoch.
        mine: Places among them of those that this rank draws.
        sampling: How.
        version: Weights that draw them; ``None``: the newest when their turn comes.
        drawn: What came of them.
        future: Where that will come from.
        begun: Set once the weights are in the engine.
    """

    prompts: Sequence[tuple[Prompt, int]]
    mine: Sequence[int] = ()
    sampling: Sampling | None = None
    version: int | None = None
    drawn: Drawn | None = None
    future: Future[Drawn] | None = None
    begun: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def of(cls, prompts: Sequence[tuple[Prompt, int]], ranks: Ranks, sampling: Sampling) -> "Round":
        """Deal prompts out to ranks."""
        return cls(prompts, range(ranks.rank, len(prompts), ranks.world_size), sampling)

    @property
    def failure(self) -> BaseException | None:
        """What ended it badly; ``None`` where nothing has so far."""
        ended = self.future is not None and self.future.done() and not self.future.cancelled()
        return self.future.exception() if ended else None

    @property
    def outcome(self) -> Drawn | None:
        """What came of it; ``None`` where it is not done, has failed, or was given up."""
        if self.drawn is None and self.future is not None and self.future.done():
            self.drawn = None if self.future.cancelled() or self.failure else self.future.result()
        return self.drawn

    def result(self) -> Drawn:
        """Wait for what comes of it.

        Raises:
            BaseException: Whatever ended it badly in the thread that drew.
        """
        if self.drawn is None:
            self.drawn = self.future.result()
        return self.drawn


class Producer:
    """Draws and scores rounds one after the other, in a thread of its own or in the caller's.

    Nothing in that thread talks to other ranks: two threads that use one process group would wait for each other.

    Args:
        sampler: Draws and scores.
        handover: Where new weights wait.
        threaded: Whether in a thread of its own.
    """

    def __init__(self, sampler: Sampler, handover: Handover, threaded: bool) -> None:
        self.sampler, self.handover, self.threaded = sampler, handover, threaded
        self._thread: ThreadPoolExecutor | None = None
        self._idle_since: float | None = None

    def start(self, part: Round) -> None:
        """Begin a round, after those begun before; without a thread it is done on return."""
        if not self.threaded:
            part.drawn = self._draw(part)
            return
        if self._thread is None:
            on_cuda = torch.cuda.is_available()
            prepare: Callable[..., None] | None = torch.cuda.set_device if on_cuda else None
            # A new thread begins on the first device, whatever the rank's own is.
            device = (torch.cuda.current_device(),) if on_cuda else ()
            self._thread = ThreadPoolExecutor(1, "grpo-lit-rollouts", initializer=prepare, initargs=device)
        part.begun = threading.Event()
        part.future = self._thread.submit(self._draw, part)

    def _draw(self, part: Round) -> Drawn:
        started, idle_since = time.perf_counter(), self._idle_since
        try:
            self.handover.take_up(part.version)
        finally:
            part.begun.set()
        seconds = {"sync": time.perf_counter() - started}
        before = Counter(self.sampler.rewards.counters())
        groups = self.sampler.scored_groups([part.prompts[i] for i in part.mine], part.sampling)
        self.handover.compare()
        seconds |= self.sampler.take_seconds()
        if through := self.handover.take_seconds():
            seconds["rollout"] -= through
            seconds["sync"] += through
        if self.threaded:
            seconds["wait_learner"] = 0.0 if idle_since is None else started - idle_since
        counts = Counter(self.sampler.rewards.counters())
        counts.subtract(before)
        self._idle_since = time.perf_counter()
        return Drawn(groups, self.sampler.engine.weight_version, seconds, counts)

    def give_up(self) -> None:
        """Begin no further round, and let the one at hand end as soon as it can."""
        if self._thread is not None:
            self.sampler.ended.set()
            self._thread.shutdown(wait=False, cancel_futures=True)

    def join(self) -> None:
        """Wait for the end of the thread; a later round starts another."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        self._thread, self._idle_since = None, None
        self.sampler.ended.clear()
