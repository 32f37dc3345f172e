"""Checkpoints as they are found: taken as a run of this package wrote them, or refused in a few lines that say why."""

import pickle
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from grpo_lit.errors import ConfigError
from grpo_lit.strategies.saving import METADATA, finish, is_sharded

#: What torch, zip and pickle raise of a file that is none of torch's, or no longer whole.
_BROKEN = (
    OSError,
    EOFError,
    RuntimeError,
    ValueError,
    KeyError,
    AttributeError,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    CheckpointException,
)
#: What a user calls the checkpoint.
CKPT_PATH = "ckpt_path"
#: Longest reason that is quoted [characters].
_LENGTH = 160


def inspect(checkpoint: Path, key: str = CKPT_PATH, weights_only: bool | None = None) -> dict[str, Any]:
    """Return a checkpoint without reading its tensors, after a look at whether all of it is there.

    Of a file, tensors are mapped. Of a folder of shards they are on the meta device, and there is no optimizer.

    Args:
        checkpoint: A file, or a folder of shards.
        key: What the user calls it.
        weights_only: As in ``torch.load``; ``None``: nothing but plain types and tensors is unpickled.

    Raises:
        ConfigError: It is missing, broken, incomplete, or of another program.
    """
    check_there(checkpoint, key)
    sharded, safely = is_sharded(checkpoint), weights_only is not False
    file = checkpoint / METADATA if sharded else checkpoint
    with readable(checkpoint, key):
        state = torch.load(file, map_location="cpu", mmap=True, weights_only=safely)
        shapes = _shapes_of_shards(checkpoint, key) if sharded else {}
    check_ours(checkpoint, state, key)
    if sharded:
        state["state_dict"] = {name: torch.empty(size, device="meta") for name, size in shapes.items()}
    return state


def check_there(checkpoint: Path, key: str = CKPT_PATH) -> None:
    """Finish what a killed process left, and refuse what is neither a file nor a folder of shards.

    Raises:
        ConfigError: Nothing is there, or a folder of something else, such as those of DeepSpeed.
    """
    finish(checkpoint)
    if checkpoint.is_file() or is_sharded(checkpoint):
        return
    beside, found = checkpoint.parent, "where nothing is"
    if checkpoint.is_symlink():
        found = f"a link to {checkpoint.readlink()}, which is gone"
    elif checkpoint.is_dir():
        beside, found = checkpoint, f"a folder without {METADATA}"
        if list(checkpoint.glob("*.distcp")):
            found += ": shards of a checkpoint that is not complete"
        elif (checkpoint / "checkpoint").is_dir():
            found += ": those of DeepSpeed are read with configs/strategy/deepspeed.yaml alone"
    others = sorted(path.name for path in beside.glob("*.ckpt") if path.is_file() or is_sharded(path))
    hint = f". There are: {', '.join(others[:4])}" if others else ""
    raise ConfigError(f"`{key}` expected a checkpoint file or a folder of shards, but got {checkpoint}, {found}{hint}")


def check_ours(checkpoint: Path, state: Any, key: str = CKPT_PATH) -> None:
    """Refuse what another program wrote.

    Args:
        checkpoint: Where it lies.
        state: What was read of it.
        key: What the user calls it.

    Raises:
        ConfigError: ``grpo-lit fit`` did not write it.
    """
    if isinstance(state, dict) and "grpo_lit" in state and "pytorch-lightning_version" in state:
        return
    foreign = isinstance(state, dict) and "pytorch-lightning_version" in state
    raise ConfigError(
        f"`{key}` expected a checkpoint written by grpo-lit fit, but {checkpoint} is not: it is "
        f"{'of another module of Lightning' if foreign else 'a file of something else'}. Weights to begin a run with "
        "are named by `model.checkpoint`"
    )


@contextmanager
def readable(checkpoint: Path, key: str = CKPT_PATH) -> Iterator[None]:
    """Turn what is raised of a broken file into one message.

    Args:
        checkpoint: What is read inside.
        key: What the user calls it.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        yield
    except ConfigError:
        raise
    except _BROKEN as error:
        raise ConfigError(
            f"`{key}` expected a whole checkpoint of grpo-lit fit, but {checkpoint} cannot be read: {_reason(error)}. "
            "Was it copied in full? Go on from another one"
        ) from error


def read_whole(folder: Path) -> dict[str, Any]:
    """Return a folder of shards in the format of a checkpoint of one process.

    The shards name the parameters in the optimizer's state, one process numbers them in the optimizer's order.
    """
    checkpoint = _load_distributed_checkpoint(folder)
    names = sorted(name for name in checkpoint if name.startswith("optimizer_"))
    if names:
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


def _shapes_of_shards(folder: Path, key: str) -> dict[str, torch.Size]:
    """Return the shape of every weight, after a look at whether every shard is as long as its table says."""
    table, ends = FileSystemReader(folder).read_metadata(), dict[str, int]()
    for place in table.storage_data.values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, end in sorted(ends.items()):
        size = (folder / name).stat().st_size if (folder / name).is_file() else None
        if size is None or size < end:
            found = "is missing" if size is None else f"ends after {size} of {end} bytes"
            raise ConfigError(
                f"`{key}` expected a whole checkpoint of grpo-lit fit, but in {folder} the shard {name} {found}. Was "
                "it copied in full? Go on from another one"
            )
    weights = {name: part for name, part in table.state_dict_metadata.items() if name.startswith("state_dict.")}
    return {
        name.removeprefix("state_dict."): part.size
        for name, part in weights.items()
        if isinstance(part, TensorStorageMetadata)
    }


def shapes(weights: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a state dict."""
    return {name: tuple(tensor.shape) for name, tensor in weights.items() if isinstance(tensor, Tensor)}


def _reason(error: BaseException) -> str:
    """Return what is wrong, in a line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "WeightsUnpickler error" in line]  # below advice that does not apply
    if isinstance(error, CheckpointException):
        named = lines[-1:]
    line = (named or lines or [type(error).__name__])[0]
    return line.split(". ")[0].rstrip(".")[:_LENGTH]
