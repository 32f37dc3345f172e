"""The arms: each makes the same optimizer step in its own way."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from grpo_lit.batch import TokenBatch
from grpo_lit.bench.flops import now
from grpo_lit.bench.plain import PlainLearner
from grpo_lit.bench.settings import Settings
from grpo_lit.bench.workload import Models, make_batch, make_models, make_objective
from grpo_lit.errors import ConfigError
from grpo_lit.objectives import Objective
from grpo_lit.policy.compiling import compile_norms
from grpo_lit.policy.learner import Learner
from grpo_lit.policy.policy import Policy, can_share_prefix
from grpo_lit.policy.precision import cast_once, hold_casts
from grpo_lit.policy.recompute import recompute
from grpo_lit.ranks import Ranks
from grpo_lit.rollouts.minibatch import UpdatePlan


@dataclass(frozen=True)
class Step:
    """What an optimizer step took.

    Attributes:
        loss: Of the step.
        gradient_seconds: From the rollout to its gradient.
        optimizer_seconds: Of the update.
    """

    loss: float
    gradient_seconds: float
    optimizer_seconds: float


class Arm(ABC):
    """One way to make an optimizer step.

    The learning rate is 0: the update takes its time, and every step starts from the same weights.

    Args:
        settings: Of the benchmark.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings, self.device = settings, settings.device
        self.objective: Objective = make_objective(settings)
        self.models: Models = make_models(settings, self.objective.needs_reference)
        self.optimizer = torch.optim.AdamW(self.models.policy.parameters(), lr=0.0, weight_decay=0.0)
        # Its two moments are there from the start, so that no step pays for them.
        for parameter in self.models.policy.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @abstractmethod
    def prepare(self, groups: int) -> None:
        """Make what the next steps need: a rollout of this many groups. Called before memory is looked at."""

    @abstractmethod
    def step(self, on_gradient: Callable[[], None]) -> Step:
        """Make a step on the rollout.

        Args:
            on_gradient: Called once the gradient is there, and not timed.
        """

    def autocast(self) -> AbstractContextManager:
        """Return the context of forward passes."""
        if self.settings.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, self.settings.dtype)


class _TimedArm(Arm):
    """An arm whose gradient is one call."""

    batch: TokenBatch

    def prepare(self, groups: int) -> None:
        self.batch = make_batch(self.settings, groups)

    @abstractmethod
    def gradient(self, batch: TokenBatch) -> float:
        """Accumulate the gradient of a rollout; return the loss."""

    def step(self, on_gradient: Callable[[], None]) -> Step:
        started = now(self.device)
        with self.autocast():
            loss = self.gradient(self.batch)
        gradient_seconds = now(self.device) - started
        on_gradient()
        started = now(self.device)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return Step(loss, gradient_seconds, now(self.device) - started)


class OurArm(_TimedArm):
    """Ours: shared prompts, packs under a token budget, a head in chunks; weights are cast as in a run."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        share = can_share_prefix(self.models.policy)
        ranks = Ranks(SingleDeviceStrategy(device=self.device))
        self.learner = Learner(self.objective, settings.budget, share, ranks, self.device)
        if not settings.gradient_checkpointing:
            recompute(self.models.policy, "norms")
        self.policy = Policy(self.models.policy, entropy_gradient=self.objective.entropy_coefficient > 0)
        self.reference = None if self.models.reference is None else Policy(self.models.reference)
        if self.reference is not None:
            hold_casts(self.reference, settings.dtype)

    def gradient(self, batch: TokenBatch) -> float:
        """Accumulate the gradient; see the base class."""
        # Apart, as in a run: a weight that was cast without gradient has none.
        with cast_once(self.device):
            batch, _ = self.learner.prepare(batch, UpdatePlan(), self.policy, self.reference)
        with cast_once(self.device):
            output = self.learner.gradient(
                self.policy, batch, lambda loss: loss.backward(), lambda more: nullcontext(), self.reference
            )
        return output.loss


class CompiledArm(OurArm):
    """Ours with compiled norms."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        for model in (self.models.policy, self.models.reference):
            if model is not None:
                compile_norms(model)


class PlainArm(_TimedArm):
    """Padded rows and full logits."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        if self.objective.entropy_coefficient > 0:
            raise ConfigError(
                "`recipe` expected no entropy bonus, but got one: the plain learner makes no gradient of it"
            )
        self.learner = PlainLearner(self.objective, settings.plain_rows, self.device)

    def gradient(self, batch: TokenBatch) -> float:
        """Accumulate the gradient; see the base class."""
        return self.learner.gradient(self.models.policy, batch, self.models.reference)
