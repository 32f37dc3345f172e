"""Casts that layers share change no bit, and are one tensor."""

import copy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from architectures import ARCHITECTURES, ragged_batch, tiny_model
from kept import kept_bytes
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpo_lit.batch import TokenBatch
from grpo_lit.policy.adapter import LoRA
from grpo_lit.policy.input_casts import InputCasts
from grpo_lit.policy.packing import pack_rows, plan_micro_batches
from grpo_lit.policy.policy import Policy


class Shared(nn.Module):
    """Three layers of one input; the last of them asks for it by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x) * self.layers[1](x) * self.layers[2](input=x)


def gradients(policy: Policy, batch: TokenBatch, monkeypatch: pytest.MonkeyPatch, shared: bool) -> list[Tensor]:
    """Log-probs of a batch in two micro-batches, and gradients of some of their combinations, under autocast."""
    result, policy = [], copy.deepcopy(policy)
    with monkeypatch.context() as patch:
        if not shared:
            patch.setattr(policy.input_casts, "shared", nullcontext)
        for rows in plan_micro_batches(batch, 30, share_prefix=False):
            micro, pack = pack_rows(batch, rows)
            with torch.autocast("cpu", torch.bfloat16):
                logprobs = policy(pack, micro.token_ids, micro.temperature).logprobs
            (logprobs * torch.linspace(-1, 2, len(logprobs))).sum().backward()
            result.append(logprobs.detach())
    return result + [parameter.grad for parameter in policy.parameters() if parameter.grad is not None]


def assert_same_bits(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = ragged_batch(0.7)
    got, expected = (gradients(policy, batch, monkeypatch, shared) for shared in (True, False))
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_log_probs_and_gradients_are_the_same_to_the_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same_bits(Policy(tiny_model(name)), monkeypatch)


def test_layers_that_are_made_again_in_backward_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(tiny_model("llama")).train()
    policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_same_bits(policy, monkeypatch)


def test_an_adapter_shares_them_with_the_layer_it_is_of(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(tiny_model("llama"))
    LoRA(rank=2).inject(policy.model)
    alone = kept(policy)
    policy.input_casts.watch(policy.model)
    policy.input_casts.watch(policy.model)
    for layer in policy.model.modules():
        assert len(layer._forward_pre_hooks) == (type(layer) is nn.Linear)
    assert kept(policy) < alone
    assert_same_bits(policy, monkeypatch)


def kept(policy: Policy) -> int:
    batch = ragged_batch()
    (rows,) = plan_micro_batches(batch, 1000, share_prefix=True)
    with torch.autocast("cpu", torch.bfloat16):
        return kept_bytes(policy, lambda: policy.last_hidden(pack_rows(batch, rows)[1]))


def test_a_layer_keeps_one_copy_of_its_input_for_all_that_multiply_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model: PreTrainedModel = tiny_model("llama")
    policy, config = Policy(model), model.config
    shared = kept(policy)
    monkeypatch.setattr(policy.input_casts, "shared", nullcontext)
    tokens = 15 + 45 - 9  # of prompts, of completions but for the last of each
    copies = 3 + 2 - 2  # queries, keys, values; gate, up; one of each remains
    assert kept(policy) - shared == config.num_hidden_layers * copies * tokens * config.hidden_size * 2


@pytest.mark.parametrize("autocast", [True, False])
def test_one_cast_is_made_while_the_input_is_the_same(autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Shared()
    casts, seen = InputCasts(module), list[Tensor]()
    for layer in module.layers:
        layer.register_forward_pre_hook(lambda _, inputs: seen.extend(inputs))
    x = torch.randn(2, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        module(x)
        assert [tensor is x for tensor in seen] == [True, True]  # nobody asked for it
        with casts.shared():
            module(x)
            with torch.no_grad():
                x += 1.0
            module(x)
            module(x.double().float())
    first, second, changed, again, other, last = seen[2:]
    if not autocast:
        assert first is second is changed is again is x
        return
    assert first.data_ptr() == second.data_ptr() != changed.data_ptr() == again.data_ptr()
    assert other.data_ptr() == last.data_ptr() != again.data_ptr()
    assert torch.equal(again, x.bfloat16())
    assert casts._last is None


def test_gradients_of_all_layers_are_added_in_float32() -> None:
    module, x = Shared(), torch.randn(2, 4, requires_grad=True)
    casts = InputCasts(module)

    def gradient(shared: Callable) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16), shared():
            # No leaf: autocast would share its cast itself, and add gradients in bf16.
            return torch.autograd.grad(module(x * 1.0).float().sum(), x)[0]

    got = gradient(casts.shared)
    assert got.dtype == torch.float32
    assert torch.equal(got, gradient(nullcontext))
    assert not torch.equal(got, got.bfloat16().float())


def test_an_error_within_ends_the_sharing() -> None:
    module = Shared()
    casts = InputCasts(module)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError), casts.shared():
        module(torch.randn(2, 5))
    assert casts._last is None
    assert not casts._active


def test_a_copy_of_a_policy_shares_among_its_own_layers() -> None:
    policy = Policy(tiny_model("llama"))
    other = copy.deepcopy(policy)
    assert other.input_casts is not policy.input_casts
    assert kept(other) == kept(policy)


def test_inputs_made_in_inference_mode_are_cast_by_autocast() -> None:
    """As a validation makes them: they do not count their changes."""
    module, x = Shared(), torch.randn(2, 4)
    casts = InputCasts(module)
    with torch.autocast("cpu", torch.bfloat16), casts.shared():
        expected = module(x).detach()
        with torch.inference_mode():
            y = x * 1.0
            assert torch.equal(module(y), expected)
            y.mul_(2.0)
            assert torch.equal(module(y), module(x * 2.0))
