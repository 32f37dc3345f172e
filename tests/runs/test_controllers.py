"""Callbacks that change the objective or the reference while a run goes on."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from toys import Constant

from callbacks import EntropyTarget, ReferenceRefresh
from grpo_lit.errors import ConfigError
from grpo_lit.objectives import K3, Objective
from grpo_lit.rewards import RewardCombination, WeightedReward


class Models(Callback):
    """Keeps one weight of policy and reference after every step."""

    def __init__(self) -> None:
        self.steps: list[tuple[torch.Tensor, torch.Tensor]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        policy, reference = (next(m.parameters()).detach().clone() for m in (pl_module.policy, pl_module.reference))
        self.steps.append((policy, reference))


@pytest.mark.parametrize("decay", [0.0, 0.75])
def test_the_reference_follows_the_policy(
    make_module: Callable, make_data: Callable, make_trainer: Callable, decay: float
) -> None:
    seen, module = Models(), make_module(objective=Objective(divergence=K3(beta=0.1)))
    trainer = make_trainer(max_steps=4, callbacks=[ReferenceRefresh(every_n_steps=2, decay=decay), seen])
    trainer.fit(module, datamodule=make_data())
    (_, start), (second, refreshed), (_, kept), (last, again) = seen.steps
    assert (second - start).abs().max() > 1e-3  # or nothing is compared
    torch.testing.assert_close(refreshed, decay * start + (1 - decay) * second)
    torch.testing.assert_close(kept, refreshed, rtol=0, atol=0)
    torch.testing.assert_close(again, decay * refreshed + (1 - decay) * last)
    assert not any(parameter.requires_grad for parameter in module.reference.parameters())


def test_a_run_without_a_reference_has_none_to_refresh(
    make_module: Callable, make_data: Callable, make_trainer: Callable
) -> None:
    with pytest.raises(ConfigError, match=r"ReferenceRefresh.*divergence"):
        make_trainer(callbacks=[ReferenceRefresh()]).fit(make_module(), datamodule=make_data())


def coefficients(folder: Path) -> list[float]:
    with (folder / "metrics.csv").open() as file:
        return [float(c) for row in csv.DictReader(file) if (c := row["optimization/entropy_coefficient"])]


# Log of 260 tokens is 5.6 nats: no entropy of the tiny model is above 9, or below .001.
@pytest.mark.parametrize(
    ("target", "start", "expected"),
    [(9.0, 0.0, [0.0, 0.01, 0.02, 0.02]), (0.001, 0.015, [0.015, 0.005, 0.0, 0.0])],
    ids=["too low", "too high"],
)
def test_the_entropy_bonus_is_steered(
    make_module: Callable, make_data: Callable, make_trainer: Callable, tmp_path: Path,
    target: float, start: float, expected: list[float],
) -> None:  # fmt: skip
    module = make_module(objective=Objective(entropy_coefficient=start))
    control = EntropyTarget(target=target, rate=0.01, maximum=0.02)
    trainer = make_trainer(max_steps=4, callbacks=[control], logger=CSVLogger(tmp_path / "log", name="", version=""))
    trainer.fit(module, datamodule=make_data())
    assert coefficients(tmp_path / "log") == pytest.approx(expected, abs=1e-8)


def test_the_entropy_bonus_moves_at_every_update_of_a_rollout(
    make_module: Callable, make_data: Callable, make_trainer: Callable, tmp_path: Path
) -> None:
    control, logger = (
        EntropyTarget(target=9.0, rate=0.01, maximum=1.0),
        CSVLogger(tmp_path / "log", name="", version=""),
    )
    trainer = make_trainer(max_steps=5, callbacks=[control], logger=logger)
    trainer.fit(make_module(), datamodule=make_data(num_updates=2))
    assert coefficients(tmp_path / "log") == pytest.approx([0.0, 0.01, 0.02, 0.03, 0.04], abs=1e-8)


def test_the_entropy_bonus_waits_where_nothing_is_measured(
    make_module: Callable, make_data: Callable, make_trainer: Callable, tmp_path: Path
) -> None:
    # All rewards equal: only the bonus moves the policy, and there is no entropy to steer by.
    module = make_module(objective=Objective(entropy_coefficient=0.01))
    trainer = make_trainer(
        max_steps=2,
        callbacks=[EntropyTarget(target=9.0, rate=0.01, maximum=1.0)],
        logger=CSVLogger(tmp_path / "log", name="", version=""),
    )
    trainer.fit(module, datamodule=make_data(rewards=RewardCombination({"none": WeightedReward(Constant(0.5))})))
    assert coefficients(tmp_path / "log") == pytest.approx([0.01, 0.01], abs=1e-8)


def test_the_entropy_bonus_survives_a_resume(
    make_module: Callable, make_data: Callable, make_trainer: Callable, tmp_path: Path
) -> None:
    def fit(steps: int, folder: str, checkpoint: Path | None = None, *callbacks: Callback) -> None:
        logger = CSVLogger(tmp_path / folder, name="", version="")
        trainer = make_trainer(max_steps=steps, callbacks=[EntropyTarget(9.0, 0.01, 1.0), *callbacks], logger=logger)
        trainer.fit(make_module(), datamodule=make_data(), ckpt_path=checkpoint and str(checkpoint))

    saver = ModelCheckpoint(tmp_path / "saved", filename="x", every_n_train_steps=2)
    fit(2, "first", None, saver)
    fit(4, "rest", tmp_path / "saved" / "x.ckpt")
    assert coefficients(tmp_path / "rest") == pytest.approx([0.02, 0.03])


@pytest.mark.parametrize("make", [lambda: EntropyTarget(target=0.0), lambda: EntropyTarget(rate=float("nan"))])
def test_a_target_that_cannot_be_held_is_refused(make: Callable) -> None:
    with pytest.raises(ConfigError, match="EntropyTarget"):
        make()


@pytest.mark.parametrize("make", [lambda: ReferenceRefresh(0), lambda: ReferenceRefresh(decay=1.0)])
def test_a_refresh_that_never_comes_is_refused(make: Callable) -> None:
    with pytest.raises(ConfigError, match="ReferenceRefresh"):
        make()
