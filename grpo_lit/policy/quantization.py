"""Frozen weights in 4 bits (NF4), and what they stand for."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from grpo_lit.errors import ConfigError

#: What bitsandbytes has kernels for.
_BLOCK_SIZES = (64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True)
class NF4:
    """Holds the frozen weights of linear layers in 4 bits: 16 values that a normal distribution hits equally often.

        W ~= absmax(block) * nf4[code],   one absmax for each block of weights

    A seventh of float32's memory, 4.1 to 4.5 bits a weight. The output layer, the embeddings and experts whose weights
    are fused keep their dtype.
    Source: T. Dettmers et al., "QLoRA" (https://arxiv.org/abs/2305.14314).

    Args:
        double_quantization: Hold the absmax in 8 bits too, which saves 0.37 bits a weight.
        block_size: Weights that share one.
    """

    double_quantization: bool = True
    block_size: int = 64

    def __post_init__(self) -> None:
        """Refuse a block that there is no kernel for."""
        if self.block_size not in _BLOCK_SIZES:
            raise ConfigError(
                f"`model.quantization.block_size` expected one of {', '.join(map(str, _BLOCK_SIZES))}, but got "
                f"{self.block_size}"
            )

    @torch.no_grad()
    def quantize(self, model: nn.Module, output: nn.Module | None, dtype: torch.dtype) -> None:
        """Replace the linear layers of a model.

        Args:
            model: Changed in place.
            output: The output layer, which stays: the head multiplies with its weight chunk by chunk.
            dtype: To multiply in.

        Raises:
            ConfigError: There is no such layer.
        """
        layers = [
            (path, layer) for path, layer in model.named_modules() if type(layer) is nn.Linear and layer is not output
        ]
        if not layers:
            raise ConfigError(
                "`model.quantization` and `model.reference_dtype: nf4` expected a model of linear layers, but "
                f"{type(model).__name__} has none below its output: drop them"
            )
        for path, layer in layers:
            model.set_submodule(path, self._quantized(layer, dtype))

    def _quantized(self, layer: nn.Linear, dtype: torch.dtype) -> nn.Module:
        from bitsandbytes.nn import Linear4bit, Params4bit  # takes a second to import

        made = Linear4bit(
            layer.in_features, layer.out_features, layer.bias is not None, dtype, quant_type="nf4", device="meta"
        )
        weight: Any = Params4bit(  # its `to` quantises; its types are not those of a tensor's
            layer.weight.detach(),
            requires_grad=False,
            blocksize=self.block_size,
            compress_statistics=self.double_quantization,
            quant_type="nf4",
            module=made,
        )
        made.weight, made.bias = weight.to(layer.weight.device), layer.bias
        # bitsandbytes would repack weights in place for some processors when it comes to evaluation.
        made.support_avx512bf16_for_cpu = False
        return made.train(layer.training)


@torch.no_grad()
def dense_weight(weight: Tensor) -> Tensor:
    """Return what a weight stands for: itself, or in float32 what was quantised."""
    state = getattr(weight, "quant_state", None)
    if state is None:
        return weight
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.data, state).float()
