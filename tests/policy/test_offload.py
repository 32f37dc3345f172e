"""Activations that wait elsewhere: the same gradient, and weights that stay."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from grpo_lit.errors import ConfigError
from grpo_lit.module import GRPOModule
from grpo_lit.policy.offload import offloaded

IDS = torch.tensor([[5, 6, 7, 8, 9]])


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_gradients_are_the_same_and_no_weight_is_moved(
    precision: torch.dtype, tiny_model: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    sizes: list[int] = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda shape, **kwargs: sizes.append(shape.numel()) or empty(shape, **kwargs))

    def gradient(least: int) -> list[torch.Tensor]:
        model.zero_grad()
        with offloaded(model, IDS.device, least), torch.autocast("cpu", precision, enabled=precision != torch.float32):
            loss = model(IDS).logits.float().square().mean()
        loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = gradient(least=2**40)
    assert not sizes
    moved = gradient(least=0)
    assert all(torch.equal(a, b) for a, b in zip(moved, expected, strict=True))
    # No activation of 5 tokens is as large as a matrix of the layers, and every one of them is smaller than all.
    layers = [module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear)]
    assert len(sizes) > 2 * model.config.num_hidden_layers * 5
    assert not set(sizes) & set(layers)


def test_it_contradicts_recomputing() -> None:
    with pytest.raises(ConfigError, match=r"activation_offload` and `model\.gradient_checkpointing"):
        GRPOModule("somewhere", activation_offload=True, gradient_checkpointing=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_less_of_the_gpus_memory_is_taken(tiny_model: Callable) -> None:
    model, ids = tiny_model("llama").cuda(), torch.randint(5, 100, (64, 512), device="cuda")
    peaks = []
    for least in (2**40, 2**16):
        torch.cuda.reset_peak_memory_stats()
        with offloaded(model, ids.device, least):
            model(ids).logits.float().square().mean().backward()
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] < 0.9 * peaks[0]
