"""Turns a training checkpoint into a Hugging Face folder that transformers and vLLM load."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint
from torch import Tensor
from transformers import PreTrainedModel

from grpo_lit.errors import ConfigError
from grpo_lit.policy.adapter import LoRA, merge, save_adapter
from grpo_lit.policy.checkpoint import load_model, load_tokenizer
from grpo_lit.policy.quantization import NF4
from grpo_lit.strategies.saving import METADATA, is_sharded

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
        ConfigError: The file is missing or is no checkpoint of this package, the folder is taken, or there is no
            adapter.
    """
    sharded = is_sharded(checkpoint)
    if not (checkpoint.is_file() or sharded):
        raise ConfigError(f"`checkpoint` expected a .ckpt file or a folder of shards, but got {checkpoint}")
    if (target / "config.json").exists():
        raise ConfigError(f"`target` expected a folder without a model, but {target} holds one: choose another")
    file = checkpoint / METADATA if sharded else checkpoint
    state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    if "grpo_lit" not in state:
        raise ConfigError(f"`checkpoint` expected a file written by grpo-lit fit, but {checkpoint} is not")
    note = state["grpo_lit"]
    source, trained = note["checkpoint"], note.get("adapter")
    if adapter and trained is None:
        raise ConfigError(f"`--adapter` expected a checkpoint of a run with `model.adapter`, but {checkpoint} is whole")
    # transformers wraps `to`, and its wrapper hides the arguments
    model: Any = load_model(source) if trained is None else _adapted(note, state["state_dict"])
    if adapter:
        save_adapter(model, source, target)
        load_tokenizer(source).save_pretrained(target)
        return target
    if trained is not None:
        merge(model)
    elif sharded:  # reads what is asked for, into the model's own tensors
        weights = {f"{_PREFIX}{name}": tensor for name, tensor in model.state_dict().items()}
        torch.distributed.checkpoint.load({"state_dict": weights}, checkpoint_id=checkpoint)
    else:
        model.load_state_dict(_of_policy(state["state_dict"]))
    model.to(dtype).save_pretrained(target)
    load_tokenizer(source).save_pretrained(target)
    return target


def _adapted(note: dict[str, Any], stored: dict[str, Tensor]) -> PreTrainedModel:
    """Return the adapted model that a checkpoint was trained as."""
    dtype = getattr(torch, note["base_dtype"])
    model = load_model(note["checkpoint"], dtype)
    if "quantization" in note:
        NF4(**note["quantization"]).quantize(model, model.get_output_embeddings(), dtype)
    LoRA(**note["adapter"]).inject(model)
    model.load_state_dict(_of_policy(stored), strict=False)  # fit has made sure that nothing is missing
    return model


def _of_policy(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(_PREFIX): tensor for name, tensor in stored.items() if name.startswith(_PREFIX)}
