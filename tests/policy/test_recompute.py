"""What backward makes again changes no bit, and is not kept."""

import copy
from collections.abc import Callable

import pytest
import torch
from kept import kept_bytes
from torch import Tensor
from transformers import PreTrainedModel

from grpo_lit.policy.adapter import LoRA
from grpo_lit.policy.compiling import compile_norms
from grpo_lit.policy.policy import Policy
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


def test_a_layer_norm_is_left_alone(tiny_model: Callable) -> None:
    model = tiny_model("gpt2")
    recompute(model, "norms")
    assert not any("forward" in vars(module) for module in model.modules())


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


def test_a_copy_has_norms_of_its_own(tiny_model: Callable) -> None:
    """As a reference is made: a bound method of the first model's would normalise by its weights."""
    model = tiny_model("llama")
    recompute(model, "norms")
    other = copy.deepcopy(model)
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
