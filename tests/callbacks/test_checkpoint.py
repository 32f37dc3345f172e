"""A checkpoint is saved on errors where all ranks are there to save it."""

import shutil
import signal
from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn

from callbacks import ModelCheckpoint
from grpo_lit.errors import ConfigError, SaveError
from grpo_lit.interrupts import Interrupted
from grpo_lit.metrics.names import is_held_out
from grpo_lit.strategies import saving

MODULE = Mock(spec=LightningModule, automatic_optimization=False)


@pytest.mark.parametrize(
    ("world_size", "error", "saves"),
    [
        (1, ValueError(), 1),
        (1, Interrupted(signal.SIGTERM), 1),
        (2, ValueError(), 0),
        (2, KeyboardInterrupt(), 1),
        (2, Interrupted(signal.SIGINT), 1),
        (1, SaveError(), 0),
    ],
)
def test_a_failing_rank_waits_for_nobody(world_size, error, saves, tmp_path):
    trainer = Mock(spec=Trainer, world_size=world_size, global_step=3, current_epoch=0, loggers=[], callback_metrics={})
    trainer.configure_mock(fast_dev_run=False, sanity_checking=False)
    saver = ModelCheckpoint(tmp_path, filename="{step}", save_on_exception=True, save_last=False)
    for _ in range(2):  # what is saved already is not saved again
        saver.on_exception(trainer, Mock(spec=LightningModule), error)
    assert [call.args[0] for call in trainer.save_checkpoint.call_args_list] == [f"{tmp_path}/step=3.ckpt"] * saves


def test_what_ended_a_run_is_not_hidden_by_a_save_that_fails_too(tmp_path):
    trainer = Mock(spec=Trainer, world_size=1, global_step=3, current_epoch=0, callback_metrics={})
    trainer.configure_mock(fast_dev_run=False, sanity_checking=False)
    trainer.save_checkpoint.side_effect = SaveError("no room")
    with pytest.warns(UserWarning, match="no room"):
        ModelCheckpoint(tmp_path, save_on_exception=True).on_exception(trainer, MODULE, ValueError())


def test_checkpoints_of_runs_with_lightnings_own_are_taken_up():
    settings = {"every_n_train_steps": 20, "save_last": "link"}
    assert ModelCheckpoint(**settings).state_key == lightning_callbacks.ModelCheckpoint(**settings).state_key


def test_last_points_to_a_checkpoint_whenever_one_is_removed(tmp_path):
    strategy = Mock(spec=Strategy)
    trainer = Mock(spec=Trainer, is_global_zero=True, strategy=strategy)
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_last="link")
    for name in ("old", "new"):
        (tmp_path / name).write_text(name)
    last = tmp_path / "last.ckpt"
    last.symlink_to("old")
    saver.last_model_path, saver._last_checkpoint_saved = str(last), str(tmp_path / "new")
    seen = []
    strategy.remove_checkpoint.side_effect = lambda path: seen.append(last.read_text())
    saver._remove_checkpoint(trainer, str(tmp_path / "old"))
    assert seen == ["new"]


@pytest.mark.parametrize("folder", ["the same", "moved", "another"])
def test_best_and_last_are_those_of_the_folder_that_a_checkpoint_lies_in(folder, tmp_path, recwarn):
    settings = {"every_n_train_steps": 1, "monitor": "score", "mode": "max", "save_last": "link"}
    saver = ModelCheckpoint(tmp_path / "old", **settings)
    best = str(Path(saver.dirpath) / "step=1.ckpt")
    saver.best_model_path = saver.kth_best_model_path = best
    saver.best_k_models, saver.best_model_score = {best: torch.tensor(0.9)}, torch.tensor(0.9)
    state = saver.state_dict()  # as in the first checkpoint, which `last` points to only afterwards
    lies_in, now = {"the same": ("old", "old"), "moved": ("new", "new"), "another": ("old", "new")}[folder]
    resumed = ModelCheckpoint(tmp_path / now, **settings)
    trainer = Mock(spec=Trainer, ckpt_path=str(tmp_path / lies_in / "last.ckpt"))
    trainer.state = Mock(fn=TrainerFn.FITTING)
    resumed.on_load_checkpoint(trainer, MODULE, {"callbacks": {saver.state_key: state}})
    resumed.load_state_dict(state)
    here = Path(resumed.dirpath)
    if folder == "another":
        assert (resumed.last_model_path, resumed.best_k_models, resumed.best_model_path) == ("", {}, best)
    else:
        assert resumed.last_model_path == str(here / "last.ckpt")
        assert resumed.best_model_path == resumed.kth_best_model_path == str(here / "step=1.ckpt")
        assert resumed.best_k_models == {str(here / "step=1.ckpt"): 0.9}
        assert resumed.best_model_score == 0.9
    assert not recwarn.list
    without = ModelCheckpoint(tmp_path / now, save_last="link", every_n_train_steps=2)  # it has no state in the file
    without.on_load_checkpoint(trainer, MODULE, {"callbacks": {saver.state_key: state}})
    assert (without.last_model_path != "") == (folder != "another")


def write(path, step):
    saving.begin(path).write_text(str(step))
    saving.put_in_place(path)


def steps_of(folder):
    return {path.stem: int(path.read_text()) for path in folder.glob("*.ckpt")}


@pytest.fixture
def run_of(tmp_path):
    """``run_of(saver, scores)``: what lies in the folder after each step, whose checkpoints hold its number alone."""

    def run(saver, scores, metric="score", measured=lambda step: True):
        trainer = Mock(spec=Trainer, callback_metrics={}, world_size=1, ckpt_path=None, loggers=[], current_epoch=0)
        trainer.fast_dev_run = trainer.sanity_checking = False
        trainer.limit_val_batches, trainer.check_val_every_n_epoch = 1.0, None
        trainer.state, trainer.datamodule = Mock(fn=TrainerFn.FITTING), Mock(val={"a": 1})
        trainer.strategy = Mock(spec=Strategy)
        trainer.strategy.reduce_boolean_decision.side_effect = lambda decision, all=True: decision
        trainer.strategy.broadcast.side_effect = lambda value: value
        trainer.strategy.remove_checkpoint.side_effect = lambda path: Path(path).unlink()
        trainer.save_checkpoint.side_effect = lambda path, weights_only: write(Path(path), trainer.global_step)
        saver.on_train_start(trainer, MODULE)
        held_out, seen = is_held_out(metric), []
        for step, score in enumerate(scores, 1):
            trainer.global_step = step
            if not held_out:
                trainer.callback_metrics[metric] = torch.tensor(score)
            saver.on_train_batch_end(trainer, MODULE, None, None, step - 1)
            if held_out and measured(step):
                trainer.callback_metrics[metric] = torch.tensor(score)
                saver.on_validation_end(trainer, MODULE)
            saver.on_train_epoch_end(trainer, MODULE)
            seen.append(steps_of(tmp_path))
        saver.on_train_end(trainer, MODULE)
        return [*seen, steps_of(tmp_path)]

    return run


def test_last_is_the_last_state_and_best_the_best(run_of, tmp_path):
    saver = ModelCheckpoint(
        tmp_path, filename="{step}", monitor="score", mode="max", every_n_train_steps=1, save_last="link"
    )
    seen = run_of(saver, [1.0, 3.0, 2.0, 2.5, 4.0, 0.0])
    assert [folder["last"] for folder in seen] == [1, 2, 3, 4, 5, 6, 6]
    best = [next(value for name, value in folder.items() if name != "last") for folder in seen]
    assert best == [1, 2, 2, 2, 5, 5, 5]
    assert all(len(folder) == 2 for folder in seen)
    assert not (tmp_path / "last.ckpt").is_symlink()


@pytest.mark.parametrize("every", [1, 2])
def test_a_held_out_score_is_that_of_the_state_it_is_saved_with(run_of, tmp_path, every):
    """Of steps 3 and 6, which are validated, 3 is the better; Lightning would save 4 with the score of 3."""
    saver = ModelCheckpoint(
        tmp_path, filename="{step}", monitor="val/a/greedy", mode="max", every_n_train_steps=every, save_last="link"
    )
    seen = run_of(saver, [0, 0, 0.9, 0, 0, 0.1, 0], "val/a/greedy", lambda step: step % 3 == 0)
    assert [folder.get("last") for folder in seen] == (
        [1, 2, 3, 4, 5, 6, 7, 7] if every == 1 else [None, 2, 3, 4, 4, 6, 6, 7]
    )
    best = [[value for name, value in folder.items() if name != "last"] for folder in seen]
    assert best == [[], [], [3], [3], [3], [3], [3], [3]]


@pytest.mark.parametrize(("save_last", "writes"), [("link", 12), (True, 14), (False, 2)])
def test_a_kill_in_a_validation_costs_no_save_that_was_due(run_of, tmp_path, monkeypatch, save_last, writes):
    """Each step is saved before it is validated, and once more after; states 1 and 3 are the best.

    A link to a new best is written instead of the second ``last``.
    """
    before, written = [], []

    def validated(step):
        before.append(steps_of(tmp_path).get("last"))
        return True

    saver = ModelCheckpoint(
        tmp_path, filename="{step}", monitor="val/a/greedy", mode="max", every_n_train_steps=1, save_last=save_last
    )
    save = saver._save_checkpoint
    monkeypatch.setattr(saver, "_save_checkpoint", lambda trainer, path: (written.append(path), save(trainer, path)))
    *seen, _ = run_of(saver, [0.2, 0.1, 0.3, 0.1, 0.1, 0.0], "val/a/greedy", validated)
    assert before == ([1, 2, 3, 4, 5, 6] if save_last else [None] * 6)
    assert [folder.get("last") for folder in seen] == before
    best = [next(value for name, value in folder.items() if name != "last") for folder in seen]
    assert best == [1, 1, 3, 3, 3, 3]
    assert len(written) == writes
    assert saver._last_global_step_saved == (6 if save_last else 3)


@pytest.mark.parametrize("save_top_k", [1, -1])
def test_the_state_at_the_end_is_saved(run_of, tmp_path, save_top_k):
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_last="link", save_top_k=save_top_k)
    *_, end = run_of(saver, [0.0] * 5)
    assert end == {"last": 5, "step=5": 5} | ({} if save_top_k == 1 else {"step=2": 2, "step=4": 4})


def test_saving_by_the_clock(run_of, tmp_path):
    """Lightning's own saves nothing under manual optimization."""
    saver = ModelCheckpoint(tmp_path, filename="{step}", train_time_interval=timedelta(0), save_last="link")
    assert [folder["last"] for folder in run_of(saver, [0.0] * 3)] == [1, 2, 3, 3]


def test_a_monitor_that_nothing_will_measure_is_refused_at_the_start(tmp_path):
    trainer = Mock(spec=Trainer, fast_dev_run=False, limit_val_batches=1.0, datamodule=Mock(val={}))
    saver = ModelCheckpoint(tmp_path, monitor="val/a/greedy", every_n_train_steps=1)
    with pytest.raises(ConfigError, match=r"'val/a/greedy' without held-out prompts.*data\.val"):
        saver.on_fit_start(trainer, Mock(spec=LightningModule, **{"parameters.return_value": []}))


def test_a_disk_without_room_for_the_weights_is_refused_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Mock(free=0))
    trainer, module = Mock(spec=Trainer, fast_dev_run=False), LightningModule()
    module.layer = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"ModelCheckpoint\.dirpath.*expected room"):
        ModelCheckpoint(tmp_path).on_fit_start(trainer, module)


def test_the_last_of_a_run_lies_in_an_earlier_version(tmp_path):
    for version in (0, 9, 10):
        folder = tmp_path / f"version_{version}/checkpoints"
        folder.mkdir(parents=True)
        (folder / ("last.ckpt" if version < 10 else "step=1.ckpt")).write_text("")
    trainer = Mock(spec=Trainer, loggers=[TensorBoardLogger(tmp_path, name="")], strategy=SingleDeviceStrategy("cpu"))
    trainer.log_dir = str(tmp_path / "version_11")
    assert ModelCheckpoint()._find_last_checkpoints(trainer) == {str(tmp_path / "version_9/checkpoints/last.ckpt")}
    (tmp_path / "last.ckpt").symlink_to("step=1.ckpt")
    with pytest.raises(ConfigError, match=r"a link to step=1\.ckpt, which is gone"):
        ModelCheckpoint(tmp_path)._find_last_checkpoints(trainer)
    trainer.strategy.checkpoint_io = Mock(spec=CheckpointIO)  # of which a checkpoint may be anything
    assert ModelCheckpoint(tmp_path)._find_last_checkpoints(trainer) == {str(tmp_path / "last.ckpt")}


@pytest.mark.parametrize(
    ("monitor", "measured", "refused"),
    [
        ("rewrad/total", ["reward/total"], True),
        ("reward/total", ["reward/total"], False),
        ("val/a/greedy", ["reward/total"], False),  # before the first validation
        ("val/a/gredy", ["reward/total", "val/a/greedy"], True),
    ],
)
def test_a_metric_that_is_never_logged_is_refused_when_it_is_needed(monitor, measured, refused, tmp_path, monkeypatch):
    """Field bug F7."""
    saved = Mock()
    monkeypatch.setattr(lightning_callbacks.ModelCheckpoint, "_save_topk_checkpoint", saved)
    trainer = Mock(spec=Trainer, callback_metrics=dict.fromkeys(measured, torch.tensor(0.0)))
    saver = ModelCheckpoint(tmp_path, monitor=monitor, every_n_train_steps=1)
    if refused:
        with pytest.raises(ConfigError, match=f"but got '{monitor}'.*did you mean {measured[-1]}"):
            saver._save_topk_checkpoint(trainer, {})
    else:
        saver._save_topk_checkpoint(trainer, {})
    assert saved.call_count == (not refused)
