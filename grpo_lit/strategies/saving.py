"""Checkpoints that are there whole or not at all, whatever ends the process that writes them."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning.pytorch.strategies import ParallelStrategy
from torch.distributed.checkpoint.api import CheckpointException

from grpo_lit.errors import ConfigError, SaveError

#: What a folder of shards holds beside them.
METADATA = "meta.pt"
#: How names end that nobody takes for a checkpoint's: of one that is being written, and of one that it replaces.
_UNFINISHED, _ASIDE = ".unfinished", ".replaced"


def is_sharded(checkpoint: Path) -> bool:
    """Return whether this is a folder of shards, complete."""
    return (checkpoint / METADATA).is_file()


def begin(target: Path) -> Path:
    """Return where to write a checkpoint, and clear away what killed processes left there."""
    finish(target)
    remove(_aside(target))
    remove(unfinished(target))
    return unfinished(target)


def unfinished(target: Path) -> Path:
    """Return the path beside a checkpoint's at which it is written, a name that nobody takes for one."""
    return target.with_name(f".{target.name}{_UNFINISHED}")


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


@contextmanager
def kept_on_failure(target: Path, cleans: bool = True) -> Iterator[None]:
    """Give back the room that half a checkpoint takes, and say which one is left.

    Args:
        target: The checkpoint that is written inside.
        cleans: Of several ranks one does.

    Raises:
        SaveError: It could not be written: the disk is full, or the folder is gone.
    """
    try:
        yield
    except (OSError, RuntimeError, CheckpointException) as error:  # torch's writer says RuntimeError of a short write
        cause = _cause(error)
        if cleans and os.path.lexists(_aside(target)) and not os.path.lexists(target):
            _aside(target).rename(target)
        if cleans:
            remove(unfinished(target))
        whole = [path for path in target.parent.glob("*.ckpt") if not path.is_symlink()]
        left = "none was written before it"
        if whole:
            newest = max(whole, key=lambda path: path.stat().st_mtime)
            left = f"those before it are whole: mend that, and go on with --ckpt_path {newest}"
        raise SaveError(f"the checkpoint {target} could not be written: {cause}; {left}") from error


@contextmanager
def written_by_all(strategy: ParallelStrategy, target: Path) -> Iterator[Path]:
    """Yield where all ranks write a checkpoint, and move it to its place when every rank's share is written.

    Args:
        strategy: Of the run.
        target: The checkpoint.

    Raises:
        SaveError: A rank could not write its share; the checkpoint of this name is as it was.
    """
    first = strategy.is_global_zero
    with kept_on_failure(target, cleans=first):
        if first:
            begin(target)
        strategy.barrier()
        yield unfinished(target)
        strategy.barrier()
        if first:
            put_in_place(target)


def check_writable(folder: Path, key: str, needed: int = 0) -> None:
    """Refuse a folder in which nothing can be written, before hours are spent on what goes there.

    Args:
        folder: Made if it is not there.
        key: What the user calls it.
        needed: Room that the first write takes at least [bytes].

    Raises:
        ConfigError: It cannot be made, cannot be written to, or its disk is full.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"\0")
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise ConfigError(
            f"`{key}` expected a folder that can be written to, but got {folder}: {error.strerror or error}"
        ) from error
    if free < needed:
        raise ConfigError(
            f"`{key}` expected room for a checkpoint, {needed / 2**30:.1f} GiB of weights alone, but {folder} has "
            f"{free / 2**30:.1f} GiB: free some, or save elsewhere"
        )


def sweep(folder: Path, idle: float = 0.0) -> None:
    """Clear away what killed processes left half written.

    Args:
        folder: Of checkpoints.
        idle: Only what nothing was written into for so long [s]: another process may be writing now.
    """
    for left in [*folder.glob(f".*{_ASIDE}"), *folder.glob(f".*{_UNFINISHED}")]:
        target = left.with_name(left.name.removesuffix(_ASIDE).removesuffix(_UNFINISHED).removeprefix("."))
        try:
            written = [left, *left.rglob("*")] if left.is_dir() else [left]
            newest = max(path.lstat().st_mtime for path in written)
        except FileNotFoundError:
            continue  # another rank or run was faster
        if time.time() - newest >= idle:
            finish(target)
            remove(_aside(target))
            remove(unfinished(target))


def _cause(error: BaseException) -> str:
    """Return what a person can mend: torch's writer hides the system's message behind its own."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    while not isinstance(error, OSError) and error.__context__ is not None:
        error = error.__context__
    return getattr(error, "strerror", None) or next(iter(str(error).splitlines()), type(error).__name__)


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}{_ASIDE}")


def _sync(folder: Path) -> None:
    """Wait until names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
