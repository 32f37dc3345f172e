"""Turns a training checkpoint into a Hugging Face folder that transformers and vLLM load."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from grpo_lit.errors import ConfigError
from grpo_lit.policy.adapter import LoRA, base_digest, merge, save_adapter
from grpo_lit.policy.checkpoint import load_model, load_tokenizer
from grpo_lit.policy.quantization import NF4
from grpo_lit.strategies.reading import inspect, readable, shapes
from grpo_lit.strategies.saving import check_writable, is_sharded

#: How the policy's weights are named in a checkpoint of GRPOModule.
_PREFIX = "policy.model."


def export(checkpoint: Path, target: Path, dtype: torch.dtype = torch.float32, adapter: bool = False) -> Path:
    """Write the policy of a checkpoint, its tokenizer and generation config to a folder.

    Args:
        checkpoint: A ``.ckpt`` file written by ``fit``, or a ``.ckpt`` folder of shards.
        target: Folder to write; must not hold a model already.
        dtype: Of the written weights.
        adapter: Write the adapter alone, as a folder for peft, instead of merging it into the weights that it was
            trained beside.

    Returns:
        The folder.

    Raises:
        ConfigError: The checkpoint is missing, broken or of another program; its model is not what it was trained from;
            the folder is taken or cannot be written; or there is no adapter.
    """
    if (target / "config.json").exists():
        raise ConfigError(f"`target` expected a folder without a model, but {target} holds one: choose another")
    state = inspect(checkpoint, "checkpoint")
    note, stored = state["grpo_lit"], _of_policy(state["state_dict"])
    source, trained = note["checkpoint"], note.get("adapter")
    if adapter and trained is None:
        raise ConfigError(f"`--adapter` expected a checkpoint of a run with `model.adapter`, but {checkpoint} is whole")
    check_writable(target, "target")
    # transformers wraps `to`, and its wrapper hides the arguments
    model: Any = load_model(source) if trained is None else _adapted(note)
    if trained is not None and note.get("base", digest := base_digest(model)) != digest:
        raise ConfigError(
            f"`checkpoint` expected {source}, beside which its adapter was trained, but that holds other weights now"
        )
    _check_fits(model, stored, source, whole=trained is None)
    with readable(checkpoint, "checkpoint"):
        if is_sharded(checkpoint):  # reads what is asked for, into the model's own tensors
            weights = {f"{_PREFIX}{name}": tensor for name, tensor in model.state_dict().items()}
            torch.distributed.checkpoint.load({"state_dict": weights}, checkpoint_id=checkpoint)
        else:
            model.load_state_dict(stored, strict=trained is None)
    try:
        if adapter:
            save_adapter(model, source, target)
        else:
            if trained is not None:
                merge(model)
            model.to(dtype).save_pretrained(target)
        load_tokenizer(source).save_pretrained(target)
        _let_others_read(target)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"`target` expected a folder that can be written to, but got {target}: {error}") from error
    return target


def _let_others_read(folder: Path) -> None:
    """Give weights the mode of any new file: safetensors makes them for their owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    for file in folder.glob("*.safetensors"):
        file.chmod(0o666 & ~mask)


def _check_fits(model: PreTrainedModel, stored: dict[str, Tensor], source: str, whole: bool) -> None:
    """Refuse a model that was exchanged under its name since the checkpoint was trained from it."""
    here, saved = shapes(model.state_dict()), shapes(stored)
    for name in sorted(here.keys() | saved.keys() if whole else saved.keys()):
        if here.get(name) != saved.get(name):
            raise ConfigError(
                f"`checkpoint` expected weights of {source}, which it was trained from, but that is another model now: "
                f"{name} is {saved.get(name, 'nothing')} in the checkpoint and {here.get(name, 'nothing')} there"
            )


def _adapted(note: dict[str, Any]) -> PreTrainedModel:
    """Return the adapted model that a checkpoint was trained as, before it was trained."""
    dtype = getattr(torch, note["base_dtype"])
    model = load_model(note["checkpoint"], dtype)
    if "quantization" in note:
        NF4(**note["quantization"]).quantize(model, model.get_output_embeddings(), dtype)
    LoRA(**note["adapter"]).inject(model)
    return model


def _of_policy(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(_PREFIX): tensor for name, tensor in stored.items() if name.startswith(_PREFIX)}
