"""A checkpoint is saved on errors where all ranks are there to save it."""

import signal
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.strategies import Strategy

from callbacks import ModelCheckpoint
from grpo_lit.errors import ConfigError
from grpo_lit.interrupts import Interrupted


@pytest.mark.parametrize(
    ("world_size", "error", "saves"),
    [
        (1, ValueError(), 1),
        (1, Interrupted(signal.SIGTERM), 1),
        (2, ValueError(), 0),
        (2, KeyboardInterrupt(), 1),
        (2, Interrupted(signal.SIGINT), 1),
    ],
)
def test_a_failing_rank_waits_for_nobody(world_size, error, saves, tmp_path):
    trainer = Mock(spec=Trainer, world_size=world_size, global_step=3, current_epoch=0, loggers=[], callback_metrics={})
    trainer.configure_mock(fast_dev_run=False, sanity_checking=False)
    saver = ModelCheckpoint(tmp_path, filename="{step}", save_on_exception=True, save_last=False)
    for _ in range(2):  # what is saved already is not saved again
        saver.on_exception(trainer, Mock(spec=LightningModule), error)
    assert [call.args[0] for call in trainer.save_checkpoint.call_args_list] == [f"{tmp_path}/step=3.ckpt"] * saves


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


@pytest.mark.parametrize("moved", [False, True])
def test_a_run_resumed_from_its_first_checkpoint_goes_on_with_its_last(tmp_path, moved):
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_last="link")
    state = saver.state_dict()  # as in the first checkpoint, which `last` points to only afterwards
    resumed = ModelCheckpoint(tmp_path / "new" if moved else tmp_path, every_n_train_steps=1, save_last="link")
    resumed.load_state_dict(state)
    assert resumed.last_model_path == ("" if moved else str(tmp_path.resolve() / "last.ckpt"))


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
