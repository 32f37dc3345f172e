"""A long run takes no more memory than a short one."""

import ctypes
import gc
from contextlib import nullcontext
from dataclasses import replace

import psutil
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from grpo_lit.batch import TokenBatch
from grpo_lit.metrics.rates import Rates
from grpo_lit.objectives import Objective
from grpo_lit.policy.learner import Learner
from grpo_lit.policy.policy import Policy
from grpo_lit.ranks import Ranks
from grpo_lit.rollout import Completion, Group, Prompt
from grpo_lit.rollouts.minibatch import UpdatePlan

STEPS, WARM_UP = 300, 50
#: Growth that is allowed from step 50 to step 300 [MiB].
BOUND = 24


def make_rollout(seed: int) -> TokenBatch:
    """Two small groups that are trained on, and one without signal, which costs no forward but much memory: 0.4 MiB."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(4, 260, (count,), generator=generator).tolist())

    groups = []
    for n, (prompt, lengths, signal) in enumerate([(9, [5, 1, 12, 3], 1.0), (4, [7, 2], 1.0), (5, [4000] * 8, 0.0)]):
        samples = tuple(Completion(tokens(k), (-5.0,) * k, "", "stop", 0) for k in lengths)
        rewards = [signal * (i % 2) for i in range(len(lengths))]
        groups.append(Group(Prompt(str(n), "", token_ids=tokens(prompt)), 0, samples, rewards=rewards))
    return TokenBatch.from_groups(groups, temperature=1.0)


def resident_mib() -> float:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what other tests left free in the heap would hide what is held here
    return psutil.Process().memory_info().rss / 2**20


def test_memory_is_flat_over_300_steps(policy: Policy) -> None:
    torch.set_num_threads(1)  # tiny tensors: a second thread would only wait
    ranks = Ranks(SingleDeviceStrategy(device=torch.device("cpu")))
    learner = Learner(Objective(), 24, True, ranks, torch.device("cpu"))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
    rollouts, rates = [make_rollout(seed) for seed in range(3)], Rates()
    for step in range(STEPS):
        if step == WARM_UP:
            before = resident_mib()
        batch = rollouts[step % 3]
        prepared, _ = learner.prepare(batch.select(torch.arange(len(batch.lengths))), UpdatePlan(), policy, None)
        output = learner.gradient(policy, prepared, lambda loss: loss.backward(), lambda more: nullcontext())
        rates.merge(output.rates)
        optimizer.step()
        optimizer.zero_grad()
    assert output.micro_batches > 1
    assert resident_mib() - before < BOUND
    # What is measured would see one batch that is held for each step.
    before = resident_mib()
    held = [replace(batch, **copies_of(batch)) for _ in range(STEPS - WARM_UP)]
    assert resident_mib() - before > BOUND
    assert len(held) == STEPS - WARM_UP


def copies_of(batch: TokenBatch) -> dict[str, torch.Tensor]:
    return {name: getattr(batch, name).clone() for name in ("token_ids", "sampler_logprobs")}
