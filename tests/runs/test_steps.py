"""One meaning of a step, for whoever counts them."""

import csv
from collections.abc import Callable
from pathlib import Path

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from toys import Letters


def test_limits_checkpoints_validation_curves_and_optimizer_count_the_same_steps(
    make_module: Callable, make_data: Callable, make_trainer: Callable, tmp_path: Path
) -> None:
    """Field bug F7: 3 updates of a rollout, each of several backward passes, and 10 steps of those."""
    saver = ModelCheckpoint(tmp_path / "saved", filename="{step}", every_n_train_steps=4, save_top_k=-1)
    logger = CSVLogger(tmp_path / "log", name="", version="")
    trainer = make_trainer(max_steps=10, callbacks=[saver], logger=logger, val_check_interval=4)
    module = make_module(max_tokens_per_micro_batch=40)
    trainer.fit(module, datamodule=make_data(num_updates=3, val={"letters": Letters(2, heldout=True)}))
    assert trainer.global_step == 10
    assert {int(state["step"]) for state in trainer.optimizers[0].state.values()} == {10}
    saved = {file.name: torch.load(file, weights_only=True)["global_step"] for file in (tmp_path / "saved").iterdir()}
    assert saved == {"step=4.ckpt": 4, "step=8.ckpt": 8}
    with (tmp_path / "log/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows if row["optimization/loss"]] == list(range(10))
    assert [int(row["step"]) for row in rows if row["reward/total"]] == [0, 3, 6, 9]
    assert [int(row["step"]) for row in rows if row["val/letters/greedy"]] == [0, 4, 8]
