"""Checkpoints that are there whole or not at all, whatever ends the process that writes them."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.strategies import Strategy
from typing_extensions import override

from grpo_lit.errors import ConfigError

#: What a folder of shards holds beside them.
METADATA = "meta.pt"


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place and moves it there; reads files, and folders of shards too.

    Lightning's own writes to the system's temporary folder: where that is another file system, the move is a copy, and
    a process killed in it leaves half a file. Paths that are not local are left to Lightning.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any = None) -> None:
        """Write a file, and replace the one of this name when all of it is on disk."""
        if storage_options is not None or not _is_local_file_protocol(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with begin(target).open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        put_in_place(target)

    @override
    def load_checkpoint(
        self,
        path: _PATH,
        map_location: Callable | None = lambda storage, loc: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a file, or all shards of a folder that FSDP2 wrote, as the file that it would have been."""
        check_readable(Path(path))
        if is_sharded(Path(path)):
            return read_whole(Path(path))
        return super().load_checkpoint(path, map_location, weights_only)

    @override
    def remove_checkpoint(self, path: _PATH) -> None:
        """Take a checkpoint's name from it before it goes: half a folder of shards would look like a whole one."""
        target = Path(path)
        if _is_local_file_protocol(path) and target.is_dir() and not target.is_symlink():
            target.rename(begin(target))
            remove(unfinished(target))
            return
        super().remove_checkpoint(path)


def save_atomically(strategy: Strategy) -> None:
    """Exchange Lightning's way of writing checkpoints; one that the user chose stays."""
    if type(strategy.checkpoint_io) is TorchCheckpointIO:
        strategy.checkpoint_io = AtomicCheckpointIO()


def is_sharded(checkpoint: Path) -> bool:
    """Return whether this is a folder of shards, complete."""
    return (checkpoint / METADATA).is_file()


def check_readable(checkpoint: Path) -> None:
    """Finish what a killed process left, and refuse a folder of anything else than shards.

    Raises:
        ConfigError: It is one, such as those of DeepSpeed.
    """
    finish(checkpoint)
    if checkpoint.is_dir() and not is_sharded(checkpoint):
        raise ConfigError(
            f"`ckpt_path` expected a checkpoint file or a folder of shards, but got {checkpoint}, a folder without "
            f"{METADATA}: those of DeepSpeed are read with configs/strategy/deepspeed.yaml alone"
        )


def read_whole(folder: Path) -> dict[str, Any]:
    """Return a folder of shards in the format of a checkpoint of one process.

    The shards name the parameters in the optimizer's state, one process numbers them in the optimizer's order.
    """
    checkpoint = _load_distributed_checkpoint(folder)
    names = sorted(name for name in checkpoint if name.startswith("optimizer_"))
    checkpoint["optimizer_states"] = [_numbered(checkpoint.pop(name)) for name in names]
    return checkpoint


def _numbered(state: dict[str, Any]) -> dict[str, Any]:
    names = [name for group in state["param_groups"] for name in group["params"]]
    number = {name: index for index, name in enumerate(names)}
    return {
        "state": {number[name]: values for name, values in state["state"].items()},
        "param_groups": [
            {**group, "params": [number[name] for name in group["params"]]} for group in state["param_groups"]
        ],
    }


def begin(target: Path) -> Path:
    """Return where to write a checkpoint, and clear away what killed processes left there."""
    finish(target)
    remove(_aside(target))
    remove(unfinished(target))
    return unfinished(target)


def unfinished(target: Path) -> Path:
    """Return the path beside a checkpoint's at which it is written, a name that nobody takes for one."""
    return target.with_name(f".{target.name}.unfinished")


def put_in_place(target: Path) -> None:
    """Give a checkpoint that was written completely its name.

    A file or a link is replaced in one move. Folders cannot be: the old one is set aside first, and :func:`finish`
    makes the second move where the process was ended between the two. Nothing is set aside before the new one is
    complete.
    """
    written, aside = unfinished(target), _aside(target)
    if os.path.lexists(target) and (written.is_dir() or (target.is_dir() and not target.is_symlink())):
        target.rename(aside)
    written.rename(target)
    _sync(target.parent)
    remove(aside)


def finish(target: Path) -> None:
    """Put a folder in its place that was complete when its process was ended; several ranks may call."""
    if os.path.lexists(_aside(target)) and not os.path.lexists(target):
        try:
            unfinished(target).rename(target)
        except FileNotFoundError:
            return  # another rank was faster


def remove(path: Path) -> None:
    """Remove a file, a link or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def link(target: Path, name: Path) -> None:
    """Let a link point to a checkpoint, without a moment in which there is none."""
    begin(name).symlink_to(os.path.relpath(target, name.parent))
    put_in_place(name)


def sync_file(file: Path) -> None:
    """Wait until a file's content is on disk."""
    with file.open("rb") as content:
        os.fsync(content.fileno())


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}.replaced")


def _sync(folder: Path) -> None:
    """Wait until names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
