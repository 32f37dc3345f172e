"""Inputs that several linear layers share, cast by autocast once."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


class InputCasts:
    """Casts what linear layers share to autocast's dtype once: queries, keys and values; gate and up.

    Autocast casts a float32 input for each layer that multiplies it, and backward keeps all of these copies. Values and
    gradients stay the same to the last bit: each layer's gradient is still cast back to float32 before they are added.

    Args:
        model: See :meth:`watch`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._active = False
        self._last: tuple[Tensor, int, Tensor] | None = None
        self.watch(model)

    def watch(self, model: nn.Module) -> None:
        """Cast the inputs of a model's linear layers from now on, where they are of a kind that autocast knows."""
        for layer in model.modules():
            # A quantized layer is one too, and answers in the dtype it was asked in.
            if type(layer) in (nn.Linear, Conv1D) and self._cast not in layer._forward_pre_hooks.values():
                layer.register_forward_pre_hook(self._cast)

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Share casts in a forward within; a forward elsewhere, as one that is made again, casts as autocast does."""
        self._active = True
        try:
            yield
        finally:
            self._active, self._last = False, None

    def _cast(self, layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Return the inputs of a layer with the first of them cast; ``None``: as they are."""
        values = inputs[0] if inputs else None
        if not self._active or not isinstance(values, Tensor) or values.dtype != torch.float32:
            return None
        device = values.device.type
        # A tensor made in inference mode, as during validation, does not tell whether it was changed.
        if values.is_inference() or not torch.is_autocast_enabled(device):
            return None
        last, dtype = self._last, torch.get_autocast_dtype(device)
        if last is None or last[0] is not values or last[1] != values._version or last[2].dtype != dtype:
            last = self._last = values, values._version, values.detach().to(dtype)
        return _CastBefore.apply(values, last[2]), *inputs[1:]


class _CastBefore(torch.autograd.Function):
    """Autograd of ``values.to(dtype)``, whose result is there already."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, cast: Tensor) -> Tensor:
        ctx.dtype = values.dtype
        return cast.view_as(cast)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None
