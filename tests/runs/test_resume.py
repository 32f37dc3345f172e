"""Stopped and resumed equals never stopped, bit for bit, also in the middle of a rollout."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from toys import Letters, SomePrompts

import callbacks
from grpo_lit.errors import ConfigError
from grpo_lit.module import GRPOModule
from grpo_lit.objectives import K3, Objective, TokenClip
from grpo_lit.policy.adapter import LoRA
from grpo_lit.rewards import RewardCombination, WeightedReward


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


class Trace(Callback):
    """Keeps prompts, tokens and loss of every step."""

    def __init__(self) -> None:
        self.steps: list[tuple[Any, ...]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        chosen = batch.rollout.batch.select(batch.rollout.updates[batch.update])
        loss = float(trainer.callback_metrics["optimization/loss"])
        self.steps.append((batch.update, chosen.prompt_ids.tolist(), chosen.token_ids.tolist(), loss))


# Field bug F3: the same prompts, in order.
@pytest.mark.parametrize(
    ("stop", "num_updates", "old_policy"), [(2, 1, "logprobs"), (3, 2, "logprobs"), (3, 2, "weights")]
)
def test_a_resumed_run_equals_one_never_stopped(
    make_module: Callable, make_data: Callable, make_trainer: Callable, weights_of: Callable, tmp_path: Path,
    stop: int, num_updates: int, old_policy: str,
) -> None:  # fmt: skip
    def build(max_steps: int, *callbacks: Callback) -> tuple[Any, Any, Trainer, Trace]:
        trace = Trace()
        schedule = lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=6)  # noqa: E731
        module = make_module(
            objective=Objective(divergence=K3(beta=0.05)), old_policy=old_policy, lr_scheduler=schedule
        )
        data = make_data(num_updates=num_updates, val={"letters": Letters(2, heldout=True)})
        return module, data, make_trainer(max_steps=max_steps, callbacks=[trace, *callbacks]), trace

    straight, data, trainer, all_steps = build(7)
    trainer.fit(straight, datamodule=data)

    saver = ModelCheckpoint(tmp_path / "saved", filename="{step}", every_n_train_steps=stop, save_top_k=-1)
    module, data, trainer, first = build(stop, saver)
    trainer.fit(module, datamodule=data)
    resumed, data, trainer, rest = build(7)
    trainer.fit(resumed, datamodule=data, ckpt_path=str(tmp_path / "saved" / f"step={stop}.ckpt"))

    assert len(first.steps) == stop
    assert first.steps + rest.steps == all_steps.steps
    torch.testing.assert_close(weights_of(resumed), weights_of(straight), rtol=0, atol=0)
    assert trainer.global_step == 7


def test_an_interrupted_run_keeps_what_it_learned(
    make_module: Callable, make_data: Callable, make_trainer: Callable, tmp_path: Path
) -> None:
    class Interrupt(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                raise KeyboardInterrupt

    saver = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=100, save_last=True, save_on_exception=True)
    data = make_data()
    with pytest.raises(SystemExit):
        make_trainer(max_steps=5, callbacks=[Interrupt(), saver]).fit(make_module(), datamodule=data)
    assert data.engine.weight_version is None  # closed
    saved = tmp_path / "saved" / "last.ckpt"
    assert torch.load(saved, weights_only=True)["global_step"] == 2
    trainer = make_trainer(max_steps=5, logger=CSVLogger(tmp_path / "rest", name="", version=""))
    trainer.fit(make_module(), datamodule=make_data(), ckpt_path=str(saved))
    assert trainer.global_step == 5
    with (tmp_path / "rest/metrics.csv").open() as file:
        drawn_at = [int(row["step"]) for row in csv.DictReader(file) if row["optimization/loss"]]
    assert drawn_at == [2, 3, 4]  # the first of them has the number that the interrupted step would have had


def gentle(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def falling(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 10)


#: By what is wrong: changes of the module and of the data that a checkpoint cannot be gone on from with.
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "other prompts": ({}, {"train": Letters(9)}, r"`data\.train` expected"),
    "another seed": ({}, {"seed": 1}, r"`data\.seed` expected"),
    "another set of models": (
        {"objective": Objective(divergence=K3(beta=0.1))}, {}, r"`model\.objective\.divergence.*no reference"
    ),
    "an adapter": ({"adapter": LoRA(rank=2)}, {}, r"`model\.adapter` expected .*none, but got rank 2"),
    "another optimizer": ({"optimizer": gentle}, {}, r"`model\.optimizer` expected .* Adam, but got SGD"),
    "a schedule": ({"lr_scheduler": falling}, {}, r"`model\.lr_scheduler` expected .* none, but got StepLR"),
    "a wider model": ({"hidden_size": 128}, {}, r"`ckpt_path` expected the weights .* another model, in which .* is"),
    "a deeper model": ({"num_hidden_layers": 3}, {}, r"`ckpt_path` expected the weights of .*layers\.2.* is missing"),
}  # fmt: skip


def test_a_checkpoint_of_another_run_is_refused_in_a_line_that_names_the_key(
    make_module: Callable, make_data: Callable, make_trainer: Callable, tiny_folder: Callable, tmp_path: Path
) -> None:
    saver = ModelCheckpoint(tmp_path / "saved", filename="x", every_n_train_steps=1)
    make_trainer(max_steps=1, callbacks=[saver]).fit(make_module(), datamodule=make_data())
    saved = tmp_path / "saved" / "x.ckpt"
    for module, data, said in CHANGES.values():
        shape = {key: value for key, value in module.items() if key in ("hidden_size", "num_hidden_layers")}
        made = GRPOModule(str(tiny_folder("llama", **shape)), optimizer=adam) if shape else make_module(**module)
        with pytest.raises(ConfigError, match=said):
            make_trainer(max_steps=2).fit(made, datamodule=make_data(**data), ckpt_path=str(saved))
    content = torch.load(saved)
    del content["optimizer_states"], content["lr_schedulers"]
    torch.save(content, saved)
    with pytest.raises(ConfigError, match=r"`ckpt_path` expected .* optimizer's state, but got one of weights alone"):
        make_trainer(max_steps=2).fit(make_module(), datamodule=make_data(), ckpt_path=str(saved))


def test_what_a_resumed_run_changes_or_keeps_silently_is_said(
    make_module: Callable, make_data: Callable, make_trainer: Callable, tmp_path: Path
) -> None:
    saver = callbacks.ModelCheckpoint(tmp_path / "saved", filename="x", every_n_train_steps=1)
    first = make_module(lr_scheduler=falling)
    make_trainer(max_steps=1, callbacks=[saver]).fit(first, datamodule=make_data())
    other = make_module(
        objective=Objective(surrogate=TokenClip(high=0.3)),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 5),
    )
    with pytest.warns(UserWarning, match="from now on") as warned:
        make_trainer(max_steps=2).fit(other, datamodule=make_data(), ckpt_path=str(tmp_path / "saved" / "x.ckpt"))
    said = [str(one.message) for one in warned if str(one.message).startswith("`model.")]
    assert [line.split(" ")[0] for line in said] == [
        "`model.objective.surrogate`", "`model.optimizer.lr`", "`model.lr_scheduler.step_size`"
    ]  # fmt: skip
    assert "high=0.2" in said[0]
    assert "high=0.3" in said[0]
    assert "is 0.001 here, but the run goes on with the checkpoint's 0.01" in said[1]
    assert other.optimizers().param_groups[0]["lr"] == 0.01


def test_a_folder_that_cannot_be_saved_in_is_found_before_the_engine_starts(
    make_module: Callable, make_data: Callable, make_trainer: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    data = make_data()
    monkeypatch.setattr(data.engine, "start", lambda model: pytest.fail("the engine started"))
    saver = callbacks.ModelCheckpoint(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"ModelCheckpoint\.dirpath` expected a folder that can be written to"):
        make_trainer(callbacks=[saver]).fit(make_module(), datamodule=data)


def test_steps_without_signal_do_not_disturb_resuming(
    make_module: Callable, make_data: Callable, make_trainer: Callable, weights_of: Callable, tmp_path: Path
) -> None:
    def build(max_steps: int, *callbacks: Callback) -> tuple[Any, Any, Trainer]:
        rewards = RewardCombination({"some": WeightedReward(SomePrompts())})
        data = make_data(rewards=rewards, prompts_per_rollout=1)
        gentle = lambda parameters: torch.optim.Adam(parameters, lr=1e-4)  # noqa: E731
        return (
            make_module(optimizer=gentle),
            data,
            make_trainer(max_steps=max_steps, callbacks=list(callbacks), num_sanity_val_steps=0),
        )

    straight, data, trainer = build(5)
    trainer.fit(straight, datamodule=data)
    saver = ModelCheckpoint(tmp_path / "saved", filename="{step}", every_n_train_steps=3, save_top_k=-1)
    module, data, trainer = build(3, saver)
    trainer.fit(module, datamodule=data)
    resumed, data, trainer = build(5)
    trainer.fit(resumed, datamodule=data, ckpt_path=str(tmp_path / "saved" / "step=3.ckpt"))
    torch.testing.assert_close(weights_of(resumed), weights_of(straight), rtol=0, atol=0)


def test_last_goes_on_after_the_folder_was_moved(
    make_module: Callable, make_data: Callable, make_trainer: Callable, tmp_path: Path
) -> None:
    def fit(folder: Path, steps: int, checkpoint: str | None = None) -> None:
        saver = callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_last="link")
        make_trainer(max_steps=steps, callbacks=[saver]).fit(
            make_module(), datamodule=make_data(), ckpt_path=checkpoint
        )

    fit(tmp_path / "here", 1)
    (tmp_path / "here").rename(tmp_path / "there")
    fit(tmp_path / "there", 3, str(tmp_path / "there/last.ckpt"))
    assert (tmp_path / "there/last.ckpt").resolve().name == "step=3.ckpt"
    assert not list((tmp_path / "there").glob("last-v*"))
