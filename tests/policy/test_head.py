"""The chunked head against the plain one: values, gradients, memory shape."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grpo_lit.batch import KeptTensors
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


def test_under_autocast_the_weights_gradient_is_summed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_lit.policy.head.CHUNK_BYTES", 4 * 2500)  # a token: every row is added to 1,200 times
    torch.manual_seed(0)
    hidden, weight = torch.randn(1200, 8), (0.1 * torch.randn(2500, 8)).requires_grad_()
    targets, scales = torch.randint(2500, (1200,)), torch.randn(1200)
    with torch.autocast("cpu", torch.bfloat16):
        (logprobs_and_entropy(hidden, targets, Head(weight))[0] * scales).sum().backward()
    ours, weight.grad = weight.grad, None
    ((hidden @ weight.T).log_softmax(-1).gather(1, targets[:, None])[:, 0] * scales).sum().backward()
    assert ours.dtype == torch.float32
    # .0029, since products are rounded to bf16; .0089 where their sums are too.
    assert (ours - weight.grad).norm() < 0.004 * weight.grad.norm()


def kept_of(steps: list[list[int]]) -> KeptTensors:
    ids = torch.tensor([i for step in steps for i in step], dtype=torch.int32)
    return KeptTensors(ids, torch.tensor([len(step) for step in steps], dtype=torch.long))


def masked(hidden: Tensor, targets: Tensor, head: Head, kept: KeptTensors) -> tuple[Tensor, Tensor]:
    """Dense: a softmax over all logits, those of impossible tokens set to -inf."""
    logits = (hidden @ head.weight.T + (0 if head.bias is None else head.bias)) * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    rows = kept.ids.split(kept.counts.tolist())
    is_kept = torch.stack([torch.isin(torch.arange(logits.shape[1]), ids) | (len(ids) == 0) for ids in rows])
    log_p = (logits / head.temperature).masked_fill(~is_kept, -torch.inf).log_softmax(-1)
    entropy = -(log_p.exp() * torch.where(is_kept, log_p, 0.0)).sum(-1)
    return log_p.gather(1, targets[:, None])[:, 0], entropy


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("temperature", "scale", "softcap"), [(1.0, 1.0, None), (0.6, 0.5, None), (1.3, 1.0, 2.0)])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_kept_tokens_give_values_and_gradients_of_a_dense_masked_softmax(
    chunk_rows: int, bias: bool, temperature: float, scale: float, softcap: float | None, entropy_gradient: bool
) -> None:
    torch.manual_seed(0)
    make = {"dtype": torch.float64, "requires_grad": True}
    hidden, weight = torch.randn(7, 5, **make), torch.randn(11, 5, **make)
    vector = torch.randn(11, **make) if bias else None
    # One token, two, all eleven, and 0 for no limit; not in order.
    steps = [[4], [9, 0], [3, 8, 1, 10], [], list(range(11)), [2, 7, 5], [6, 10]]
    targets, kept = torch.tensor([4, 0, 10, 7, 5, 2, 6]), kept_of(steps)
    up_logp, up_entropy = torch.randn(2, 7, dtype=torch.float64)
    head = Head(weight, vector, temperature, scale, softcap, entropy_gradient)
    leaves = [hidden, weight] + ([vector] if bias else [])
    results = []
    for function in (logprobs_and_entropy, masked):
        logp, entropy = function(hidden, targets, head, kept)
        loss = (logp * up_logp).sum() + ((entropy * up_entropy).sum() if entropy_gradient else 0)
        results.append([logp, entropy.detach(), *torch.autograd.grad(loss, leaves)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


def test_the_ratio_without_kept_tokens_is_the_kept_mass() -> None:
    # logits [2, 1, 0] at T = .5, kept {0, 1}: log_softmax([4, 2]) = [-0.1269, -2.1269], p = [.8808, .1192], and
    # H = .8808 * .1269 + .1192 * 2.1269 = .3653. Over all three tokens log p(0) = -.1429: the mass of {0, 1} is
    # exp(-.1429 + .1269) = .9841.
    hidden, head = torch.tensor([[2.0, 1.0, 0.0]]).repeat(2, 1), Head(torch.eye(3), temperature=0.5)
    targets = torch.tensor([0, 1])
    logp, entropy = logprobs_and_entropy(hidden, targets, head, kept_of([[0, 1], [1, 0]]))
    torch.testing.assert_close(logp, torch.tensor([-0.1269, -2.1269]), rtol=0, atol=1e-4)
    torch.testing.assert_close(entropy, torch.tensor([0.3653, 0.3653]), rtol=0, atol=1e-4)
    whole, _ = logprobs_and_entropy(hidden, targets, head)
    torch.testing.assert_close((whole - logp).exp(), torch.tensor([0.9841, 0.9841]), rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_that_was_the_only_possible_one_has_log_prob_entropy_and_gradient_0(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden = (torch.randn(5, 8) * 10).to(dtype).requires_grad_()
    weight = (torch.randn(300, 8) * 10).to(dtype).requires_grad_()
    targets = torch.tensor([0, 299, 17, 17, 100])
    head = Head(weight, temperature=0.7, softcap=30.0, entropy_gradient=True)
    logp, entropy = logprobs_and_entropy(hidden, targets, head, kept_of([[int(t)] for t in targets]))
    assert torch.equal(logp, torch.zeros(5))
    assert torch.equal(entropy, torch.zeros(5))
    (logp.sum() * 3 + entropy.sum()).backward()
    assert float(hidden.grad.abs().max()) == float(weight.grad.abs().max()) == 0.0


def test_kept_tokens_far_below_the_likeliest_one_stay_exact() -> None:
    # The likeliest token, 2000 nats above, was ruled out: log_softmax([0, 1]) = [-1.3133, -0.3133].
    hidden, head = torch.tensor([[2000.0, 0.0, 1.0]]), Head(torch.eye(3))
    for target, expected in ((1, -1.3133), (2, -0.3133)):
        logp, _ = logprobs_and_entropy(hidden, torch.tensor([target]), head, kept_of([[1, 2]]))
        assert float(logp) == pytest.approx(expected, abs=1e-4)


def test_no_limit_and_the_whole_vocabulary_are_the_same_to_the_last_bit() -> None:
    hidden, weight, targets = torch.randn(3, 4), torch.randn(6, 4), torch.tensor([0, 5, 2])
    expected = logprobs_and_entropy(hidden, targets, Head(weight))
    for step in ([], [5, 4, 3, 2, 1, 0]):
        found = logprobs_and_entropy(hidden, targets, Head(weight), kept_of([step] * 3))
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs)


def test_no_tokens_at_all_with_kept_tokens() -> None:
    hidden, weight = torch.randn(0, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    logp, entropy = logprobs_and_entropy(hidden, torch.zeros(0, dtype=torch.long), Head(weight), kept_of([]))
    assert logp.shape == entropy.shape == (0,)
    logp.sum().backward()
    assert weight.grad.abs().sum() == 0


class LargestTensor(TorchDispatchMode):
    """Notes the elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


@pytest.mark.parametrize("tokens", [3, 96])
@pytest.mark.parametrize("limited", [False, True])
def test_logits_take_the_memory_of_a_chunk_however_many_tokens_there_are(
    limited: bool, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocabulary, size = 500, 4
    monkeypatch.setattr(head_module, "CHUNK_BYTES", 8 * 4 * vocabulary)  # 8 rows
    hidden, weight = torch.randn(tokens, size, requires_grad=True), torch.randn(vocabulary, size, requires_grad=True)
    targets = torch.randint(vocabulary, (tokens,))
    kept = kept_of([[int(t), (int(t) + 1) % vocabulary] for t in targets]) if limited else None
    with LargestTensor() as largest:
        logp, _ = logprobs_and_entropy(hidden, targets, Head(weight), kept)
        logp.sum().backward()
    assert largest.elements == 8 * vocabulary  # where [T, V] has up to twelve times as many


def test_the_gradient_of_a_bias_is_added_up_in_float32_under_autocast() -> None:
    """One logit in a hundred: a bf16 sum of a chunk, of 8 bits, would be off by up to 1 in 512."""
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(400, 8), torch.randn(32, 8), torch.randn(32, requires_grad=True)
    targets = torch.arange(400) % 32
    with torch.autocast("cpu", torch.bfloat16):
        logprobs, _ = logprobs_and_entropy(hidden, targets, Head(weight, bias))
    (got,) = torch.autograd.grad(logprobs.sum(), bias)
    logits = (hidden.bfloat16() @ weight.bfloat16().T + bias.bfloat16()).float()
    # What is added up is in bf16, as are the products it comes from: their errors, not a sum's, are let through.
    exact = (torch.nn.functional.one_hot(targets, 32) - logits.softmax(-1)).bfloat16().detach()
    torch.testing.assert_close(got, exact.float().sum(0), rtol=2e-4, atol=2e-3)
    assert (exact.sum(0).float() - exact.float().sum(0)).abs().max() > 2e-2
