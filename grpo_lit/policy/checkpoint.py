"""Loading a model and its tokenizer from a folder, a GGUF file or the Hugging Face hub.

Every mistake in ``model.checkpoint`` ends here, in a few lines that name the key and the fix.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from grpo_lit.errors import ConfigError
from grpo_lit.policy.fetch import hub_problem
from grpo_lit.policy.gguf import converted_gguf

#: Context length of an architecture without one (state space, ALiBi): more than any run asks for.
NO_LIMIT = 2**31 - 1
#: What stands in configs/base.yaml where a model is to be named.
NOT_SET = "???"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_NOISE = re.compile(r"dropout|pdrop|layerdrop|drop_path|drop_rate|jitter")
_FETCH = "`scripts/fetch_model` makes one that needs no hub, and prints its path."


def resolve_checkpoint(checkpoint: str) -> str:
    """Return what ``from_pretrained`` and the engines accept: a folder, or a hub id that the hub can be asked for.

    Args:
        checkpoint: Folder, ``.gguf`` file (converted once, then read from the cache) or hub id.

    Raises:
        ConfigError: There is no such thing, or it can only be had from a hub that does not answer.
    """
    if checkpoint == NOT_SET:
        raise ConfigError(_expected(checkpoint, "it is not set", _FETCH))
    path = Path(checkpoint).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        with _readable(checkpoint):
            return str(converted_gguf(path))
    if path.is_dir():
        if (path / "config.json").is_file():
            return str(path)
        raise ConfigError(_expected(checkpoint, "a folder without config.json", _FETCH))
    if path.exists() or path.suffix == ".gguf" or not _HUB_ID.fullmatch(checkpoint):
        raise ConfigError(_expected(checkpoint, "a file" if path.exists() else "nothing there", _FETCH))
    problem = hub_problem()
    if problem is None:
        return checkpoint
    try:  # Asking for the local copy outright spares transformers' own tries, 24 s for each file.
        return snapshot_download(checkpoint, local_files_only=True)
    except LocalEntryNotFoundError:
        raise ConfigError(_expected(checkpoint, f"no such folder, and {problem}", _FETCH)) from None


def load_config(checkpoint: str) -> PretrainedConfig:
    """Return the model's configuration."""
    with _readable(checkpoint):
        return AutoConfig.from_pretrained(resolve_checkpoint(checkpoint))


def load_tokenizer(checkpoint: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer that lies beside the model."""
    source = resolve_checkpoint(checkpoint)
    folder = Path(source)
    if folder.is_dir() and not any(folder.glob("*token*")) and not any(folder.glob("*vocab*")):
        # Some architectures would answer with an empty vocabulary instead of an error.
        raise ConfigError(_expected(checkpoint, "a folder without tokenizer", "Save the model's tokenizer there."))
    with _readable(checkpoint):
        return AutoTokenizer.from_pretrained(source)


def load_model(
    checkpoint: str, dtype: torch.dtype = torch.float32, attn_implementation: str = "auto"
) -> PreTrainedModel:
    """Return the causal language model, every source of randomness in its forward pass switched off.

    Args:
        checkpoint: Folder, ``.gguf`` file or hub id.
        dtype: Of the weights. bfloat16 weights do not move at learning rates of reinforcement learning: keep float32.
        attn_implementation: As in transformers; ``auto`` is ``sdpa``, or ``eager`` where attention logits are
            soft-capped, which SDPA leaves out without a word.

    Raises:
        ConfigError: Missing, unreadable, incomplete, or no causal language model.
    """
    source = resolve_checkpoint(checkpoint)
    config = load_config(checkpoint)
    silence_config(config)
    attention = _attention(config, attn_implementation)
    with _readable(checkpoint):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, config=config, dtype=dtype, attn_implementation=attention, output_loading_info=True
        )
    model, report = loaded
    if missing := sorted(report["missing_keys"]):  # transformers fills these at random and warns
        found = f"weights without {missing[0]} and {len(missing) - 1} more of a {type(model).__name__}"
        raise ConfigError(_expected(checkpoint, found, "Is this an adapter, or a model for another task?"))
    silence_modules(model)
    return model


def empty_model(
    checkpoint: str, dtype: torch.dtype = torch.float32, attn_implementation: str = "auto"
) -> PreTrainedModel:
    """Return what :func:`load_model` does with parameters on the meta device, which takes no memory; buffers are real.

    Args:
        checkpoint: Folder, ``.gguf`` file or hub id.
        dtype: Of the parameters.
        attn_implementation: As for :func:`load_model`.
    """
    config = load_config(checkpoint)
    silence_config(config)
    attention = _attention(config, attn_implementation)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    model.tie_weights()
    silence_modules(model)
    return model


def silence_config(config: PretrainedConfig) -> None:
    """Set every dropout probability and routing noise of a configuration to 0, nested ones included.

    New, old and reference log-probs come from separate forward passes: with dropout their ratio is not 1 and their KL
    not 0 for equal weights (two passes of an untrained GPT-2 at its default 0.1 give ratios of 0.985 to 1.084).
    """
    for name, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            silence_config(value)
        elif _is_noise(name, value):
            setattr(config, name, 0.0)


def silence_modules(model: nn.Module) -> None:
    """Set dropout probabilities held by modules to 0; for what is added to a model after loading, such as LoRA."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if _is_noise(name, value):
                setattr(module, name, 0.0)


def stop_token_ids(checkpoint: str) -> tuple[int, ...]:
    """Return every token that ends a completion: those of the generation config and the tokenizer's.

    Raises:
        ConfigError: There is none, so that every completion would run to the cap.
    """
    source = resolve_checkpoint(checkpoint)
    try:
        generation = GenerationConfig.from_pretrained(source)
    except OSError:  # the file is optional
        generation = GenerationConfig.from_model_config(load_config(checkpoint))
    return join_stop_tokens(load_tokenizer(checkpoint), generation)


def join_stop_tokens(tokenizer: PreTrainedTokenizerBase, generation: GenerationConfig) -> tuple[int, ...]:
    """Return the union of both stop sets, sorted; see :func:`stop_token_ids`."""
    stops = {tokenizer.eos_token_id}
    listed = generation.eos_token_id
    stops |= set(listed) if isinstance(listed, list) else {listed}
    stops.discard(None)
    if not stops:
        raise ConfigError(
            "`model.checkpoint` expected a tokenizer or generation_config.json with an end-of-sequence token, but got "
            "neither: no completion could ever end. Set `eos_token_id` in the folder's generation_config.json."
        )
    return tuple(sorted(stops))


def context_length(checkpoint: str) -> int:
    """Return the most tokens the model's positions reach, ``NO_LIMIT`` where the architecture has none."""
    config = load_config(checkpoint).get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length"):
        if value := getattr(config, name, None):
            return int(value)
    return NO_LIMIT


def steady_length(checkpoint: str) -> int:
    """Return the most tokens up to which a position is rotated alike whatever else a micro-batch holds.

    Dynamic and long RoPE choose their frequencies by the longest sequence of a forward pass: beyond this length a
    sequence's log-probs depend on what it is batched with. ``NO_LIMIT`` for every other model.
    """
    config = load_config(checkpoint).get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope] if "rope_type" in rope else [part for part in rope.values() if isinstance(part, dict)]
    limits = [
        int(kind.get("original_max_position_embeddings") or config.max_position_embeddings)
        for kind in kinds
        if kind.get("rope_type") in ("dynamic", "longrope")
    ]
    return min(limits, default=NO_LIMIT)


def _attention(config: PretrainedConfig, asked: str) -> str:
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    if asked == "sdpa" and capped:
        raise ConfigError(
            f"`attn_implementation` expected eager or auto for {config.model_type}, whose attention logits are "
            "soft-capped, but got sdpa, which would leave the cap out"
        )
    if asked == "auto":
        return "eager" if capped else "sdpa"
    return asked


def _is_noise(name: str, value: object) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool) and value != 0 and bool(_NOISE.search(name))


@contextmanager
def _readable(checkpoint: str) -> Iterator[None]:
    """Turn what transformers says of an unreadable checkpoint into one line that names the key."""
    try:
        yield
    except ConfigError:
        raise
    except (OSError, ValueError, SafetensorError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(_expected(checkpoint, reason, _FETCH)) from error


def _expected(checkpoint: str, found: str, fix: str) -> str:
    return (
        f"`model.checkpoint` expected a Hugging Face folder, a .gguf file or a hub id, but got {checkpoint!r}: "
        f"{found.rstrip('.')}. {fix}"
    )
