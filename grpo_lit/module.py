"""GRPOModule: owns policy, reference and old policy; one ``training_step`` is one optimizer step."""

import copy
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from grpo_lit.batch import TokenBatch
from grpo_lit.errors import ConfigError, TrainingError
from grpo_lit.evaluating import EvaluatingModule
from grpo_lit.metrics.memory import PeakMemory, children_memory
from grpo_lit.objectives import Objective
from grpo_lit.policy.checkpoint import load_model
from grpo_lit.policy.learner import GradientOutput, Learner
from grpo_lit.policy.policy import Policy, can_share_prefix
from grpo_lit.rollout import Completion, Group, Prompt
from grpo_lit.rollouts.minibatch import Minibatch, Rollout

OldPolicy = Literal["logprobs", "weights", "sampler"]


class GRPOModule(EvaluatingModule):
    """A language model trained on its own scored completions.

    One ``training_step`` is one optimizer step over micro-batches of at most ``max_tokens_per_micro_batch`` input
    tokens; ``trainer.global_step``, ``max_steps``, checkpoint and validation intervals count optimizer steps.

    Args:
        checkpoint: Folder or hub id of the model to train; also the tokenizer's and the reference's.
        objective: The recipe; default: GRPO without KL.
        optimizer: Called with the trainable parameters. Default: AdamW at 1e-6 without weight decay.
        lr_scheduler: Called with the optimizer and stepped once per optimizer step. Default: constant.
        old_policy: What the ratio compares with when a rollout gets more than one update. ``logprobs``: scored once
            before the first; ``weights``: a frozen copy of the weights scores each micro-batch; ``sampler``: the
            engine's own log-probs, from the first update on.
        max_tokens_per_micro_batch: Input tokens of one forward, padding included. Sets peak memory; changes no result.
        gradient_clip_norm: Largest global gradient norm; ``null``: no clipping.
        share_prefix: One copy of a prompt for all its completions. ``null``: where the architecture allows it.
        max_idle_minibatches: Stop after this many in a row that could not move the weights.
        gradient_checkpointing: Recompute activations in backward: less memory, about a third more time.
    """

    def __init__(
        self,
        checkpoint: str,
        objective: Objective | None = None,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        old_policy: OldPolicy = "logprobs",
        max_tokens_per_micro_batch: int = 8192,
        gradient_clip_norm: float | None = 1.0,
        share_prefix: bool | None = None,
        max_idle_minibatches: int = 20,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.checkpoint, self.objective = checkpoint, objective or Objective()
        self._make_optimizer, self._make_scheduler = optimizer or _default_optimizer, lr_scheduler
        self.old_policy_source = old_policy
        self.max_tokens_per_micro_batch, self.gradient_clip_norm = max_tokens_per_micro_batch, gradient_clip_norm
        self.share_prefix, self.gradient_checkpointing = share_prefix, gradient_checkpointing
        self.max_idle_minibatches = max_idle_minibatches
        self.policy: Policy | None = None
        self.reference: Policy | None = None
        self.old_policy: Policy | None = None
        self._step_started = time.perf_counter()
        if max_tokens_per_micro_batch < 2:
            raise ConfigError(
                f"`model.max_tokens_per_micro_batch` expected to be >= 2, but got {max_tokens_per_micro_batch}"
            )
        if gradient_clip_norm is not None and gradient_clip_norm <= 0:
            raise ConfigError(
                f"`model.gradient_clip_norm` expected to be > 0, but got {gradient_clip_norm}: use null for no clipping"
            )
        paying = [part for part in self.objective.corrections if part.pays_sampler_ratio]
        if old_policy == "sampler" and paying:
            names = ", ".join(type(part).__name__ for part in paying)
            raise ConfigError(
                f"`model.old_policy: sampler` and `model.objective.corrections: {names}` contradict: the ratio already "
                "compares with the sampler, so there is no gap left to correct. Drop one of them"
            )

    # ------------------------------------------------------------------ set-up

    def setup(self, stage: str) -> None:
        """Refuse precisions in which reinforcement learning silently stands still."""
        precision = str(self.trainer.precision)
        if precision.startswith("16"):
            raise ConfigError(
                f"`trainer.precision` expected 32-true or bf16-mixed, but got {precision}: no loss scaling"
            )
        if precision == "bf16-true":
            rank_zero_warn("trainer.precision=bf16-true: an update below 1/256 of a weight is lost; use bf16-mixed")

    def configure_model(self) -> None:
        """Load the policy, and the copies of it that the objective asks for; once."""
        if self.policy is not None:
            return
        model = load_model(self.checkpoint)
        if self.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        able = can_share_prefix(model)
        if self.share_prefix and not able:
            raise ConfigError(
                f"`model.share_prefix` expected false or null, but got true: {type(model).__name__} attends in a way "
                "that a shared prompt cannot be masked out of"
            )
        self.share_prefix = able if self.share_prefix is None else self.share_prefix
        rank_zero_info(
            f"{type(model).__name__}: prompts are {'shared by' if self.share_prefix else 'repeated for'} "
            "their completions"
        )
        self.policy = Policy(model, entropy_gradient=self.objective.entropy_coefficient > 0).train()
        if self.objective.needs_reference:
            self.reference = self._frozen_copy()
        if self.old_policy_source == "weights":
            self.old_policy = self._frozen_copy()

    def _frozen_copy(self) -> Policy:
        return copy.deepcopy(self.policy).requires_grad_(False).eval()

    def configure_optimizers(self) -> dict[str, Any]:
        """Return the optimizer over trainable parameters, and the schedule in optimizer steps."""
        optimizer = self._make_optimizer([p for p in self.policy.parameters() if p.requires_grad])
        if self._make_scheduler is None:
            return {"optimizer": optimizer}
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self._make_scheduler(optimizer), "interval": "step"},
        }

    @property
    def learner(self) -> Learner:
        """Runs policies over batches on this rank."""
        return Learner(
            self.objective, self.max_tokens_per_micro_batch, bool(self.share_prefix), self.ranks, self.device
        )

    # ------------------------------------------------------------------ training

    def training_step(self, minibatch: Minibatch, batch_idx: int) -> None:
        """Make one optimizer step on one minibatch of a rollout.

        A minibatch that cannot move the weights is replaced by the next, so that batches, ``global_step``, intervals
        and the schedule all count the same.

        Raises:
            TrainingError: After ``max_idle_minibatches`` of those in a row.
        """
        for skipped in range(self.max_idle_minibatches):
            values, problem = self._update(minibatch)
            if problem is None:
                values["optimization/skipped"] = float(skipped)
                values["system/time_step"] = time.perf_counter() - self._step_started
                self._step_started = time.perf_counter()
                self.log_values(values)
                return
            rank_zero_warn(f"step {self.global_step}: a minibatch is skipped and replaced: {problem}")
            minibatch = self.trainer.datamodule.draw()
        raise TrainingError(
            f"{self.max_idle_minibatches} minibatches in a row could not move the weights; the last: {problem}. Check "
            "reward/* and exploration/solve_none on TensorBoard, or raise `model.max_idle_minibatches`"
        )

    def _update(self, minibatch: Minibatch) -> tuple[dict[str, float], str | None]:
        """Try an optimizer step; return what to log, and why nothing could be made of the minibatch."""
        started, memory = time.perf_counter(), PeakMemory(self.device)
        rollout = minibatch.rollout
        if minibatch.update == 0:
            self._begin(rollout)
        batch = rollout.batch.select(rollout.updates[minibatch.update])
        if minibatch.update == 0 and self.old_policy_source != "sampler":
            batch = replace(batch, old_logprobs=None)  # nothing has moved yet: the policy is its own old policy
        output = self.learner.gradient(
            self.policy,
            batch,
            backward=self.manual_backward,
            without_sync=self._without_sync,
            reference=self.reference,
            old_policy=self.old_policy if minibatch.update > 0 else None,
        )
        values = self._step_values(batch, output)
        norm, problem = self._optimizer_step(output)
        values |= {"optimization/loss": output.loss, "optimization/grad_norm": norm}
        values["system/time_learn"] = time.perf_counter() - started
        values["system/memory_learn"] = memory.take()
        values["system/learner_tokens_per_s"] = output.tokens / values["system/time_learn"]
        if minibatch.update == 0:
            values |= self._rollout_values(rollout)
        return values, problem

    def _begin(self, rollout: Rollout) -> None:
        """Fill in what the updates on a rollout need of the weights before the first of them."""
        # Only `logprobs` scores old log-probs here; the other sources have theirs without a forward.
        scored = self.old_policy_source == "logprobs"
        plan = rollout.plan if scored else replace(rollout.plan, num_updates=1, num_epochs=1)
        batch, updates = self.learner.prepare(rollout.batch, plan, self.policy, self.reference)
        if self.old_policy_source == "sampler":
            batch = replace(batch, old_logprobs=batch.sampler_logprobs)
        elif self.old_policy_source == "weights":
            self.old_policy.load_state_dict(self.policy.state_dict())
        rollout.batch = batch
        rollout.updates = updates if scored else rollout.plan.sequences(batch)

    def _without_sync(self, more_follow: bool) -> AbstractContextManager:
        strategy = self.trainer.strategy
        return (
            strategy.block_backward_sync()
            if more_follow and hasattr(strategy, "block_backward_sync")
            else nullcontext()
        )

    def _optimizer_step(self, output: GradientOutput) -> tuple[float, str | None]:
        """Clip, step and schedule; leave weights and optimizer state alone where nothing sound can be made.

        Returns:
            The gradient norm before clipping, and what was wrong with the gradient, if anything.
        """
        optimizer = self.optimizers()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        limit = math.inf if self.gradient_clip_norm is None else self.gradient_clip_norm
        norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
        norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        # Gradients are averaged over ranks by now, so every rank comes to the same verdict.
        problem = None if math.isfinite(norm) else "its gradient is not finite"
        if output.micro_batches == 0:
            problem = "no group has signal (all rewards of each group are equal)"
        if problem is None:
            optimizer.step()
            if (scheduler := self.lr_schedulers()) is not None:
                scheduler.step()
        optimizer.zero_grad()
        return norm, problem

    # ------------------------------------------------------------------ weights, for the engine

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the policy's weights under their Hugging Face names."""
        yield from self.policy.model.state_dict().items()

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return log p(token_t | tokens before t) at temperature 1 for every token but the first [nats]."""
        prompt = Prompt(id="probe", question="", token_ids=tuple(token_ids[:1]))
        rest = tuple(token_ids[1:])
        probe = Completion(rest, (0.0,) * len(rest), text="", finish_reason="stop", weight_version=self.global_step)
        batch = TokenBatch.from_groups([Group(prompt, 0, (probe,), rewards=[0.0])], temperature=1.0)
        return self.learner.evaluate(self.policy, batch).logprobs.tolist()

    # ------------------------------------------------------------------ logging and checkpoints

    def on_validation_end(self) -> None:
        """Leave the time spent on held-out prompts out of the step's."""
        self._step_started = time.perf_counter()

    def _step_values(self, batch: TokenBatch, output: GradientOutput) -> dict[str, float]:
        rates = output.rates
        staleness = (self.global_step - batch.weight_version).double()
        rates.add("system/staleness_mean", staleness)
        rates.maximum("system/staleness_max", staleness)
        learning_rate = self.optimizers().param_groups[0]["lr"]
        rates.add("_advantage_squared", batch.advantages.double() ** 2)  # their mean is 0 by construction
        values = rates.compute(self.ranks.sum, self.ranks.max)
        values["optimization/advantage_std"] = values["_advantage_squared"] ** 0.5
        return self.objective.derived(values) | {"optimization/lr": learning_rate}

    def _rollout_values(self, rollout: Rollout) -> dict[str, float]:
        """Return what is logged once per rollout."""
        values = rollout.rates.compute(self.ranks.sum, self.ranks.max)
        seconds = {f"system/time_{phase}": value for phase, value in rollout.seconds.items()}
        tokens = float(
            self.ranks.sum(torch.tensor(float(sum(len(c.token_ids) for g in rollout.groups for c in g.completions))))
        )
        values["system/rollout_tokens_per_s"] = tokens / max(rollout.seconds.get("rollout", 0.0), 1e-9)
        values |= {"system/memory_rollout": rollout.memory, "system/memory_engine": children_memory()}
        return values | seconds

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Note which model this is, for exporting it."""
        checkpoint["grpo_lit"] = {"format": 1, "checkpoint": self.checkpoint}


def _default_optimizer(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-6, weight_decay=0.0)
