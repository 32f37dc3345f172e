"""Where in an answer sampler and learner disagree."""

import math
from collections.abc import Sequence
from typing import cast

import torch
from lightning.pytorch import LightningModule, Trainer

from grpo_lit.batch import TokenBatch
from grpo_lit.callback import RolloutCallback
from grpo_lit.errors import ConfigError
from grpo_lit.metrics.rates import Rates
from grpo_lit.module import GRPOModule
from grpo_lit.objectives import Objective, Terms
from grpo_lit.policy.policy import PolicyOutput


class MismatchByPosition(RolloutCallback):
    """Logs ``system/mismatch_abs_from_<n>``: the gap of engine and learner at completion tokens from position n on.

    A gap that grows along the answer is a numerical one that builds up in the cache of the engine or under its
    attention; one that jumps at some position is another mask, a sliding window, or a rope scaled otherwise. Each is a
    mean over the tokens of a step, as ``system/mismatch_abs`` is over all of them, and a bucket without tokens logs
    nothing.

    Args:
        edges: First position of each bucket, the first of them 0, rising.

    Raises:
        ConfigError: For edges that are none.
    """

    def __init__(self, edges: Sequence[int] = (0, 16, 64, 256, 1024, 4096, 16384)) -> None:
        if not edges or edges[0] != 0 or sorted(set(edges)) != list(edges):
            raise ConfigError(
                f"`edges` of MismatchByPosition expected rising positions from 0 on, but got {list(edges)}"
            )
        self.edges = tuple(edges)
        self._objective: Objective | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Have every micro-batch measured."""
        module = cast("GRPOModule", pl_module)
        self._objective = module.objective
        module.measurements.append(self.measure)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure no more."""
        cast("GRPOModule", pl_module).measurements.remove(self.measure)

    def measure(self, batch: TokenBatch, output: PolicyOutput) -> Rates:
        """Return |logp_old - logp_sampler| of the tokens of each bucket that ``system/mismatch_abs`` counts."""
        terms = Terms.of(batch, output.logprobs, output.entropy)
        gap = (terms.old_logprobs - terms.sampler_logprobs).abs()
        starts = batch.lengths.cumsum(0) - batch.lengths
        position = torch.arange(len(gap), device=gap.device) - starts[terms.sequence]
        counted, rates = self._objective.is_moved_by_task(batch)[terms.sequence], Rates()
        for first, end in zip(self.edges, (*self.edges[1:], math.inf), strict=True):
            rates.add(f"system/mismatch_abs_from_{first}", gap[counted & (position >= first) & (position < end)])
        return rates
