"""The chunked head against the plain one: values, gradients, memory shape."""

import pytest
import torch
from torch import Tensor

from grpo_lit.policy import head as head_module
from grpo_lit.policy.head import Head, logprobs_and_entropy


def plain(hidden: Tensor, targets: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    logits = (hidden @ head.weight.T + (0 if head.bias is None else head.bias)) * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    log_p = (logits / head.temperature).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.fixture(params=[1, 3, 7, 100])
def chunk_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(head_module, "CHUNK_BYTES", request.param * 4 * 11)  # vocabulary of 11
    return request.param


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("temperature", "scale", "softcap"), [(1.0, 1.0, None), (0.6, 0.5, None), (1.3, 1.0, 2.0)])
def test_values_and_gradients_equal_the_plain_head(
    chunk_rows: int, bias: bool, temperature: float, scale: float, softcap: float | None
) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(7, 5, requires_grad=True), torch.randn(11, 5, requires_grad=True)
    vector = torch.randn(11, requires_grad=True) if bias else None
    targets, up_logp, up_entropy = torch.randint(11, (7,)), torch.randn(7), torch.randn(7)
    head = Head(weight, vector, temperature, scale, softcap, entropy_gradient=True)
    leaves = [hidden, weight] + ([vector] if bias else [])
    results = []
    for function in (logprobs_and_entropy, plain):
        logp, entropy = function(hidden, targets, head)
        grads = torch.autograd.grad((logp * up_logp + entropy * up_entropy).sum(), leaves)
        results.append([logp, entropy, *grads])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_entropy_carries_no_gradient_unless_asked() -> None:
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    _, entropy = logprobs_and_entropy(hidden, torch.tensor([0, 5, 2]), Head(weight))
    assert not entropy.requires_grad


def test_temperature_divides_logits_not_log_probs() -> None:
    # logits [2, 1, 0] at T = .5: log_softmax([4, 2, 0]) = [-0.1429, -2.1429, -4.1429]
    weight = torch.eye(3)
    logp, _ = logprobs_and_entropy(
        torch.tensor([[2.0, 1.0, 0.0]]).repeat(3, 1), torch.arange(3), Head(weight, temperature=0.5)
    )
    torch.testing.assert_close(logp, torch.tensor([-0.1429, -2.1429, -4.1429]), rtol=0, atol=1e-4)


def test_no_tokens_at_all() -> None:
    hidden, weight = torch.randn(0, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    logp, entropy = logprobs_and_entropy(hidden, torch.zeros(0, dtype=torch.long), Head(weight))
    assert logp.shape == entropy.shape == (0,)
    logp.sum().backward()
    assert weight.grad.abs().sum() == 0


def test_bf16_hidden_states_are_summed_in_float32() -> None:
    # Random logits * 3 over 32000 words: a bf16 log_softmax is off by .037 nats, a float32 one of bf16 logits by less.
    torch.manual_seed(0)
    hidden, weight = torch.randn(4, 64).bfloat16(), (torch.randn(32000, 64) * 0.4).bfloat16()
    targets = torch.randint(32000, (4,))
    logp, entropy = logprobs_and_entropy(hidden, targets, Head(weight))
    exact = (hidden.float() @ weight.float().T).bfloat16().float().log_softmax(-1)
    assert logp.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logp, exact.gather(1, targets[:, None])[:, 0], rtol=0, atol=1e-3)
