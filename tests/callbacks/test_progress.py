"""What the progress bar shows."""

import sys
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

from callbacks import ProgressBar


def shown(max_steps: int, **values: float) -> dict:
    metrics = {name.replace("__", "/"): torch.tensor(value) for name, value in values.items()}
    trainer = Mock(spec=Trainer, global_step=12, max_steps=max_steps, callback_metrics=metrics)
    return ProgressBar().get_metrics(trainer, Mock(spec=LightningModule))


def test_figures_stand_under_short_names():
    bar = shown(40, reward__total=0.61, reward__correct=0.584, length__mean=4.12, exploration__entropy=0.268)
    assert bar == {"step": "12/40", "reward": "0.61", "correct": "58%", "length": "4.1", "entropy": "0.27"}


@pytest.mark.parametrize(("terminal", "rate", "drawn"), [(True, 1, True), (True, 0, False), (False, 1, False)])
def test_a_bar_is_drawn_on_a_terminal_only(terminal, rate, drawn, monkeypatch):
    monkeypatch.setattr(sys, "stdout", Mock(isatty=lambda: terminal))
    assert ProgressBar(refresh_rate=rate).is_enabled is drawn


def test_a_run_without_an_end_or_figures_has_a_bar_too():
    assert shown(-1) == {"step": "12"}
    assert shown(-1, system__rollout_tokens_per_s=310.4, optimization__loss=3.0) == {"step": "12", "tok/s": "310"}
