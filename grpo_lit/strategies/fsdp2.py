"""FSDP2: parameters, gradients and optimizer states in shards, one decoder layer whole at a time."""

from datetime import timedelta

from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.constants import default_pg_timeout
from typing_extensions import override


class FSDP2(ModelParallelStrategy):
    """Lightning's ``ModelParallelStrategy`` with all ranks in the data-parallel group: fully sharded data parallel.

    Policy, reference and old policy lie in shards of 1 / ranks on every rank; a decoder layer is gathered when it is
    computed. Source: Y. Zhao et al., "PyTorch FSDP" (https://arxiv.org/abs/2304.11277); ``torch.distributed.fsdp``.

    Args:
        save_distributed_checkpoint: Every rank writes its shards into a folder, which any number of ranks can load.
            false: rank 0 gathers all and writes one file, as other strategies do.
        reshard_after_forward: Drop a gathered layer after its forward and gather it again in backward; false keeps it:
            more memory, one gathering less.
        process_group_backend: ``nccl``, ``gloo``, ...; ``null``: the device's.
        timeout: Of a collective.
    """

    def __init__(
        self,
        save_distributed_checkpoint: bool = True,
        reshard_after_forward: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta = default_pg_timeout,
    ) -> None:
        super().__init__("auto", 1, save_distributed_checkpoint, process_group_backend, timeout)
        self.reshard_after_forward = reshard_after_forward

    @override
    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()
