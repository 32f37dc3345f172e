"""What Lightning's precisions mean here: the dtype of the weights, and what stays float32 whatever they have."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from grpo_lit.errors import ConfigError


def weights_dtype(precision: str) -> torch.dtype:
    """Return the dtype that the policy is built in under a Trainer's precision.

    Args:
        precision: Of the Trainer: ``32-true``, ``bf16-mixed`` (float32 weights, cast where they are multiplied) or
            ``bf16-true`` (bf16 weights and gradients).

    Raises:
        ConfigError: For float16, whose gradients vanish without loss scaling.
    """
    if precision.startswith("16"):
        raise ConfigError(f"`trainer.precision` expected 32-true or bf16-mixed, but got {precision}: no loss scaling")
    return torch.bfloat16 if precision == "bf16-true" else torch.float32


@contextmanager
def float32_by_default() -> Iterator[None]:
    """Make tensors float32 where no dtype is named; also a decorator.

    Lightning's ``bf16-true`` makes bf16 the default within a step. The model needs no default, and everything else of a
    step would lose by it: a count of 1234 tokens is 1232 in bf16.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(default)


def apply_but_keep(module: nn.Module, apply: Callable[[], object]) -> None:
    """Convert a module as ``apply`` does, but leave its buffers the dtype they had.

    The angles of rotary positions are buffers: those of bf16 frequencies are off by radians after some hundred tokens,
    and ``module.to(bfloat16)``, which is how ``bf16-true`` converts a model, makes no exception for them.

    Args:
        module: What ``apply`` converts.
        apply: Converts devices, dtypes or both.
    """
    before: dict[str, Tensor] = dict(module.named_buffers())
    apply()
    for name, buffer in module.named_buffers():
        if buffer.dtype != before[name].dtype:
            owner, _, last = name.rpartition(".")
            module.get_submodule(owner)._buffers[last] = before[name].to(buffer.device)
