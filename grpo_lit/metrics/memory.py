"""Peak memory of a phase."""

import ctypes
import os
from pathlib import Path

import psutil
import torch

from grpo_lit.rollouts.vllm_process import engine_processes

_GIB = 2.0**30
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """Most memory in use since the last :meth:`take` [GiB]: the device's on CUDA, else this process's RSS.

    Linux forgets the peak RSS on request; elsewhere the current RSS is all there is.

    Args:
        device: Whose memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._reset()

    def take(self) -> float:
        """Return the peak since the last call and start anew [GiB]."""
        peak = self._peak() / _GIB
        self._reset()
        return peak

    def _peak(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        if _STATUS.exists():
            for line in _STATUS.read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        return psutil.Process().memory_info().rss

    def _reset(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif _CLEAR.exists():
            try:
                _CLEAR.write_text("5")
            except OSError:  # a container may forbid it: then the peak is that of the whole run
                return


def release_free_memory(device: torch.device) -> None:
    """Hand back what this process has freed, but its allocators keep for later.

    A tensor that is freed stays in the heap of the C library where it is smaller than 32 MiB, and on CUDA in PyTorch's
    cache: what a process seems to hold is then what it has ever held. C libraries other than glibc cannot be asked.

    Args:
        device: Whose cache is emptied beside the heap.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if os.name == "posix":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(ctypes.c_size_t(0))


def engine_memory() -> float:
    """Return the RSS of this rank's engine processes [GiB]; 0 for an engine that lives in this process."""
    total = 0
    for process in engine_processes():
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:  # ended between listing and looking
            continue
    return total / _GIB
