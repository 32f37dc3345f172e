"""What Lightning's precisions mean here: the dtype of the weights, and what stays float32 whatever they have."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from grpo_lit.errors import ConfigError

#: Weights already cast in this step, by where they lie; ``None`` outside of one. No context variable: CUDA's backward
#: runs in a thread of its own, and the head casts there too.
_casts: dict[tuple[int, torch.dtype], Tensor] | None = None


def weights_dtype(precision: str) -> torch.dtype:
    """Return the dtype that the policy is built in under a Trainer's precision.

    Args:
        precision: Of the Trainer: ``32-true``, ``bf16-mixed`` (float32 weights, cast where they are multiplied) or
            ``bf16-true`` (bf16 weights and gradients).

    Raises:
        ConfigError: For any other: gradients in float16 vanish without loss scaling.
    """
    if precision not in ("32-true", "bf16-mixed", "bf16-true"):
        raise ConfigError(f"`trainer.precision` expected 32-true, bf16-mixed or bf16-true, but got {precision}")
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


def apply_but_keep(module: nn.Module, apply: Callable[[], object], parameters: Iterable[Tensor] = ()) -> None:
    """Convert a module as ``apply`` does, but leave its buffers and some of its parameters the dtype they had.

    The angles of rotary positions are buffers: those of bf16 frequencies are off by radians after some hundred tokens,
    and ``module.to(bfloat16)``, which is how ``bf16-true`` converts a model, makes no exception for them.

    Args:
        module: What ``apply`` converts.
        apply: Converts devices, dtypes or both.
        parameters: Those of an adapter, which are float32 whatever the precision is.
    """
    buffers, kept = dict(module.named_buffers()), [(parameter, parameter.data) for parameter in parameters]
    apply()
    for name, buffer in module.named_buffers():
        if buffer.dtype != buffers[name].dtype:
            owner, _, last = name.rpartition(".")
            module.get_submodule(owner)._buffers[last] = buffers[name].to(buffer.device)
    for parameter, data in kept:
        if parameter.dtype != data.dtype:
            parameter.data = data.to(parameter.device)


@contextmanager
def cast_once(device: torch.device) -> Iterator[None]:
    """Keep what autocast makes of weights, which must not change meanwhile, for all forward passes within.

    Lightning's autocast keeps nothing, and torch's own cache ends with its context: every micro-batch would cast all
    weights again. Gradients are the same ones. Enter it apart for passes with and without gradient: a weight cast
    without one has none. Without autocast nothing happens.

    Args:
        device: Where the weights are.
    """
    global _casts
    if not torch.is_autocast_enabled(device.type):
        yield
        return
    torch.clear_autocast_cache()
    _casts = {}
    try:
        with torch.autocast(device.type, dtype=torch.get_autocast_dtype(device.type), cache_enabled=True):
            yield
    finally:
        _casts = None
        torch.clear_autocast_cache()


def casts_outlive() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return contexts for ``checkpoint``'s forward and what it makes again, which keeps what :func:`cast_once` does.

    CUDA's backward runs in a thread of its own, where no autocast is open: what is made again opens one, and would
    take its end for the end of all autocast and drop every copy.
    """
    return nullcontext(), _LeftOpen()


class _LeftOpen:
    """Entered once for each backward through a graph."""

    def __enter__(self) -> None:
        # The contexts around this one are checkpoint's own, of the device and of the CPU, and there are no others where
        # autocast is not open: within `cast_once` that is another thread, whose count of contexts may stay above 0.
        around = torch.autocast_increment_nesting() - 1
        if _casts is None or around > 2:
            torch.autocast_decrement_nesting()

    def __exit__(self, *_: object) -> None:
        """Leave everything as it is."""


def cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight in another dtype, without gradient; within :func:`cast_once` each one is cast once."""
    if weight.dtype == dtype or _casts is None:
        return weight.to(dtype)
    key = (weight.data_ptr(), dtype)
    if key not in _casts:
        _casts[key] = weight.detach().to(dtype)
    return _casts[key]


@torch.no_grad()
def hold_casts(module: nn.Module, dtype: torch.dtype) -> None:
    """Hold the frozen weights of linear layers in the dtype to which autocast would cast them at every use.

    Whatever else a layer's weight is used for keeps its dtype: an embedding tied to the output layer, a norm.

    Args:
        module: Changed in place.
        dtype: Autocast's.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear | Conv1D)]
    own = {id(layer) for layer in layers}
    elsewhere = {id(p) for part in module.modules() if id(part) not in own for p in part.parameters(recurse=False)}
    for layer in layers:
        for parameter in layer.parameters(recurse=False):
            if not parameter.requires_grad and id(parameter) not in elsewhere and parameter.dtype == torch.float32:
                parameter.data = parameter.data.to(dtype)
