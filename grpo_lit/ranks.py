"""Sums and maxima over all ranks, whatever the strategy."""

from typing import Any

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor


class Ranks:
    """The processes of a run, as seen from one of them.

    Every rank must make the same calls in the same order; on one process they return their argument.

    Args:
        strategy: Lightning's strategy, set up.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return int(getattr(self._strategy, "world_size", 1))

    @property
    def rank(self) -> int:
        """Index of this one."""
        return int(getattr(self._strategy, "global_rank", 0))

    def sum(self, values: Tensor) -> Tensor:
        """Sum over ranks, elementwise."""
        return self._reduce(values, "sum")

    def max(self, values: Tensor) -> Tensor:
        """Maximum over ranks, elementwise."""
        return self._reduce(values, "max")

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, any that pickles, in the order of ranks."""
        if self.world_size == 1 or not torch.distributed.is_initialized():
            return [value]
        values: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(values, value)
        return values

    def _reduce(self, values: Tensor, operation: str) -> Tensor:
        # A copy on the root device: collectives work in place, and NCCL knows no CPU tensors.
        copied = values.detach().to(self._strategy.root_device, copy=True)
        reduced = self._strategy.reduce(copied, reduce_op=operation)
        return torch.as_tensor(reduced).to(values.device)
