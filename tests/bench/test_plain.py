"""Ours makes the gradient of the plain padded learner, for every architecture."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from transformers import PreTrainedModel

from grpo_lit.batch import TokenBatch
from grpo_lit.bench.plain import PlainLearner, pad_rows, token_logprobs
from grpo_lit.objectives import K3, Objective, TokenMean
from grpo_lit.policy.checkpoint import load_model
from grpo_lit.policy.learner import Learner
from grpo_lit.policy.policy import Policy, can_share_prefix
from grpo_lit.ranks import Ranks
from grpo_lit.rollout import Completion, Group, Prompt
from grpo_lit.rollouts.minibatch import UpdatePlan

CPU = torch.device("cpu")
RANKS = Ranks(SingleDeviceStrategy(device=CPU))
SHARE = ["llama", "qwen2", "qwen3", "phi", "gpt2", "mixtral", "qwen3_moe", "olmoe"]
#: Sliding windows, and in Gemma 2 soft-capped attention, which SDPA cannot express.
PLAIN_ROWS = ["gemma2", "gemma3_text"]


def ragged_batch(temperature: float = 1.0) -> TokenBatch:
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(4, 260, (count,), generator=generator).tolist())

    groups = []
    for n, (prompt, lengths) in enumerate([(9, [5, 1, 12, 3]), (3, [4, 9]), (20, [2, 17, 6]), (6, [8, 3, 1, 2])]):
        samples = tuple(Completion(tokens(k), (-5.0,) * k, "", "stop", 0) for k in lengths)
        rewards = [float(i % 2) for i in range(len(lengths))]
        groups.append(Group(Prompt(str(n), "", token_ids=tokens(prompt)), 0, samples, rewards=rewards))
    return TokenBatch.from_groups(groups, temperature)


def gradient_of(model: PreTrainedModel) -> Tensor:
    """All gradients in one vector; they are taken off the model."""
    gradient = torch.cat([p.grad.flatten().double() for p in model.parameters()])
    model.zero_grad()
    return gradient


@pytest.mark.parametrize("architecture", SHARE + PLAIN_ROWS)
def test_loss_and_gradient_are_those_of_the_plain_learner(tiny_folder: Callable[..., Path], architecture: str) -> None:
    policy, reference = (load_model(str(tiny_folder(architecture, seed=seed))) for seed in (0, 5))
    share = can_share_prefix(policy)
    assert share == (architecture in SHARE)
    objective, batch = Objective(reduction=TokenMean(), divergence=K3(beta=0.04)), ragged_batch(temperature=0.9)
    expected_loss = PlainLearner(objective, 4, CPU).gradient(policy, batch, reference)
    expected = gradient_of(policy)
    learner, wrapped = Learner(objective, 64, share, RANKS, CPU), (Policy(policy), Policy(reference))
    prepared, _ = learner.prepare(batch, UpdatePlan(), *wrapped)
    output = learner.gradient(
        wrapped[0], prepared, lambda loss: loss.backward(), lambda more: nullcontext(), wrapped[1]
    )
    got = gradient_of(policy)
    assert output.micro_batches > 1
    assert float(expected.norm()) > 1e-2
    assert output.loss == pytest.approx(expected_loss, rel=1e-5)
    assert float((got - expected).norm() / expected.norm()) <= 1e-5


def test_rows_by_hand() -> None:
    groups = [
        Group(
            Prompt("0", "", token_ids=(7, 8)),
            0,
            tuple(Completion(c, (-1.0,) * len(c), "", "stop", 0) for c in ((11, 12, 13), (21,))),
            rewards=[0.0, 1.0],
        )
    ]
    rows = pad_rows(TokenBatch.from_groups(groups, temperature=1.0))
    assert rows.input_ids.tolist() == [[7, 8, 11, 12, 13], [7, 8, 21, 0, 0]]
    assert rows.attention_mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert rows.is_completion.int().tolist() == [[0, 0, 1, 1, 1], [0, 0, 1, 0, 0]]


def test_log_probs_and_entropy_are_those_of_a_softmax(tiny_model: Callable[..., PreTrainedModel]) -> None:
    model, batch = tiny_model("llama"), ragged_batch()
    rows = pad_rows(batch)
    logprobs, entropy = token_logprobs(model, rows, temperature=0.7)
    # The third token of the third completion of the first prompt, by itself.
    whole = torch.cat([batch.prompt_ids[:9], batch.token_ids[6:18]])
    alone = torch.distributions.Categorical(logits=model(whole[None]).logits[0, 9 + 1] / 0.7)
    torch.testing.assert_close(logprobs[6 + 2], alone.log_prob(whole[9 + 2]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy[6 + 2], alone.entropy(), rtol=1e-5, atol=1e-5)
    assert not entropy.requires_grad
