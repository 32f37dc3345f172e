"""Batches and terms small enough to work out by hand."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_lit.batch import TokenBatch
from grpo_lit.objectives import Terms

MakeBatch = Callable[..., TokenBatch]
MakeTerms = Callable[..., Terms]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads that wait for each other cost a thousand times the arithmetic on a dozen numbers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(scope="session")
def make_batch() -> MakeBatch:
    """Return a function that makes a batch of rewards, groups and lengths; anything else can be overridden."""

    def make(
        rewards: Sequence[float],
        group: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        dtype: torch.dtype = torch.float32,
        **override: object,
    ) -> TokenBatch:
        group = [0] * len(rewards) if group is None else group
        lengths = [1] * len(rewards) if lengths is None else lengths
        groups, tokens = max(group, default=-1) + 1, sum(lengths)
        fields = {
            "prompt_ids": torch.zeros(groups, dtype=torch.long),
            "prompt_lengths": torch.ones(groups, dtype=torch.long),
            "group": torch.tensor(group, dtype=torch.long),
            "token_ids": torch.zeros(tokens, dtype=torch.long),
            "lengths": torch.tensor(lengths, dtype=torch.long),
            "sampler_logprobs": torch.zeros(tokens, dtype=dtype),
            "rewards": torch.tensor(rewards, dtype=dtype),
            "scores": torch.zeros(len(rewards), 0, dtype=dtype),
            "domain": torch.zeros(len(rewards), dtype=torch.long),
            "weight_version": torch.zeros(len(rewards), dtype=torch.long),
        }
        return TokenBatch(**{**fields, **override})

    return make


@pytest.fixture(scope="session")
def make_terms() -> MakeTerms:
    """Return a function that makes terms of log-ratios and advantages, one sequence per token unless told otherwise.

    The old policy gives every token log-prob -1 [nats], the policy -1 plus the log-ratio, with gradient.
    """

    def make(
        log_ratio: Sequence[float],
        advantages: Sequence[float] | float,
        lengths: Sequence[int] | None = None,
        dtype: torch.dtype = torch.float32,
        **override: Tensor | object,
    ) -> Terms:
        d = torch.tensor(log_ratio, dtype=dtype)
        lengths = [1] * len(d) if lengths is None else lengths
        advantages = [advantages] * len(lengths) if isinstance(advantages, (int, float)) else advantages
        lengths_tensor = torch.tensor(lengths)
        sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths_tensor)
        old = torch.full_like(d, -1.0)
        fields = {
            "logprobs": (old + d).requires_grad_(),
            "old_logprobs": old,
            "sampler_logprobs": old,
            "reference_logprobs": old,
            "entropy": torch.zeros_like(d),
            "advantages": torch.tensor(advantages, dtype=dtype)[sequence],
            "lengths": lengths_tensor,
            "sequence": sequence,
            "domain": torch.zeros(len(lengths), dtype=torch.long),
        }
        return Terms(**{**fields, **override})

    return make


@pytest.fixture(scope="session")
def alone() -> Callable[[Tensor], Tensor]:
    """The sum over the ranks of a run of one process."""
    return lambda x: x


@pytest.fixture(scope="session")
def on_ranks() -> Callable[..., list[Any]]:
    """Return a function that runs ``rank(batch, sum_ranks)`` for every batch at once, as processes in lock-step do."""

    def run(rank: Callable[..., Any], batches: Sequence[Any]) -> list[Any]:
        barrier, shares = threading.Barrier(len(batches), timeout=30), [None] * len(batches)

        def one(index: int) -> Any:
            def sum_ranks(x: Tensor) -> Tensor:
                shares[index] = x
                barrier.wait()
                total = torch.stack(list(shares)).sum(0)
                barrier.wait()
                return total

            try:
                return rank(batches[index], sum_ranks)
            except BaseException:
                barrier.abort()
                raise

        with ThreadPoolExecutor(len(batches)) as pool:
            return list(pool.map(one, range(len(batches))))

    return run
