"""Turns a training checkpoint into a Hugging Face folder that transformers and vLLM load."""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint

from grpo_lit.errors import ConfigError
from grpo_lit.policy.checkpoint import load_model, load_tokenizer

#: How the policy's weights are named in a checkpoint of GRPOModule.
_PREFIX = "policy.model."

#: What a folder of shards holds beside them.
_METADATA = "meta.pt"

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export(checkpoint: Path, target: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write the policy of a checkpoint, its tokenizer and generation config to a folder.

    Args:
        checkpoint: A ``.ckpt`` file written by ``fit``, or a ``.ckpt`` folder of shards.
        target: Folder to write; must not hold a model already.
        dtype: Of the written weights.

    Returns:
        The folder.

    Raises:
        ConfigError: The file is missing or is no checkpoint of this package, or the folder is taken.
    """
    sharded = (checkpoint / _METADATA).is_file()
    if not (checkpoint.is_file() or sharded):
        raise ConfigError(f"`checkpoint` expected a .ckpt file or a folder of shards, but got {checkpoint}")
    if (target / "config.json").exists():
        raise ConfigError(f"`target` expected a folder without a model, but {target} holds one: choose another")
    file = checkpoint / _METADATA if sharded else checkpoint
    state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    if "grpo_lit" not in state:
        raise ConfigError(f"`checkpoint` expected a file written by grpo-lit fit, but {checkpoint} is not")
    source = state["grpo_lit"]["checkpoint"]
    model: Any = load_model(source)  # transformers wraps `to`, and its wrapper hides the arguments
    if sharded:  # reads what is asked for, into the model's own tensors
        weights = {f"{_PREFIX}{name}": tensor for name, tensor in model.state_dict().items()}
        torch.distributed.checkpoint.load({"state_dict": weights}, checkpoint_id=checkpoint)
    else:
        stored = state["state_dict"].items()
        model.load_state_dict({name.removeprefix(_PREFIX): t for name, t in stored if name.startswith(_PREFIX)})
    model.to(dtype).save_pretrained(target)
    load_tokenizer(source).save_pretrained(target)
    return target


def main() -> None:
    """Command line of ``scripts/export``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "checkpoint", type=Path, help="a checkpoint of a run, e.g. runs/NAME/version_0/checkpoints/last.ckpt"
    )
    parser.add_argument("target", type=Path, help="the folder to write")
    parser.add_argument("--dtype", choices=sorted(_DTYPES), default="float32", help="of the written weights")
    arguments = parser.parse_args()
    try:
        print(export(arguments.checkpoint, arguments.target, _DTYPES[arguments.dtype]))
    except ConfigError as error:
        parser.exit(2, f"error: {error}\n")
