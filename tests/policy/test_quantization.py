"""NF4 holds what it says, in the memory that it says."""

from collections.abc import Callable

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from torch import nn

from grpo_lit.errors import ConfigError
from grpo_lit.policy.quantization import NF4, dense_weight

#: Table 4 of the paper's appendix: the values of NF4.
VALUES = torch.tensor([
    -1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0,
])  # fmt: skip


def test_each_block_holds_the_nearest_of_16_values_times_its_largest() -> None:
    model = nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 8))
    weight, bias, output = model[0].weight.detach().clone(), model[0].bias, model[1].weight
    NF4(double_quantization=False).quantize(model, model[1], torch.float32)
    assert isinstance(model[0], Linear4bit)
    assert model[1].weight is output
    assert model[0].bias is bias
    largest = weight.abs().amax(1, keepdim=True)  # a row is a block of 64
    nearest = VALUES[(weight / largest)[..., None].sub(VALUES).abs().argmin(-1)] * largest
    found = dense_weight(model[0].weight)
    torch.testing.assert_close(found, nearest, rtol=1e-5, atol=1e-6)
    inputs = torch.randn(3, 64)
    torch.testing.assert_close(model[0](inputs), inputs @ found.T + bias, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "bits"),
    # 4 bits, and 32 of absmax for 64 weights; or 8 for 64 and 32 for each 256 of those.
    [(NF4(double_quantization=False), 4 + 32 / 64), (NF4(), 4 + 8 / 64 + 32 / (64 * 256)), (NF4(block_size=256), None)],
)
def test_memory_of_a_weight(settings: NF4, bits: float | None) -> None:
    model = nn.Sequential(nn.Linear(512, 512, bias=False))
    weight = model[0].weight.detach().clone()
    settings.quantize(model, None, torch.float32)
    state = model[0].weight.quant_state
    nested = 0 if state.state2 is None else state.state2.absmax.nbytes
    held = model[0].weight.nbytes + state.absmax.nbytes + nested
    assert 8 * held / weight.numel() == pytest.approx(bits or 4 + 8 / 256, rel=1e-3)
    # Uniform weights: neighbours of NF4 are at most 0.304 of the largest apart, so off by half of that.
    assert (dense_weight(model[0].weight) - weight).abs().max() < 0.155 * weight.abs().max()


def test_a_model_without_linear_layers_is_refused(tiny_model: Callable) -> None:
    model = tiny_model("gpt2")  # its layers are transposed ones of its own
    with pytest.raises(ConfigError, match=r"model\.quantization.*GPT2LMHeadModel has none"):
        NF4().quantize(model, model.get_output_embeddings(), torch.float32)


def test_a_block_size_without_a_kernel_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.quantization\.block_size.*64.*but got 48"):
        NF4(block_size=48)
