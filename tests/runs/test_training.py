"""What every run must do: versions, ratios, steps and schedules, whatever the number of updates on a rollout."""

import csv
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from toys import Constant, EvenShare, Letters
from transformers import AutoModelForCausalLM

from grpo_lit.errors import ConfigError, TrainingError
from grpo_lit.objectives import K3, GDPOAdvantage, Objective, TokenClip, TruncatedIS
from grpo_lit.rewards import RewardCombination, WeightedReward
from grpo_lit.rewards.reward import Reward
from grpo_lit.rollout import Completion, Prompt, Sampling


class IdSum(Reward):
    """Sum of the token ids: differs within every group."""

    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float | None]:
        return [float(sum(completion.token_ids)) for completion in completions]


class Recorder(Callback):
    """Keeps what each optimizer step was made of and what it logged."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        versions = batch.rollout.batch.weight_version.unique().tolist()
        self.steps.append({"version": versions, "global_step": trainer.global_step, "update": batch.update})

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.steps[-1] |= values | {"lr_after": trainer.optimizers[0].param_groups[0]["lr"]}


def test_a_rollout_is_drawn_with_the_weights_of_the_step_that_trains_on_it(
    make_module: Callable, make_data: Callable, make_trainer: Callable
) -> None:
    recorder = Recorder()
    make_trainer(max_steps=7, callbacks=[recorder]).fit(make_module(), datamodule=make_data())
    assert [step["version"] for step in recorder.steps] == [[k] for k in range(7)]
    assert [step["global_step"] for step in recorder.steps] == list(range(7))


def test_on_policy_the_ratio_is_exactly_one_and_nothing_is_clipped(
    make_module: Callable, make_data: Callable, make_trainer: Callable
) -> None:
    recorder = Recorder()
    objective = Objective(surrogate=TokenClip(low=0.0, high=0.0))
    make_trainer(callbacks=[recorder]).fit(make_module(objective=objective), datamodule=make_data())
    for step in recorder.steps:
        assert step["optimization/ratio_max"] == 1.0
        assert step["optimization/clip_low"] == step["optimization/clip_high"] == step["optimization/kl_old"] == 0.0
        # The engine holds the same float32 weights: it only adds in another order.
        assert step["system/mismatch_abs"] < 1e-5
        assert step["optimization/grad_norm"] > 0


@pytest.mark.parametrize("old_policy", ["logprobs", "weights"])
@pytest.mark.parametrize(("num_updates", "num_epochs"), [(2, 1), (3, 1), (1, 3), (2, 2)])
def test_later_updates_compare_with_the_weights_before_the_first(
    make_module: Callable,
    make_data: Callable,
    make_trainer: Callable,
    old_policy: str,
    num_updates: int,
    num_epochs: int,
) -> None:
    # Field bug A10. A budget of 2 tokens makes every sequence a micro-batch: accumulation changes none of it.
    recorder = Recorder()
    data = make_data(num_updates=num_updates, num_epochs=num_epochs)
    per_rollout = num_updates * num_epochs
    make_trainer(max_steps=2 * per_rollout, callbacks=[recorder]).fit(
        make_module(old_policy=old_policy, max_tokens_per_micro_batch=2), datamodule=data
    )
    assert len(recorder.steps) == 2 * per_rollout  # global_step counts optimizer steps
    for k, step in enumerate(recorder.steps):
        assert step["update"] == k % per_rollout
        assert step["version"] == [k - k % per_rollout]
        assert (step["optimization/ratio_max"] == 1.0) == (k % per_rollout == 0)
        assert step["system/staleness_max"] == k % per_rollout


def test_both_snapshots_of_the_old_policy_train_alike(
    make_module: Callable, make_data: Callable, make_trainer: Callable, weights_of: Callable
) -> None:
    ends = []
    for old_policy in ("logprobs", "weights"):
        module = make_module(old_policy=old_policy)
        make_trainer(max_steps=4).fit(module, datamodule=make_data(num_updates=2))
        ends.append(weights_of(module))
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)


def test_the_sampler_as_old_policy_leaves_its_gap_in_the_ratio(
    make_module: Callable, make_data: Callable, make_trainer: Callable
) -> None:
    recorder = Recorder()
    make_trainer(max_steps=1, callbacks=[recorder]).fit(make_module(old_policy="sampler"), datamodule=make_data())
    assert recorder.steps[0]["system/mismatch_abs"] == 0.0  # by definition: old and sampler are one
    assert 0 < abs(recorder.steps[0]["optimization/ratio_max"] - 1.0) < 1e-3


def test_the_schedule_counts_optimizer_steps(
    make_module: Callable, make_data: Callable, make_trainer: Callable
) -> None:
    """Field bug G3: Lightning steps no schedule in manual optimization, and counts epochs where it does."""
    recorder = Recorder()
    warmup = lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 0.25, 1.0, total_iters=3)  # noqa: E731
    module = make_module(lr_scheduler=warmup)
    make_trainer(max_steps=6, callbacks=[recorder]).fit(module, datamodule=make_data(num_updates=2))
    rates = [step["optimization/lr"] for step in recorder.steps]
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01])


def test_the_reference_exists_only_where_kl_is_paid_and_starts_equal(
    make_module: Callable, make_data: Callable, make_trainer: Callable
) -> None:
    without = make_module()
    make_trainer(max_steps=1).fit(without, datamodule=make_data())
    assert without.reference is None
    recorder, module = Recorder(), make_module(objective=Objective(divergence=K3(beta=0.1)))
    make_trainer(max_steps=3, callbacks=[recorder]).fit(module, datamodule=make_data())
    kls = [step["optimization/kl_reference"] for step in recorder.steps]
    assert kls[0] == pytest.approx(0, abs=1e-9)
    assert kls[1] > 0
    assert not any(p.requires_grad for p in module.reference.parameters())


def test_a_step_without_signal_moves_nothing_and_a_run_of_them_ends_with_a_reason(
    make_module: Callable, make_data: Callable, make_trainer: Callable, weights_of: Callable
) -> None:
    module = make_module(max_idle_minibatches=3)
    data = make_data(rewards=RewardCombination({"none": WeightedReward(Constant(0.5))}))
    trainer = make_trainer(max_steps=100)
    with pytest.raises(TrainingError, match=r"3 minibatches in a row could not move the weights.*no group has signal"):
        trainer.fit(module, datamodule=data)
    assert trainer.global_step == 0
    fresh = make_module()
    make_trainer(max_steps=1).validate(
        fresh, datamodule=make_data(val={"letters": Letters(2, heldout=True)}), verbose=False
    )
    torch.testing.assert_close(weights_of(module), weights_of(fresh), rtol=0, atol=0)


# Field bug F9; on one rank of two: tests/runs/test_ranks.py.
def test_a_non_finite_gradient_leaves_weights_and_optimizer_alone(
    make_module: Callable, make_data: Callable, make_trainer: Callable, weights_of: Callable
) -> None:
    class Poison(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                batch.rollout.batch.sampler_logprobs.fill_(float("nan"))

        def on_train_batch_end(
            self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            # The poisoned minibatch was replaced by another one of the same weights.
            assert trainer.callback_metrics["optimization/skipped"] == float(trainer.global_step == 3)
            assert trainer.global_step == trainer.fit_loop.total_batch_idx + 1
            assert all(state["step"] == trainer.global_step for state in trainer.optimizers[0].state.values())

    module = make_module(objective=Objective(corrections=[TruncatedIS()]))
    trainer = make_trainer(max_steps=4, callbacks=[Poison()])
    trainer.fit(module, datamodule=make_data())
    assert trainer.global_step == 4
    assert all(torch.isfinite(tensor).all() for tensor in weights_of(module).values())


def test_learning_raises_the_reward(make_module: Callable, make_data: Callable, make_trainer: Callable) -> None:
    recorder = Recorder()
    data = make_data(sampling=Sampling(max_tokens=6, completions=8))
    gentle = make_module(optimizer=lambda parameters: torch.optim.Adam(parameters, lr=3e-3))
    make_trainer(max_steps=20, callbacks=[recorder]).fit(gentle, datamodule=data)
    rewards = [step["reward/even"] for step in recorder.steps]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1


def test_held_out_prompts_are_scored_before_the_first_step_and_on_schedule(
    make_module: Callable, make_data: Callable, make_trainer: Callable
) -> None:
    trainer = make_trainer(max_steps=4)
    trainer.fit(make_module(), datamodule=make_data(val={"letters": Letters(5, heldout=True)}))
    with (Path(trainer.log_dir) / "metrics.csv").open() as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    scored = {row["step"]: row for row in rows if "val/letters/greedy" in row}
    assert list(scored) == [0, 2, 4]
    assert all(0 <= row["val/letters/avg@2"] <= 1 for row in scored.values())
    assert all(math.isfinite(value) for row in rows for value in row.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": Sampling(temperature=0.0)}, "data.sampling.temperature"),  # Field bug D6.
        ({"sampling": Sampling(completions=1)}, "data.sampling.completions"),  # field bug A2
        ({"num_updates": 5}, "data.num_updates"),  # Field bug D4: 4 groups are not cut into 5.
        ({"prompts_per_rollout": 13}, "data.prompts_per_rollout"),  # Field bug D1, Field bug D4: there are 12.
        ({"max_prompt_tokens": 600}, "data.max_prompt_tokens"),
        # Field bug B5: a prompt as long as the context leaves no room; one of 506 tokens would, for an answer of 6.
        ({"max_prompt_tokens": 512}, r"at most 512, the model's context, but got 512 \+ 6"),
        ({"max_prompt_tokens": 507}, r"at most 512, the model's context, but got 507 \+ 6"),
    ],
)
def test_impossible_settings_are_refused_before_a_model_is_loaded(
    make_module: Callable, make_data: Callable, make_trainer: Callable, changes: dict, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_trainer().fit(make_module(), datamodule=make_data(**changes))


def test_training_on_a_held_out_question_is_refused(
    make_module: Callable, make_data: Callable, make_trainer: Callable
) -> None:
    with pytest.raises(ConfigError, match=r"expected no question of `data.val`, but got letters/"):
        make_trainer().fit(make_module(), datamodule=make_data(val={"same": Letters(12)}))


def test_the_sampler_as_old_policy_and_a_correction_for_it_contradict(make_module: Callable) -> None:
    with pytest.raises(ConfigError, match=r"old_policy: sampler.*TruncatedIS"):
        make_module(old_policy="sampler", objective=Objective(corrections=[TruncatedIS()]))


def test_rewards_that_count_for_correct_answers_only_and_gdpo_contradict(
    make_module: Callable, make_data: Callable, make_trainer: Callable
) -> None:
    rewards = {"even": WeightedReward(EvenShare()), "form": WeightedReward(EvenShare(), 0.5, conditional=True)}
    data = make_data(rewards=RewardCombination(rewards, correct="even", correct_at=0.5))
    module = make_module(objective=Objective(advantage=GDPOAdvantage()))
    with pytest.raises(ConfigError, match=r"GDPOAdvantage.*form\.conditional.*contradict"):
        make_trainer().fit(module, datamodule=data)


def test_the_time_of_each_reward_is_logged(make_module: Callable, make_data: Callable, make_trainer: Callable) -> None:
    recorder = Recorder()
    make_trainer(max_steps=1, callbacks=[recorder]).fit(make_module(), datamodule=make_data())
    (step,) = recorder.steps
    assert 0 < step["system/time_reward_even"] <= step["system/time_reward"]


def test_gdpo_takes_the_weights_of_the_rewards(
    make_module: Callable, make_data: Callable, make_trainer: Callable, weights_of: Callable
) -> None:
    def trained(**further: WeightedReward) -> dict[str, torch.Tensor]:
        rewards = RewardCombination({"even": WeightedReward(EvenShare(), 2.0), **further}, correct="even")
        module = make_module(objective=Objective(advantage=GDPOAdvantage()))
        make_trainer(max_steps=1, num_sanity_val_steps=0).fit(module, datamodule=make_data(rewards=rewards))
        return weights_of(module)

    alone, watched = trained(), trained(length=WeightedReward(IdSum(), 0.0))
    torch.testing.assert_close(watched, alone, rtol=0, atol=0)  # weight 0 is logged and not trained on
    punished = trained(length=WeightedReward(IdSum(), -1.0))
    assert any(not torch.equal(punished[name], tensor) for name, tensor in alone.items())


def test_figures_of_a_rollout_are_written_at_the_step_that_drew_it(
    make_module: Callable, make_data: Callable, make_trainer: Callable, tmp_path: Path
) -> None:
    logger = CSVLogger(tmp_path / "log", name="", version="")
    trainer = make_trainer(max_steps=4, logger=logger, num_sanity_val_steps=0)
    trainer.fit(make_module(), datamodule=make_data(num_updates=2))
    with (tmp_path / "log/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows if row["optimization/loss"]] == [0, 1, 2, 3]
    assert [int(row["step"]) for row in rows if row["reward/total"]] == [0, 2]
    assert [int(row["step"]) for row in rows if row["system/time_rollout"]] == [0, 2]


@pytest.mark.parametrize("where", ["objective", "shadows"])
def test_a_domain_without_a_beta_is_refused_before_any_model_is_loaded(
    make_module: Callable, make_data: Callable, make_trainer: Callable, where: str
) -> None:
    recipe = Objective(divergence=K3(beta={"math": 0.1}))
    module = make_module(**{where: recipe if where == "objective" else {"other": recipe}})
    with pytest.raises(ConfigError, match=r"`beta` of K3 expected a value for domain 'letters'"):
        make_trainer().fit(module, datamodule=make_data())
    assert module.policy is None


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_weights_move_at_a_small_learning_rate(
    make_module: Callable, make_data: Callable, make_trainer: Callable, precision: str
) -> None:
    # Field bug A12: 1e-6 is far below the spacing of bf16 weights; float32 masters take it.
    module = make_module(optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-6, weight_decay=0.0))
    make_trainer(max_steps=3, precision=precision).fit(module, datamodule=make_data())
    before = AutoModelForCausalLM.from_pretrained(module.checkpoint, dtype=torch.float32).state_dict()
    gap = max(float((t.cpu() - before[n]).abs().max()) for n, t in module.policy.model.state_dict().items())
    assert 5e-7 < gap < 1e-5
