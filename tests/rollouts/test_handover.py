"""Weights reach the engine as they were when they were handed over, one copy at a time."""

import threading
import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from bare import RecordingEngine

from grpo_lit.rollouts.handover import Handover, Probe, copied

PROBE = Probe((1, 2, 3), (-1.0, -2.0))


class Sink(RecordingEngine):
    """Keeps what it is given, and says of every text what it is told to."""

    weight_dtype = torch.bfloat16

    def __init__(self, *said: float) -> None:
        super().__init__()
        self.said = list(said) or [-1.0, -2.0]
        self.loaded: list[tuple[int, dict[str, torch.Tensor]]] = []

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        self.loaded.append((version, dict(weights)))

    def score(self, ids: Any) -> list[float]:
        return self.said


def test_a_copy_is_what_the_weights_were_in_the_precision_of_the_engine() -> None:
    # 1 + 2^-10 needs more than the 8 bits of bfloat16: 1 is left of it, in a matrix. Vectors stay as they are.
    matrix, vector = torch.full((2, 2), 1 + 2.0**-10), torch.full((2,), 1 + 2.0**-10)
    sink = Sink()
    handover = Handover(sink)
    handover.put([("m", matrix), ("v", vector)], 7, PROBE)
    matrix.zero_(), vector.zero_()  # the optimizer goes on in place
    assert sink.loaded == []
    handover.take_up(7)
    ((version, weights),) = sink.loaded
    assert version == handover.version == 7
    torch.testing.assert_close(weights["m"], torch.ones(2, 2, dtype=torch.bfloat16), rtol=0, atol=0)
    torch.testing.assert_close(weights["v"], torch.full((2,), 1 + 2.0**-10), rtol=0, atol=0)
    handover.take_up(7)
    assert len(sink.loaded) == 1  # it is gone


def test_tied_weights_are_copied_once_and_freed_ones_are_not_taken_for_each_other() -> None:
    tied = torch.randn(3, 2)
    copies = dict(copied([("embed", tied), ("head", tied), ("flat", tied.view(6))], None))
    assert copies["embed"].data_ptr() == copies["head"].data_ptr() != tied.data_ptr()
    assert copies["flat"].shape == (6,)
    # A gathered shard is freed after its turn, and the next may lie at the same address.
    passing = dict(copied(((str(n), torch.full((64, 64), float(n))) for n in range(4)), None))
    assert [float(passing[str(n)][0, 0]) for n in range(4)] == [0, 1, 2, 3]


def test_there_is_one_copy_at_a_time_and_only_the_one_asked_for_is_loaded() -> None:
    sink = Sink()
    handover = Handover(sink)
    handover.put([("m", torch.ones(2, 2))], 1, PROBE)
    first = weakref.ref(handover._copy.weights[0][1])
    handover.put([("m", torch.ones(2, 2))], 2, PROBE)
    assert first() is None
    handover.take_up(1)
    assert sink.loaded == []
    handover.take_up(None)
    assert [version for version, _ in sink.loaded] == [2]
    handover.put([("m", torch.ones(2, 2))], 3, PROBE)
    handover.load([("m", torch.ones(2, 2))], 3, PROBE)  # an evaluation comes first: nothing is left to take up
    handover.take_up(3)
    assert [version for version, _ in sink.loaded] == [2, 3]


def test_a_new_copy_waits_for_a_load_in_progress() -> None:
    loading, go_on, order = threading.Event(), threading.Event(), []

    class Slow(Sink):
        """Loads until it is told to go on."""

        def load_weights(self, weights: Any, version: int) -> None:
            loading.set()
            assert go_on.wait(10)
            order.append("loaded")

    handover = Handover(Slow())
    handover.put([], 1, PROBE)
    thread = threading.Thread(target=handover.take_up, args=(1,))
    thread.start()
    assert loading.wait(10)
    threading.Timer(0.05, go_on.set).start()
    handover.put([], 2, PROBE)
    order.append("copied")
    thread.join(10)
    assert order == ["loaded", "copied"]


def test_bytes_are_counted_as_they_came_copied_or_not() -> None:
    weights = [("m", torch.ones(2, 3)), ("v", torch.ones(5))]
    handover = Handover(Sink())
    handover.put(weights, 1, PROBE)
    assert handover.take_bytes() == 4 * (6 + 5)
    handover.load(weights, 2, PROBE)
    handover.load(weights[:1], 3, PROBE)
    assert handover.take_bytes() == 4 * (6 + 5 + 6)
    assert handover.take_bytes() == 0


@pytest.mark.parametrize(("said", "gap"), [((-1.0, -2.0), 0.0), ((-1.5, -2.1), 0.3), ((float("nan"), -2.0), torch.inf)])
def test_the_gap_of_engine_and_learner_is_told_once(said: tuple[float, ...], gap: float) -> None:
    handover = Handover(Sink(*said))
    handover.load([], 0, PROBE)
    assert handover.take_gap() == pytest.approx(gap)
    assert handover.take_gap() == 0.0
