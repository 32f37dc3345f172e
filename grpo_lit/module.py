"""GRPOModule: owns policy, reference and old policy; one ``training_step`` is one optimizer step."""

import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities import rank_zero_warn

from grpo_lit.batch import TokenBatch
from grpo_lit.callback import RolloutHooks
from grpo_lit.checkpoints import CheckpointedModule
from grpo_lit.errors import ConfigError, TrainingError
from grpo_lit.interrupts import held_back
from grpo_lit.metrics.memory import PeakMemory
from grpo_lit.metrics.rollout import rollout_values
from grpo_lit.models import ReferenceDtype
from grpo_lit.objectives import Objective, Shadows
from grpo_lit.objectives.checks import meet_rewards
from grpo_lit.optimizers import default_optimizer, warn_of_lost_updates
from grpo_lit.policy.adapter import LoRA
from grpo_lit.policy.learner import GradientOutput, Learner, Measurement
from grpo_lit.policy.precision import float32_by_default, weights_dtype
from grpo_lit.policy.quantization import NF4
from grpo_lit.policy.recompute import Recomputed
from grpo_lit.rollout import Completion, Group, Prompt
from grpo_lit.rollouts.minibatch import Minibatch, Rollout
from grpo_lit.strategies.gradients import clip_gradients, drop_gradients

OldPolicy = Literal["logprobs", "weights", "sampler"]
#: What a run that stands still says of itself.
_TOLD = ("reward/", "exploration/solve", "exploration/zero")


class GRPOModule(CheckpointedModule):
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
        gradient_checkpointing: What backward makes again: layers (``true``), norms (nearly free), nothing (``false``).
        shadows: Further recipes by name, measured on the same batches and not trained: ``shadow/cosine_<name>`` and
            ``shadow/norm_<name>`` hold their gradient with respect to the log-probs against the trained one's.
        adapter: Train a low-rank change of the model instead of its weights.
        quantization: Hold the weights beside an adapter in 4 bits.
        activation_offload: Keep what backward needs of a forward in the machine's memory, where it is pinned, instead
            of the GPU's: less of the GPU's memory, and time where the bus is slower than the layers.
        reference_dtype: How to hold the reference. ``auto``: computes as the policy does, to the last bit; ``bfloat16``
            and ``nf4`` take a half and a seventh of float32's memory and begin at a small KL.
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
        gradient_checkpointing: Recomputed = "norms",
        shadows: dict[str, Objective] | None = None,
        adapter: LoRA | None = None,
        quantization: NF4 | None = None,
        reference_dtype: ReferenceDtype = "auto",
        activation_offload: bool = False,
    ) -> None:
        trained, others = objective or Objective(), Shadows(shadows or {})
        super().__init__(
            checkpoint,
            needs_reference=trained.needs_reference or others.needs_reference,
            needs_old_policy=old_policy == "weights",
            share_prefix=share_prefix,
            gradient_checkpointing=gradient_checkpointing,
            adapter=adapter,
            quantization=quantization,
            reference_dtype=reference_dtype,
        )
        self.automatic_optimization = False
        self.activation_offload = activation_offload
        self.objective, self.shadows = trained, others
        self._make_optimizer, self._make_scheduler = optimizer or default_optimizer, lr_scheduler
        self.old_policy_source = old_policy
        self.max_tokens_per_micro_batch, self.gradient_clip_norm = max_tokens_per_micro_batch, gradient_clip_norm
        self.max_idle_minibatches = max_idle_minibatches
        #: What callbacks measure of every micro-batch, into the figures of its step.
        self.measurements: list[Measurement] = []
        self._step_started = time.perf_counter()
        for name, bound in {"max_tokens_per_micro_batch": 2, "max_idle_minibatches": 1}.items():
            if getattr(self, name) < bound:
                raise ConfigError(f"`model.{name}` expected to be >= {bound}, but got {getattr(self, name)}")
        if gradient_clip_norm is not None and gradient_clip_norm <= 0:
            raise ConfigError(
                f"`model.gradient_clip_norm` expected to be > 0, but got {gradient_clip_norm}: use null for no clipping"
            )
        if activation_offload and gradient_checkpointing is True:
            raise ConfigError(
                "`model.activation_offload` and `model.gradient_checkpointing: true` contradict: drop one of them"
            )
        paying = [part for part in self.objective.corrections if part.pays_sampler_ratio]
        if old_policy == "sampler" and paying:
            names = ", ".join(type(part).__name__ for part in paying)
            raise ConfigError(
                f"`model.old_policy: sampler` and `model.objective.corrections: {names}` contradict: the ratio already "
                "compares with the sampler, so there is no gap left to correct. Drop one of them"
            )

    def setup(self, stage: str) -> None:
        """Refuse what contradicts, before any model is loaded."""
        super().setup(stage)
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        for recipe in (self.objective, *self.shadows.recipes.values()):
            if recipe.needs_reference:
                recipe.divergence.check_domains(data.domains)
            meet_rewards(recipe, data.rewards.rewards)
        weights_dtype(str(self.trainer.precision))

    def configure_optimizers(self) -> dict[str, Any]:
        """Return the optimizer over trainable parameters, and the schedule in optimizer steps."""
        optimizer = self._make_optimizer([p for p in self.policy.parameters() if p.requires_grad])
        warn_of_lost_updates(optimizer)
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
            self.objective,
            self.max_tokens_per_micro_batch,
            bool(self.share_prefix),
            self.ranks,
            self.trainer.strategy.root_device,
            self.shadows,
            self.measurements,
        )

    @float32_by_default()
    def training_step(self, minibatch: Minibatch, batch_idx: int) -> None:
        """Make one optimizer step on one minibatch of a rollout.

        A minibatch that cannot move the weights is replaced by the next, so that batches, ``global_step``, intervals
        and the schedule all count the same.

        Raises:
            TrainingError: After ``max_idle_minibatches`` of those in a row.
        """
        step, tries = self.global_step, list[Rollout]()
        for skipped in range(self.max_idle_minibatches):
            minibatch = self.trainer.datamodule.draw() if skipped else minibatch  # type: ignore[attr-defined]
            tries += [minibatch.rollout] if minibatch.update == 0 else []
            values, problem = self._update(minibatch)
            if problem is None:
                break
            rank_zero_warn(f"step {self.global_step}: a minibatch is skipped and replaced: {problem}")
        values |= rollout_values(tries, self.ranks) if tries else {}
        values["optimization/skipped"] = float(skipped if problem is None else skipped + 1)
        values["system/time_step"] = time.perf_counter() - self._step_started
        self._step_started = time.perf_counter()
        self.log_at(step, values)
        if problem is not None:
            seen = ", ".join(f"{name} {value:.3g}" for name, value in values.items() if name.startswith(_TOLD))
            raise TrainingError(
                f"{self.max_idle_minibatches} minibatches in a row could not move the weights; the last: {problem}. "
                f"They had {seen}. Change the task or the rewards, or raise `model.max_idle_minibatches`"
            )
        RolloutHooks(self.trainer).step_finished(minibatch, values)

    def _update(self, minibatch: Minibatch) -> tuple[dict[str, float], str | None]:
        """Try an optimizer step; return what to log, and why nothing could be made of the minibatch."""
        started, memory = time.perf_counter(), PeakMemory(self.trainer.strategy.root_device)
        rollout = minibatch.rollout
        self.policy.set_entropy_gradient(self.objective.entropy_coefficient > 0)  # a controller may have changed it
        if minibatch.update == 0:
            self._begin(rollout)
        batch = rollout.batch.select(rollout.updates[minibatch.update])
        if minibatch.update == 0 and self.old_policy_source != "sampler":
            # Nothing has moved yet: of what was sampled for this rollout, the policy is its own old policy.
            stale = batch.stale is not None and bool(batch.stale.any())
            batch = replace(
                batch, old_logprobs=batch.sampler_logprobs if stale else None, own=~batch.stale if stale else None
            )
        with self.cast_once():
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
        tokens = float(self.ranks.sum(torch.tensor(float(output.tokens))))
        values["system/learner_tokens_per_s"] = tokens / values["system/time_learn"]
        return values, problem

    def _begin(self, rollout: Rollout) -> None:
        """Fill in what the updates on a rollout need of the weights before the first of them."""
        # Only `logprobs` scores old log-probs here; the other sources have theirs without a forward.
        scored = self.old_policy_source == "logprobs"
        plan = rollout.plan if scored else replace(rollout.plan, num_updates=1, num_epochs=1)
        with self.cast_once():
            batch, updates = self.learner.prepare(rollout.batch, plan, self.policy, self.reference)
        if self.old_policy_source == "sampler":
            batch = replace(batch, old_logprobs=batch.sampler_logprobs)
        elif self.old_policy_source == "weights":
            self.keep_old_policy()
        rollout.batch = batch
        rollout.updates = updates if scored else rollout.plan.sequences(batch, self.ranks.sum)

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
        strategy = self.trainer.strategy
        if output.micro_batches == 0:
            return 0.0, "no group has signal (all rewards of each group are equal)"
        norm = clip_gradients(strategy, self.policy, parameters, self.gradient_clip_norm)
        # Gradients are averaged over ranks by now, so every rank comes to the same verdict.
        problem = None if math.isfinite(norm) else "its gradient is not finite"
        if problem is None:
            with held_back():  # weights and the count of steps go together
                optimizer.step()
                if (scheduler := self.lr_schedulers()) is not None:
                    scheduler.step()
        else:
            drop_gradients(strategy)
        optimizer.zero_grad()
        return norm, problem

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return log p(token_t | tokens before t) at temperature 1 for every token but the first [nats]."""
        prompt = Prompt(id="probe", question="", token_ids=tuple(token_ids[:1]))
        rest = tuple(token_ids[1:])
        probe = Completion(rest, (0.0,) * len(rest), text="", finish_reason="stop", weight_version=self.global_step)
        batch = TokenBatch.from_groups([Group(prompt, 0, (probe,), rewards=[0.0])], temperature=1.0)
        with self.trainer.precision_plugin.forward_context():  # called outside of any step
            return self.learner.evaluate(self.policy, batch).logprobs.tolist()

    def on_validation_end(self) -> None:
        """Leave the time spent on held-out prompts out of the step's."""
        self._step_started = time.perf_counter()

    def _step_values(self, batch: TokenBatch, output: GradientOutput) -> dict[str, float]:
        rates = output.rates
        staleness = (self.global_step - batch.token_versions).double()
        rates.add("system/staleness_mean", staleness)
        rates.maximum("system/staleness_max", staleness)
        learning_rate = self.optimizers().param_groups[0]["lr"]
        rates.add("_advantage_squared", batch.advantages.double() ** 2)  # their mean is 0 by construction
        values = rates.compute(self.ranks.sum, self.ranks.max)
        values["optimization/advantage_std"] = values["_advantage_squared"] ** 0.5
        values["optimization/lr"] = learning_rate
        return self.objective.derived(values) | self.shadows.derived(values)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Note that a batch begun but not finished will be made again."""
        progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress", {})
        for counts in progress.values():
            if isinstance(counts, dict) and counts["ready"] > counts["processed"]:
                counts |= dict.fromkeys(("ready", "started"), counts["completed"])
        super().on_save_checkpoint(checkpoint)
