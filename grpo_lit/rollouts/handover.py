"""Weights on their way from the learner to the engine."""

import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_lit.rollouts.engine import Engine
from grpo_lit.rollouts.in_flight import Load, Updates
from grpo_lit.rollouts.staging import wire_dtype


@dataclass(frozen=True)
class Probe:
    """A fixed text, and what the learner says of it: weights that did not arrive show here, not in a bad curve.

    Attributes:
        token_ids: The text.
        logprobs: log p of every token but the first, at temperature 1 [nats].
    """

    token_ids: tuple[int, ...]
    logprobs: Sequence[float]


@dataclass(frozen=True)
class _Copy:
    version: int
    weights: deque[tuple[str, Tensor]]
    probe: Probe


class Handover:
    """Gives the engine the learner's weights, and holds both against each other on a fixed text.

    Either at once, while nothing is drawn, or as a copy that the thread which draws takes up between two of its calls:
    the optimizer changes the learner's weights in place meanwhile. There is one copy at a time, in the engine's
    precision, and it is gone when it is loaded.

    Args:
        engine: Who gets them.

    Attributes:
        version: Of the weights handed over last; ``None``: none yet.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.version: int | None = None
        self._lock = threading.Lock()
        self._copy: _Copy | None = None
        self._gap, self._bytes = 0.0, 0
        #: What the learner says of the weights that came in the middle of a generation, until they are compared.
        self._unproven: Probe | None = None
        self._seconds = 0.0

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int, probe: Probe) -> None:
        """Load weights now; nothing may be drawn meanwhile.

        Args:
            weights: Names and tensors, as :meth:`Engine.load_weights` takes them.
            version: ``global_step`` of the learner.
            probe: What the learner says of the probe text with them.
        """
        with self._lock:
            self._copy = None
            self._load(self._counted(weights), version, probe)
        self.version = version

    def put(self, weights: Iterable[tuple[str, Tensor]], version: int, probe: Probe) -> None:
        """Copy weights for :meth:`take_up`; a copy that nobody has taken up is thrown away first.

        Args:
            weights: Names and tensors; all of them are read before this returns.
            version: ``global_step`` of the learner.
            probe: What the learner says of the probe text with them.
        """
        with self._lock:  # a load in progress ends first: its copy is gone before the next is made
            self._copy = None
            self._copy = _Copy(version, copied(self._counted(weights), self.engine.weight_dtype), probe)
        self.version = version

    def take_up(self, version: int | None) -> None:
        """Load the copy that waits, if there is one, in the thread that draws.

        Args:
            version: Leave any other copy waiting; ``None``: take what is there.
        """
        with self._lock:
            if self._copy is not None and version in (None, self._copy.version):
                copy, self._copy = self._copy, None
                self._load(_emptied(copy.weights), copy.version, copy.probe)

    def take_up_through(self, load: Load) -> bool:
        """Load the copy that waits, if there is one, in the middle of a generation; see :class:`Updates`.

        Engine and learner are compared by :meth:`compare`, when the engine has time to score the text.
        """
        if self._copy is None:  # without the lock: the learner holds it while it copies, and nobody waits for that
            return False
        with self._lock:
            if self._copy is None:
                return False
            started, copy, self._copy = time.perf_counter(), self._copy, None
            load(_emptied(copy.weights), copy.version)
            self._unproven = copy.probe
            self._seconds += time.perf_counter() - started
        return True

    def compare(self) -> None:
        """Hold engine and learner against each other where weights came in the middle of what was just drawn."""
        with self._lock:
            probe, self._unproven = self._unproven, None
            if probe is not None:
                self._compare(probe)

    def take_seconds(self) -> float:
        """Return how long the loads of :meth:`take_up_through` took since the last call [s]."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _load(self, weights: Iterable[tuple[str, Tensor]], version: int, probe: Probe) -> None:
        self.engine.load_weights(weights, version)
        self._unproven = None
        self._compare(probe)

    def _compare(self, probe: Probe) -> None:
        said = self.engine.score(probe.token_ids)
        gap = sum(abs(a - b) for a, b in zip(probe.logprobs, said, strict=True)) / max(len(said), 1)
        self._gap = max(self._gap, gap) if gap == gap else float("inf")

    def take_gap(self) -> float:
        """Return the largest mean log-prob gap of engine and learner since the last call [nats]; inf for a NaN."""
        gap, self._gap = self._gap, 0.0
        return gap

    def take_bytes(self) -> int:
        """Return how many bytes of weights were handed over since the last call, in the precision they came in."""
        count, self._bytes = self._bytes, 0
        return count

    def _counted(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            self._bytes += tensor.nbytes
            yield name, tensor

    def reset(self) -> None:
        """Forget everything: the engine is closed."""
        with self._lock:
            self._copy = self._unproven = None
        self.version, self._gap = None, 0.0


@dataclass(frozen=True)
class HandoverUpdates(Updates):
    """New weights for an engine that is drawing: those that wait in a handover.

    Attributes:
        handover: Where they wait.
    """

    handover: Handover

    def take(self, load: Load) -> bool:
        """Load the weights that wait, if some do."""
        return self.handover.take_up_through(load)


def copied(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None) -> deque[tuple[str, Tensor]]:
    """Return a copy in host memory, tied weights once.

    Args:
        weights: Names and tensors.
        dtype: See :func:`grpo_lit.rollouts.staging.wire_dtype`.
    """
    copies: deque[tuple[str, Tensor]] = deque()
    # By address, which says something only as long as the tensor lives: a gathered shard is gone after its turn.
    known: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}
    for name, tensor in weights:
        origin, copy = known.get(tensor.data_ptr(), (lambda: None, tensor))
        other = origin()
        if other is None or other.shape != tensor.shape or other.dtype != tensor.dtype:
            copy = tensor.detach().to("cpu", wire_dtype(tensor, dtype), copy=True)
            known[tensor.data_ptr()] = (weakref.ref(tensor), copy)
        copies.append((name, copy))
    return copies


def _emptied(weights: deque[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors, each freed when the next is asked for."""
    while weights:
        yield weights.popleft()
