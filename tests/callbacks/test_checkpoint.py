"""A checkpoint is saved on errors where all ranks are there to save it."""

from unittest.mock import Mock

import pytest
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch import callbacks as lightning_callbacks

from callbacks import ModelCheckpoint


@pytest.mark.parametrize(
    ("world_size", "error", "saves"),
    [(1, ValueError(), 1), (1, KeyboardInterrupt(), 1), (2, ValueError(), 0), (2, KeyboardInterrupt(), 1)],
)
def test_a_failing_rank_waits_for_nobody(world_size, error, saves, monkeypatch):
    save = Mock()
    monkeypatch.setattr(lightning_callbacks.ModelCheckpoint, "on_exception", save)
    trainer = Mock(spec=Trainer, world_size=world_size)
    ModelCheckpoint(save_on_exception=True).on_exception(trainer, Mock(spec=LightningModule), error)
    assert save.call_count == saves


def test_checkpoints_of_runs_with_lightnings_own_are_taken_up():
    settings = {"every_n_train_steps": 20, "save_last": "link"}
    assert ModelCheckpoint(**settings).state_key == lightning_callbacks.ModelCheckpoint(**settings).state_key
