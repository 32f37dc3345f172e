"""Activations that wait elsewhere: the same gradient, and weights that stay."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from grpo_lit.errors import ConfigError
from grpo_lit.module import GRPOModule
from grpo_lit.policy.offload import offloaded
from grpo_lit.policy.packing import Pack
from grpo_lit.policy.policy import Policy
from grpo_lit.policy.sharding import shard, whole

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


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_gathered_shards_are_weights_too(architecture: str, tiny_model: Callable, mesh: DeviceMesh) -> None:
    # A shard has no storage to ask for its address, and GPT-2's layers save their weights as they are.
    policy = Policy(tiny_model(architecture))
    weights = {parameter.numel() for parameter in policy.parameters() if parameter.dim() > 1}
    shard(policy, mesh)

    def gradient(context: AbstractContextManager) -> list[torch.Tensor]:
        policy.zero_grad()
        with context:
            output = policy(Pack(IDS, torch.arange(5)[None], None, torch.arange(4)), IDS[0, 1:], 1.0)
        output.logprobs.sum().backward()
        return [whole(parameter.grad).clone() for parameter in policy.parameters()]

    hooks, sizes = offloaded(policy, IDS.device, least=0), []
    pack = hooks.pack_hook

    def recorded(tensor: torch.Tensor) -> Any:
        saved = pack(tensor)
        if saved is not tensor:
            sizes.append(tensor.numel())
        return saved

    hooks.pack_hook = recorded
    assert all(torch.equal(a, b) for a, b in zip(gradient(hooks), gradient(nullcontext()), strict=True))
    assert len(sizes) > 20
    assert not set(sizes) & weights


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
