"""What a process has freed is handed back."""

import ctypes

import psutil
import pytest
import torch

from grpo_lit.metrics.memory import release_free_memory

CPU = torch.device("cpu")


def held() -> float:
    """Memory of this process [MiB]."""
    return psutil.Process().memory_info().rss / 2**20


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not the GNU C library")
def test_freed_tensors_are_handed_back() -> None:
    release_free_memory(CPU)
    before = held()
    tensors = [torch.zeros(2**13) for _ in range(4096)]  # 32 KiB each: of the heap, and 128 MiB together
    last = tensors[-1]  # lies above the others, so that the heap's end cannot fall by itself
    full = held()
    del tensors
    freed = held()
    release_free_memory(CPU)
    assert full - before > 120
    assert freed - before > 60
    assert held() - before < 16
    assert int(last.sum()) == 0


def test_a_c_library_that_cannot_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(ctypes, "CDLL", lambda name: asked.append(name))  # None has no malloc_trim
    release_free_memory(CPU)
    assert asked == [None]
