"""Whole runs of the real training path on a tiny model: Trainer, module, data module, transformers engine."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from pair import Pair
from toys import EvenShare, Letters

from grpo_lit.data.evaluation import Evaluation
from grpo_lit.data.module import RolloutDataModule
from grpo_lit.module import GRPOModule
from grpo_lit.rewards import RewardCombination, WeightedReward
from grpo_lit.rollout import Sampling
from grpo_lit.rollouts.transformers import TransformersEngine


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


@pytest.fixture
def make_module(tiny_model_path: Path) -> Callable[..., GRPOModule]:
    """``make_module(old_policy="weights")``: a module on the tiny model."""

    def make(**changes: Any) -> GRPOModule:
        torch.manual_seed(0)
        return GRPOModule(**{"checkpoint": str(tiny_model_path), "optimizer": adam, **changes})

    return make


@pytest.fixture
def make_data(tiny_model_path: Path) -> Callable[..., RolloutDataModule]:
    """``make_data(num_updates=2)``: 4 prompts of 3 completions a rollout, 12 prompts in all."""

    def make(**changes: Any) -> RolloutDataModule:
        arguments: dict[str, Any] = {
            "engine": TransformersEngine(device="cpu"),
            "train": Letters(),
            "val": {},
            "rewards": RewardCombination({"even": WeightedReward(EvenShare())}, correct_at=0.5),
            "sampling": Sampling(temperature=1.0, max_tokens=6, completions=3),
            "evaluation": Evaluation(completions=2),
            "prompts_per_rollout": 4,
            "max_prompt_tokens": 100,
            "checkpoint": str(tiny_model_path),
        }
        return RolloutDataModule(**{**arguments, **changes})

    return make


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., Trainer]:
    """``make_trainer(max_steps=3)``: a quiet trainer on one CPU process."""

    def make(**changes: Any) -> Trainer:
        arguments: dict[str, Any] = {
            "max_steps": 3,
            "max_epochs": -1,
            "accelerator": "cpu",
            "devices": 1,
            "logger": CSVLogger(tmp_path, name="", version=""),
            "log_every_n_steps": 1,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in changes.get("callbacks", [])),
            "num_sanity_val_steps": -1,
            "val_check_interval": 2,
            "check_val_every_n_epoch": None,
        }
        return Trainer(**{**arguments, **changes})

    return make


@pytest.fixture
def weights_of() -> Callable[[GRPOModule], dict[str, torch.Tensor]]:
    """``weights_of(module)``: a copy of the policy's weights."""
    return lambda module: {name: tensor.detach().clone() for name, tensor in module.policy.state_dict().items()}


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """``pair(function, ...)``: what a function returns on each of two gloo processes, which all tests share."""
    processes = Pair(tmp_path_factory.mktemp("pair"))
    yield processes
    processes.end()
