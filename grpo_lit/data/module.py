"""RolloutDataModule: prompts, engine and rewards as a stream of minibatches that Lightning cannot run ahead of."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from transformers import PreTrainedTokenizerBase

from grpo_lit.batch import TokenBatch
from grpo_lit.callback import RolloutHooks
from grpo_lit.data.checks import check_counts, check_engine, check_room, check_sampling, check_staleness
from grpo_lit.data.curriculum import SolveRates
from grpo_lit.data.evaluation import Evaluation, EvaluationBatch, answered
from grpo_lit.data.heldout import HeldOut
from grpo_lit.data.loaders import EvaluationLoader, RolloutLoader
from grpo_lit.data.options import RolloutOptions
from grpo_lit.data.screen import Screen, logged_apart
from grpo_lit.data.source import PromptSource
from grpo_lit.data.state import asked_again, gathered, own_share, sampled_as, without_groups
from grpo_lit.data.stream import PromptStream
from grpo_lit.data.template import PromptTemplate
from grpo_lit.data.weights import WeightSync
from grpo_lit.errors import ConfigError
from grpo_lit.metrics.memory import PeakMemory
from grpo_lit.policy.checkpoint import load_tokenizer, resolve_checkpoint, stop_token_ids
from grpo_lit.ranks import Ranks
from grpo_lit.rewards.combination import RewardCombination
from grpo_lit.rollout import Prompt, Sampling
from grpo_lit.rollouts.collector import Collector
from grpo_lit.rollouts.engine import Engine, EngineModel
from grpo_lit.rollouts.minibatch import Minibatch, Rollout, UpdatePlan
from grpo_lit.rollouts.queue import RolloutQueue
from grpo_lit.rollouts.replay import ReplayBuffer
from grpo_lit.rollouts.sampler import Sampler
from grpo_lit.strategies.failures import FailureWatch


class RolloutDataModule(LightningDataModule):
    """Rollouts of the policy being trained, and answers to held-out prompts.

    Args:
        engine: Who draws completions.
        train: Prompts to train on.
        rewards: What a completion is worth, and which reward says that it is correct.
        val: Held-out prompts by name, scored by ``fit`` before the first step and on Lightning's schedule, and by
            ``validate``, ``test`` and ``predict``.
        template: How a question becomes a prompt.
        sampling: Temperature, length and number of completions per prompt in training.
        evaluation: How held-out prompts are answered.
        prompts_per_rollout: Prompts of one rollout over all ranks.
        num_updates: Optimizer steps a rollout is cut into.
        num_epochs: Passes over a rollout.
        max_prompt_tokens: Longer prompts are left out and counted.
        seed: Of prompt order and sampling.
        probe_tolerance: Mean gap of log-probs between engine and learner on a fixed text, after each weight sync, from
            which a warning is given [nats]. bf16 engines differ from a float32 learner by .02 to .05.
        rollout: Dynamic sampling, replay, curriculum: what a rollout is made of; and whether it is drawn ahead.
        checkpoint: The model; set by the command line from ``model.checkpoint``.
    """

    def __init__(
        self,
        engine: Engine,
        train: PromptSource,
        rewards: RewardCombination,
        val: dict[str, PromptSource] | None = None,
        template: PromptTemplate = PromptTemplate(),  # noqa: B008 (frozen, as the two below)
        sampling: Sampling = Sampling(),  # noqa: B008
        evaluation: Evaluation = Evaluation(),  # noqa: B008
        prompts_per_rollout: int = 32,
        num_updates: int = 1,
        num_epochs: int = 1,
        max_prompt_tokens: int = 512,
        seed: int = 0,
        probe_tolerance: float = 0.2,
        rollout: RolloutOptions = RolloutOptions(),  # noqa: B008
        checkpoint: str = "",
    ) -> None:
        super().__init__()
        self.engine, self.train, self.rewards, self.val = engine, train, rewards, val or {}
        self.template, self.sampling, self.evaluation = template, sampling, evaluation
        self.prompts_per_rollout, self.num_updates, self.num_epochs = prompts_per_rollout, num_updates, num_epochs
        self.max_prompt_tokens, self.seed, self.checkpoint = max_prompt_tokens, seed, checkpoint
        self.sampler = Sampler(engine, rewards, seed, rollout.engine_calls, rollout.dynamic_sampling)
        buffer = None if rollout.replay is None else ReplayBuffer(rollout.replay)
        self.asynchronous, self.queue = rollout.asynchronous, RolloutQueue(self.sampler, rollout.asynchronous)
        self.weights = WeightSync(self.queue, probe_tolerance)
        self.collector = Collector(self.queue, list(rewards.rewards), rollout.dynamic_sampling, buffer)
        self.solve_rates = SolveRates(rollout.curriculum, seed)
        self.stream: PromptStream | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._held_out: HeldOut | None = None
        self._screen: Screen | None = None
        self._rollout: Rollout | None = None
        self._update, self._rollouts, self._started = 0, 0, False
        self._before_step: tuple[int, dict[str, Any]] | None = None
        check_sampling(sampling, rollout)
        check_counts(self)
        check_staleness(rollout, num_updates * num_epochs)
        check_engine(engine, sampling, rollout)

    # ------------------------------------------------------------------ set-up and end

    def setup(self, stage: str) -> None:
        """Check what can be checked before any model is loaded."""
        FailureWatch.begin(self.trainer)
        if self._tokenizer is None:
            if len(self.train) < self.prompts_per_rollout and stage == "fit":
                raise ConfigError(
                    f"`data.prompts_per_rollout` expected at most the {len(self.train)} prompts of `data.train`, but "
                    f"got {self.prompts_per_rollout}"
                )
            tokenizer = load_tokenizer(self.checkpoint)
            check_room(self.checkpoint, self.max_prompt_tokens, self.sampling.max_tokens)
            self._held_out = HeldOut(self.val, self.template, tokenizer, self.max_prompt_tokens, self.rewards.problem)
            passes_over = self.solve_rates.passes_over if self.solve_rates.settings else None
            self.stream = PromptStream(
                self.train, self.template, tokenizer, self.max_prompt_tokens, self.seed, passes_over
            )
            self._tokenizer = tokenizer
        if self._screen is None and stage == "fit":
            screen = Screen(self.stream, self._held_out, self.rewards)
            screen.inspect(self.ranks, self.prompts_per_rollout)
            self._screen = screen
            self.collector.domains = logged_apart("data.train", screen.domains)

    @property
    def domains(self) -> tuple[str, ...]:
        """Domains of the training prompts, as far as they are known; none before :meth:`setup` for ``fit``."""
        return self._screen.domains if self._screen else ()

    def teardown(self, stage: str) -> None:
        """End the engine."""
        self.close()

    def on_exception(self, exception: BaseException) -> None:
        """End the engine on errors and on Ctrl-C too: no process outlives the run."""
        self.close()

    def close(self) -> None:
        """End the engine, what is being drawn, and the processes of the rewards; a later fit starts them anew."""
        self._started = False
        self.queue.give_up()
        with ExitStack() as ends:  # from the last to the first, whichever of them fails
            ends.callback(self.queue.join)
            ends.callback(self.rewards.close)
            ends.callback(self.engine.close)

    @property
    def ranks(self) -> Ranks:
        """All processes of the run."""
        return Ranks(self.trainer.strategy)

    def sync_weights(self, in_passing: bool = False) -> float:
        """Give the engine the learner's weights if it holds others, and return how long that took [s].

        Args:
            in_passing: Though it draws meanwhile, and only where it is time; else nothing may be drawn.
        """
        started, module = time.perf_counter(), self.trainer.lightning_module
        sync = self.weights.in_passing if in_passing and self._started else self.weights.now
        if not self._started:
            stops = stop_token_ids(self.checkpoint)
            length = self.max_prompt_tokens + self.sampling.max_tokens
            self.engine.start(EngineModel(resolve_checkpoint(self.checkpoint), stops, length))
            self._started = True
        sync(module, self.stream.probe_ids, self.ranks)
        return time.perf_counter() - started

    # ------------------------------------------------------------------ training

    def train_dataloader(self) -> RolloutLoader:
        """Return the stream of minibatches."""
        rollouts_per_epoch = len(self.train) // self.prompts_per_rollout
        return RolloutLoader(self.draw, rollouts_per_epoch * self.num_updates * self.num_epochs)

    def draw(self) -> Minibatch:
        """Return the next minibatch, of a new rollout where the last one is used up; all ranks must call."""
        step = self.trainer.lightning_module.global_step
        if self._before_step is None or self._before_step[0] != step:
            self._before_step = (step, self._state())
        self.queue.check()
        if self._rollout is None or self._update == self._rollout.plan.steps:
            self._rollout, self._update = self._new_rollout(), 0
        elif self.queue.takes_newest and self._started:
            self.sync_weights(in_passing=True)
        self._update += 1
        self.engine.rest()
        return Minibatch(self._rollout, self._update - 1)

    def _new_rollout(self) -> Rollout:
        memory = PeakMemory(self.trainer.strategy.root_device)
        sync_seconds = self.sync_weights(in_passing=self.asynchronous is not None)
        before, step = self._left_out(), self.trainer.lightning_module.global_step
        take, steps = partial(self._screen.take, ranks=self.ranks), self.num_updates * self.num_epochs
        oldest, ahead = None, 0
        if self.asynchronous is not None:
            oldest = step - self.asynchronous.slack(steps)
            ahead = self.asynchronous.rollouts_ahead(steps, step - self.queue.handover.version)
        wanted, hooks, ranks = self.prompts_per_rollout, RolloutHooks(self.trainer), self.ranks
        got = self.collector.collect(wanted, take, self.sampling, ranks, step, hooks, oldest)
        self.solve_rates.record(got.solved)
        coming = [self.collector.first_round(wanted, after) for after in range(ahead)]
        self.queue.fill(coming, take, self.sampling, ranks)
        batch = TokenBatch.from_groups(got.groups, self.sampling.temperature, list(self.rewards.rewards))
        places = torch.tensor(got.places, dtype=torch.long)
        decoupled = self.asynchronous is not None and self.asynchronous.stale_old_policy == "learner"
        stale = None if decoupled else batch.weight_version < step
        batch = replace(batch, prompt=places[batch.group], stale=stale)
        plan = UpdatePlan(self.num_updates, self.num_epochs, self.seed + self._rollouts, prompts=got.size)
        self._rollouts += 1
        for name, total in self._left_out().items():
            flags = [1.0] * (total - before[name]) + [0.0] * max(len(got.solved), 1)
            got.rates.add(name, torch.tensor(flags))
        got.rates.maximum("system/sync_bytes", torch.tensor(self.queue.handover.take_bytes()))
        seconds = self.queue.take_seconds()
        seconds["sync"] = seconds.get("sync", 0.0) + sync_seconds
        return Rollout(got.groups, batch, plan, [], got.rates, seconds, memory.take(), got.tokens)

    def _left_out(self) -> dict[str, int]:
        """Return how many prompts were not asked since the process began, by the name their share is logged under."""
        return {
            "length/long_prompts": self.stream.dropped_long,
            "exploration/passed_over": self.stream.passed_over,
            "reward/unreadable_prompts": self._screen.unreadable,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return where the stream stands, and each rank's groups in waiting and rollout in progress; plain types only.

        In the middle of an optimizer step (Ctrl-C, a crash) that is the state before it: what was drawn for it has not
        been trained on, and is drawn again. What is being drawn ahead is waited for, unless the run is being ended:
        then its prompts are kept, to be asked again.
        """
        if self._before_step is not None and self._before_step[0] == self.trainer.lightning_module.global_step:
            return gathered(self._before_step[1], self.ranks)
        if self.trainer.state.status != TrainerStatus.INTERRUPTED:
            self.queue.settle()
        return gathered(self._state(), self.ranks)

    def _state(self) -> dict[str, Any]:
        open_rollout = self._rollout is not None and self._update < self._rollout.plan.steps
        return {
            "stream": self.stream.state_dict(),
            "rollouts": self._rollouts,
            "sampled_as": sampled_as(self.rewards, self.sampling),
            "collector": self.collector.state_dict(),
            "queue": self.queue.state_dict(),
            "solve_rates": self.solve_rates.state_dict(),
            "update": self._update if open_rollout else 0,
            "rollout": self._rollout.state_dict() if open_rollout else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken; evaluation asks its own prompts and needs none of it."""
        if self.trainer.state.fn != TrainerFn.FITTING:
            return
        state = own_share(state, self.ranks)
        self.stream.load_state_dict(state["stream"])
        self._rollouts, self._update = state["rollouts"], state["update"]
        if state["collector"] is not None:  # as in checkpoints made before there was anything to carry over
            if state.get("sampled_as") != sampled_as(self.rewards, self.sampling):
                state["collector"] = without_groups(state["collector"])
                state["queue"] = asked_again(state["queue"])
            self.queue.load_state_dict(state["queue"])
            self.collector.load_state_dict(state["collector"])
            self.solve_rates.load_state_dict(state["solve_rates"])
        self._rollout = None
        if state["rollout"] is not None:
            self._rollout = Rollout.from_state_dict(state["rollout"])

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Leave a batch where it is: the learner moves micro-batches one by one."""
        return batch

    # ------------------------------------------------------------------ held-out prompts

    def val_dataloader(self) -> list[EvaluationLoader]:
        """Return one loader per held-out set."""
        return [self._evaluation_loader(name) for name in self.val]

    test_dataloader = predict_dataloader = val_dataloader

    def _evaluation_loader(self, name: str) -> EvaluationLoader:
        mine = list(enumerate(self._held_out.prompts[name]))[self.ranks.rank :: self.ranks.world_size]
        domains = logged_apart(f"data.val.{name}", self._held_out.domains(name))
        return EvaluationLoader(mine, partial(self._answer, name, domains), self.evaluation.prompts_per_batch)

    def _answer(self, name: str, domains: Sequence[str], numbered: Sequence[tuple[int, Prompt]]) -> EvaluationBatch:
        self.queue.settle()
        self.sync_weights()
        return answered(name, numbered, self.sampler, self.evaluation, self.sampling.max_tokens, domains)
