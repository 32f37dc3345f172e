"""A data module without a trainer around it: an engine that writes down what it is asked, and one rank of several."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from toys import EvenShare, Letters

from grpo_lit.data.module import RolloutDataModule
from grpo_lit.rewards import RewardCombination, WeightedReward
from grpo_lit.rollout import Completion, Request, Sampling
from grpo_lit.rollouts.engine import Engine, EngineModel


class RecordingEngine(Engine):
    """Answers every request with its own seed's parity, and writes down what it is asked."""

    def __init__(self, gap: float = 0.0) -> None:
        self.calls: list[str] = []
        self.seeds: list[int] = []
        self.gap = gap

    def start(self, model: EngineModel) -> None:
        self.calls.append("start")

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        self.calls.append(f"load {version}")
        self.weight_version = version

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        self.calls.append(f"generate {len(requests)} with {self.weight_version}")
        self.seeds += [request.seed for request in requests]
        return [Completion((r.seed % 7 + 4, 2), (-1.0, -1.0), "x", "stop", self.weight_version) for r in requests]

    def score(self, token_ids: Sequence[int]) -> list[float]:
        self.calls.append("score")
        return [-1.0 + self.gap] * (len(token_ids) - 1)

    def close(self) -> None:
        self.calls.append("close")
        self.weight_version = None


def one_of(rank: int, size: int, reduce: Callable[..., torch.Tensor] | None = None) -> SingleDeviceStrategy:
    """One rank of several; without ``reduce`` it is alone with its values."""
    cpu = torch.device("cpu")
    strategy = Mock(spec=SingleDeviceStrategy, global_rank=rank, world_size=size, root_device=cpu)
    strategy.reduce = reduce or (lambda values, reduce_op: values)
    return strategy


def bare_data(checkpoint: Path, strategy: SingleDeviceStrategy, **changes: Any) -> RolloutDataModule:
    """Set a data module up for ``fit``; ``data.trainer.lightning_module.global_step`` is the learner's progress."""
    arguments: dict[str, Any] = {
        "engine": RecordingEngine(),
        "train": Letters(),
        "rewards": RewardCombination({"even": WeightedReward(EvenShare())}),
        "sampling": Sampling(completions=2, max_tokens=4),
        "prompts_per_rollout": 5,
        "max_prompt_tokens": 100,
        "checkpoint": str(checkpoint),
    }
    data = RolloutDataModule(**{**arguments, **changes})
    module = SimpleNamespace(global_step=0, named_weights=lambda: iter(()), score=lambda ids: [-1.0] * (len(ids) - 1))
    state = SimpleNamespace(fn=TrainerFn.FITTING, status=TrainerStatus.RUNNING)
    data.trainer = Mock(spec=Trainer, strategy=strategy, lightning_module=module, global_step=0, state=state)
    data.trainer.callbacks = []
    data.setup("fit")
    return data


def assert_synchronous(ahead: Any, rollouts: Sequence[Any], sync: Any, expected: Sequence[Any]) -> None:
    """Hold a run against one without a thread: its engine was asked the same, its rollouts are the same and fresh.

    Args:
        ahead: The data module that drew in a thread.
        rollouts: What it drew.
        sync: The one that did not.
        expected: What that drew.
    """
    assert ahead.engine.calls == sync.engine.calls
    assert ahead.engine.seeds == sync.engine.seeds
    for a, b in zip(expected, rollouts, strict=True):
        assert [group.state_dict() for group in a.groups] == [group.state_dict() for group in b.groups]
        assert not bool(b.batch.stale.any())
