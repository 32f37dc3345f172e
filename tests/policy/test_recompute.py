"""What backward makes again changes no bit, and is not kept."""

import copy
import inspect
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kept import kept_bytes
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

from grpo_lit.errors import ConfigError
from grpo_lit.policy.adapter import LoRA
from grpo_lit.policy.compiling import compile_norms
from grpo_lit.policy.policy import Policy
from grpo_lit.policy.precision import cast_once
from grpo_lit.policy.recompute import Recomputed, keep_norms, recompute, rms_norms

IDS = torch.arange(4, 24)[None]


def gradients(model: PreTrainedModel, autocast: bool) -> list[Tensor]:
    model.train().zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(input_ids=IDS, use_cache=False).logits.float().log_softmax(-1)[0, :, 5].mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def kept(model: PreTrainedModel) -> int:
    return kept_bytes(model, lambda: model(input_ids=IDS, use_cache=False))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("what", ["norms", True])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2"])
def test_loss_and_gradients_are_the_same_to_the_bit(
    tiny_model: Callable, architecture: str, what: Recomputed, autocast: bool
) -> None:
    model = tiny_model(architecture)
    names = list(model.state_dict())
    expected = gradients(model, autocast)
    recompute(model, what)
    recompute(model, what)
    for got, wanted in zip(gradients(model, autocast), expected, strict=True):
        assert torch.equal(got, wanted)
    assert list(model.state_dict()) == names


def test_a_norm_keeps_its_input_alone(tiny_model: Callable) -> None:
    model = tiny_model("llama").train()
    norms, whole = rms_norms(model), kept(model)
    assert len(norms) == sum("norm" in name for name in model.state_dict())
    recompute(model, "norms")
    # Beside its input, a norm of transformers keeps the normalised input and the root of the variance, one a row.
    size = 4 * IDS.numel() * (model.config.hidden_size + 1)
    assert whole - kept(model) == pytest.approx(len(norms) * size, rel=0.02)
    recompute(model, True)
    assert kept(model) < whole / 2
    keep_norms(model)
    model.gradient_checkpointing_disable()
    assert kept(model) == whole


@pytest.mark.parametrize("what", ["norms", True])
def test_a_graph_that_is_kept_is_made_again_each_time(tiny_model: Callable, what: Recomputed) -> None:
    model = tiny_model("llama").train()
    recompute(model, what)
    loss = model(input_ids=IDS, use_cache=False).logits.pow(2).sum()
    first, second = (torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_layer_norm_is_left_alone(tiny_model: Callable) -> None:
    model = tiny_model("gpt2")
    recompute(model, "norms")
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("by_name", [False, True])
def test_a_gated_norm_is_made_again_from_both_inputs(by_name: bool) -> None:
    norm = MambaRMSNormGated(8)
    x, gate = torch.randn(2, 3, 8, requires_grad=True).unbind()

    def gradients() -> tuple[Tensor, ...]:
        output = norm(x, gate=gate) if by_name else norm(x, gate)
        return torch.autograd.grad(output.pow(2).sum(), [x, gate, norm.weight])

    expected = gradients()
    inspect.unwrap(recompute)(nn.Sequential(norm), "norms")
    assert "forward" in vars(norm)
    assert all(torch.equal(got, wanted) for got, wanted in zip(gradients(), expected, strict=True))


def test_without_gradient_norms_are_made_once(tiny_model: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    recompute(model, "norms")
    norms, made = rms_norms(model), []
    plain = type(norms[0]).forward
    monkeypatch.setattr(type(norms[0]), "forward", lambda norm, hidden: made.append(norm) or plain(norm, hidden))
    with torch.no_grad():
        model(input_ids=IDS, use_cache=False)
    assert len(made) == len(norms)
    model(input_ids=IDS, use_cache=False).logits.sum().backward()
    assert len(made) == 3 * len(norms)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_norms_of_its_own(tiny_model: Callable, copied: Callable) -> None:
    """As a reference is made: a bound method of the first model's would normalise by its weights."""
    model = tiny_model("llama")
    recompute(model, "norms")
    other = copied(model)
    expected = model(input_ids=IDS).logits
    with torch.no_grad():
        for norm in rms_norms(model):
            norm.weight.zero_()
    assert torch.equal(other(input_ids=IDS).logits, expected)
    assert not model(input_ids=IDS).logits.any()


def test_an_adapters_gradients_are_the_same_to_the_bit(tiny_model: Callable) -> None:
    policy = Policy(tiny_model("llama"))
    LoRA(rank=2).inject(policy.model)
    expected = gradients(policy.model, True)
    recompute(policy.model, "norms")
    assert len(expected) > 2
    for got, wanted in zip(gradients(policy.model, True), expected, strict=True):
        assert torch.equal(got, wanted)


def test_compiled_norms_are_not_made_again(tiny_model: Callable) -> None:
    model = tiny_model("llama")
    recompute(model, "norms")
    compile_norms(model)
    assert not any("forward" in vars(norm) for norm in rms_norms(model))


class CountCasts(TorchDispatchMode):
    """Counts how often a weight is cast."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.address, self.count = weight.data_ptr(), 0

    def __torch_dispatch__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default and args[0].data_ptr() == self.address
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("what", [False, "norms", True])
def test_a_backward_in_a_thread_of_its_own_keeps_autocasts_copies(tiny_model: Callable, what: Recomputed) -> None:
    """As CUDA's is: the autocast that a checkpoint opens there is the only one."""
    model = tiny_model("llama").train()
    recompute(model, what)
    counts = CountCasts(model.model.layers[0].mlp.up_proj.weight)
    with torch.autocast("cpu", torch.bfloat16), cast_once(torch.device("cpu")):
        for _ in range(3):
            with counts:
                loss = model(input_ids=IDS, use_cache=False).logits.sum()
            backward = threading.Thread(target=loss.backward)
            backward.start()
            backward.join()
    assert counts.count == 1
    assert torch.autocast_increment_nesting() == 1
    torch.autocast_decrement_nesting()


@pytest.mark.parametrize("what", ["Norms", "false", 1])
def test_anything_else_is_refused(tiny_model: Callable, what: Any) -> None:
    unchecked = inspect.unwrap(recompute)  # outside of tests nobody looks at types
    with pytest.raises(ConfigError, match=r"`model.gradient_checkpointing` expected norms, true or false, but got"):
        unchecked(tiny_model("llama"), what)
