"""How checkpoints in one file are written and read, in the place of Lightning's own way."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.strategies import Strategy
from typing_extensions import override

from grpo_lit.strategies import saving
from grpo_lit.strategies.reading import check_ours, check_there, inspect, read_whole, readable


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place and moves it there; reads files, and folders of shards too.

    Lightning's own writes to the system's temporary folder: where that is another file system, the move is a copy, and
    a process killed in it leaves half a file. Paths that are not local are left to Lightning.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any = None) -> None:
        """Write a file, and replace the one of this name when all of it is on disk.

        Raises:
            SaveError: It could not be written; the one of this name is as it was.
        """
        if storage_options is not None or not _is_local_file_protocol(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        with saving.kept_on_failure(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            with saving.begin(target).open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            saving.put_in_place(target)

    @override
    def load_checkpoint(
        self,
        path: _PATH,
        map_location: Callable | None = lambda storage, loc: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a file, or all shards of a folder that FSDP2 wrote, as the file that it would have been.

        Raises:
            ConfigError: It is missing, broken, or of another program.
        """
        if not _is_local_file_protocol(path):
            return super().load_checkpoint(path, map_location, weights_only)
        found = Path(path)
        check_there(found)
        if saving.is_sharded(found):
            inspect(found, weights_only=weights_only)
            with readable(found):
                return read_whole(found)
        with readable(found):
            state = super().load_checkpoint(found, map_location, weights_only)
        check_ours(found, state)
        return state

    @override
    def remove_checkpoint(self, path: _PATH) -> None:
        """Take a checkpoint's name from it before it goes: half a folder of shards would look like a whole one."""
        target = Path(path)
        if _is_local_file_protocol(path) and target.is_dir() and not target.is_symlink():
            target.rename(saving.begin(target))
            saving.remove(saving.unfinished(target))
            return
        super().remove_checkpoint(path)


def save_atomically(strategy: Strategy) -> None:
    """Exchange Lightning's way of writing checkpoints; one that the user chose stays."""
    if type(strategy.checkpoint_io) is TorchCheckpointIO:
        strategy.checkpoint_io = AtomicCheckpointIO()


def in_own_format(strategy: Strategy) -> bool:
    """Return whether checkpoints are files of torch or folders of shards: a user's plug-in may write anything."""
    chosen = strategy.checkpoint_io
    return type(getattr(chosen, "checkpoint_io", chosen)) in (TorchCheckpointIO, AtomicCheckpointIO)  # or wrapped ones
