"""Activations that backward makes again instead of keeping them."""

from functools import partial
from types import MethodType
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from grpo_lit.errors import ConfigError
from grpo_lit.policy.precision import casts_outlive

#: What is made again: norms, whole layers (true), nothing (false).
Recomputed = bool | Literal["norms"]


def recompute(model: PreTrainedModel, what: Recomputed) -> None:
    """Have a part of the activations made again in backward; values and gradients stay the same to the last bit.

    An RMS norm keeps several copies of its input in float32, and is made again in the time that it takes to read them:
    on a CPU ``norms`` takes a sixth less memory at the same speed. A layer keeps its input alone, and costs its forward
    once more. Source: T. Chen et al., "Training Deep Nets with Sublinear Memory Cost" (1604.06174).

    Args:
        model: Changed in place; the names of its weights stay.
        what: Norms, layers or nothing.

    Raises:
        ConfigError: It is none of these, which Python lets through.
    """
    if what == "norms":
        for norm in rms_norms(model):
            norm.forward = partial(_made_again, norm)  # a bound method could not be pickled: no class has its name
    elif not isinstance(what, bool):
        raise ConfigError(f"`model.gradient_checkpointing` expected norms, true or false, but got {what!r}")
    elif what:
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": casts_outlive})


def keep_norms(model: nn.Module) -> None:
    """Have norms keep what they like again; see :func:`recompute`."""
    for norm in rms_norms(model):
        norm.__dict__.pop("forward", None)


def rms_norms(model: nn.Module) -> list[nn.Module]:
    """Return the RMS norms of a model: every architecture of transformers has a class of its own for them.

    Those of recurrent layers are gated: the norm multiplies its output, or its input, by a function of another one.

    ``nn.LayerNorm`` is one kernel, which keeps its input and two numbers a row.
    """
    return [module for module in model.modules() if type(module).__name__.endswith(("RMSNorm", "RMSNormGated"))]


def _made_again(norm: nn.Module, *args: Any, **kwargs: Any) -> Any:
    forward = MethodType(type(norm).forward, norm)
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    settings: Any = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": casts_outlive}
    return checkpoint(forward, *args, **settings, **kwargs)
