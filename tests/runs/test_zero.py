"""Two gloo processes under DeepSpeed's ZeRO-3 end where one process ends, and go on where they were stopped."""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from pair import Pair
from ranks_run import fit
from zero import fit_with_zero

from grpo_lit.errors import ConfigError
from grpo_lit.module import GRPOModule
from grpo_lit.policy.adapter import LoRA
from grpo_lit.strategies import DeepSpeed


@pytest.fixture
def pairs(tmp_path: Path) -> Iterator[Callable[..., list[Any]]]:
    """Processes for each call: DeepSpeed keeps its process groups for good."""
    made: list[Pair] = []

    def call(*arguments: Any, **options: Any) -> list[Any]:
        folder = tmp_path / f"pair{len(made)}"
        folder.mkdir()
        made.append(Pair(folder))
        answers = made[-1](*arguments, **options)
        made[-1].end()
        return answers

    yield call
    for processes in made:
        processes.end()


def test_two_processes_equal_one(
    tiny_folder: Callable[..., Path], tmp_path: Path, pairs: Callable[..., list[Any]]
) -> None:
    """Tied weights, a reference, clipping and several micro-batches; then the last two steps from a checkpoint."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("peer not installed: deepspeed")
    model = str(tiny_folder("llama", tie_word_embeddings=True))
    one = fit(str(tmp_path / "one"), model, "single", "grpo")
    two = pairs(fit_with_zero, 3, str(tmp_path / "two"), model, "ddp", "grpo")
    again = {"resume": str(tmp_path / "two" / "saved" / "step=3.ckpt")}
    resumed = pairs(fit_with_zero, 3, str(tmp_path / "again"), model, "ddp", "grpo", **again)
    for rank in (*two, *resumed):
        assert rank["weights"].keys() == one["weights"].keys()
        for name, tensor in one["weights"].items():
            torch.testing.assert_close(rank["weights"][name], tensor, rtol=0, atol=1e-6)
        for name in ("loss", "grad_norm"):
            assert rank[name] == pytest.approx(one[name][-len(rank[name]) :], rel=0, abs=2e-5), name
    assert [len(rank["loss"]) for rank in (*two, *resumed)] == [5, 5, 2, 2]
    assert any(norm > 0.5 for norm in one["grad_norm"])  # model.gradient_clip_norm


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"adapter": LoRA()}, r"model\.adapter"),
        ({"reference_dtype": "nf4"}, r"model\.reference_dtype: nf4"),
        ({"old_policy": "weights"}, r"model\.old_policy: weights"),
        ({"activation_offload": True}, r"model\.activation_offload"),
    ],
)
def test_what_stage_3_cannot_do_is_refused(options: dict[str, Any], key: str) -> None:
    module = GRPOModule("some", **options)
    strategy = DeepSpeed.__new__(DeepSpeed)  # deepspeed need not be installed
    strategy.config = {"zero_optimization": {"stage": 3}}
    module._trainer = Mock(strategy=strategy)
    with pytest.raises(ConfigError, match=rf"`{key}` and `trainer\.strategy: DeepSpeed.*contradict"):
        module._check_strategy()
    with pytest.raises(ConfigError, match=r"ReferenceRefresh` and `trainer\.strategy: DeepSpeed.*stage 3"):
        module.check_refresh(decay=0.0)
