"""FSDP2: parameters, gradients and optimizer states in shards, one decoder layer whole at a time."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.constants import default_pg_timeout
from typing_extensions import override

from grpo_lit.strategies import saving
from grpo_lit.strategies.reading import inspect, readable


class FSDP2(ModelParallelStrategy):
    """Lightning's ``ModelParallelStrategy`` with all ranks in the data-parallel group: fully sharded data parallel.

    Policy, reference and old policy lie in shards of 1 / ranks on every rank; a decoder layer is gathered when it is
    computed. Source: Y. Zhao et al., "PyTorch FSDP" (https://arxiv.org/abs/2304.11277); ``torch.distributed.fsdp``.

    Args:
        save_distributed_checkpoint: Every rank writes its shards into a folder, which any number of ranks can load.
            false: rank 0 gathers all and writes one file, as other strategies do.
        reshard_after_forward: Drop a gathered layer after its forward and gather it again in backward; false keeps it:
            more memory, one gathering less.
        cpu_offload: Shards of parameters, gradients and optimizer states wait in the machine's memory, where the
            optimizer steps; a layer is copied to the device when it is gathered.
        process_group_backend: ``nccl``, ``gloo``, ...; ``null``: the device's.
        timeout: Of a collective.
    """

    def __init__(
        self,
        save_distributed_checkpoint: bool = True,
        reshard_after_forward: bool = True,
        cpu_offload: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta = default_pg_timeout,
    ) -> None:
        super().__init__("auto", 1, save_distributed_checkpoint, process_group_backend, timeout)
        self.reshard_after_forward, self.cpu_offload = reshard_after_forward, cpu_offload

    @override
    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        if self.cpu_offload and self.root_device.type == "cuda" and self._process_group_backend is None:
            # Norms are summed, and weights gathered for the engine and for a file, where the shards lie.
            self._process_group_backend = "cpu:gloo,cuda:nccl"
        super().setup_environment()

    @property
    def shards_device(self) -> torch.device:
        """Where the shards lie."""
        return torch.device("cpu") if self.cpu_offload else self.root_device

    @override
    def model_to_device(self) -> None:
        """Move what is not in shards; those lie where they are to be."""
        if not self.cpu_offload:
            super().model_to_device()
            return
        for name, buffer in self.model.named_buffers():
            owner, _, last = name.rpartition(".")
            self.model.get_submodule(owner)._buffers[last] = buffer.to(self.root_device)

    @override
    def setup(self, trainer: Trainer) -> None:
        """Make the optimizer's states where the shards lie."""
        super().setup(trainer)
        if self.cpu_offload and trainer.state.fn == TrainerFn.FITTING:
            _optimizers_to_device(self.optimizers, self.shards_device)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any = None) -> None:
        """Write a checkpoint beside its place, and move it there when every rank's shards are on disk.

        Raises:
            SaveError: A rank could not write its share; the checkpoint of this name is as it was.
        """
        target = Path(self.broadcast(filepath))
        if not self._save_distributed_checkpoint:
            super().save_checkpoint(checkpoint, target, storage_options)
            return
        with saving.written_by_all(self, target) as written:
            super().save_checkpoint(checkpoint, written, storage_options)
            if self.is_global_zero:
                saving.sync_file(written / saving.METADATA)  # torch has seen to the shards

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """Read this rank's share of a folder of shards, or of one file.

        Raises:
            ConfigError: It is missing, broken, of another program, or of another model or optimizer than this run's.
        """
        path = Path(self.broadcast(checkpoint_path))
        module: Any = self.lightning_module
        module.check_checkpoint(inspect(path, weights_only=weights_only))  # torch loads into the model as it reads
        with readable(path):
            return super().load_checkpoint(path, weights_only)
