"""DeepSpeed is asked for in words; what it would do is seen on a stand-in for its engine, and on a CUDA device."""

import importlib.util
import math
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from ranks_run import OVERLAY

from grpo_lit.cli import main, run
from grpo_lit.errors import ConfigError, SaveError
from grpo_lit.strategies import DeepSpeed
from grpo_lit.strategies.gradients import clip_gradients, drop_gradients

CONFIGS = Path(__file__).parents[2] / "configs"


def test_what_is_missing_is_told_in_a_few_lines(
    tiny_model_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "deepspeed" else find(name))
    files = [CONFIGS / f"{name}.yaml" for name in ("base", "engine/transformers", "strategy/deepspeed")]
    with pytest.raises(SystemExit) as stop:
        main(["fit", *(w for f in files for w in ("--config", str(f))), f"--model.checkpoint={tiny_model_path}"])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert "trainer.strategy" in said
    assert "pip install deepspeed==" in said
    with pytest.raises(ConfigError, match=r"init_args\.stage.*expected 1, 2 or 3, but got 4"):
        DeepSpeed(stage=4)
    with pytest.raises(ConfigError, match=r"offload_parameters.*expected stage 3.*got stage 2"):
        DeepSpeed(stage=2, offload_parameters=True)


@pytest.fixture
def strategy() -> DeepSpeed:
    """A strategy whose engine and optimizer are stand-ins."""
    made = DeepSpeed.__new__(DeepSpeed)
    made.config = {"zero_optimization": {"stage": 2}}
    made._model = Mock()
    made._optimizers = [Mock(loss_scale=4.0, cpu_offload=False, averaged_gradients={0: ["g"], 1: ["g"]})]
    return made


def test_a_checkpoint_replaces_one_of_its_name_whole_and_leaves_what_a_link_pointed_to(
    strategy: DeepSpeed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(self: DeepSpeed, checkpoint: dict, folder: Path, options: object) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "shard").write_text(checkpoint["step"])
        if checkpoint["step"] == "broken":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(DeepSpeedStrategy, "save_checkpoint", write)
    monkeypatch.setattr(DeepSpeed, "is_global_zero", True)
    for name, stand_in in {"broadcast": lambda self, value: value, "barrier": lambda self: None}.items():
        monkeypatch.setattr(DeepSpeed, name, stand_in)
    best, last = tmp_path / "step=1.ckpt", tmp_path / "last.ckpt"
    strategy.save_checkpoint({"step": "1"}, best)
    last.symlink_to(best.name)
    strategy.save_checkpoint({"step": "2"}, last)
    assert [(path / "shard").read_text() for path in (best, last)] == ["1", "2"]
    with pytest.raises(SaveError, match="No space left"):
        strategy.save_checkpoint({"step": "broken"}, last)
    assert (last / "shard").read_text() == "2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt", "step=1.ckpt"]


def test_what_stage_3_cannot_do_is_refused(strategy: DeepSpeed) -> None:
    strategy.config["bf16"] = {"enabled": True}
    with pytest.raises(ConfigError, match=r"`model\.old_policy: weights` and .* of stage 3"):
        strategy.check_stage_3({"activation_offload": False, "old_policy: weights": True}, "auto")
    with pytest.raises(ConfigError, match=r"`model\.reference_dtype: float32`.*stage 3, which holds weights in bf16"):
        strategy.check_stage_3({}, "float32")
    strategy.check_stage_3({"activation_offload": False}, "bfloat16")


def test_a_step_of_several_micro_batches_ends_with_the_last(strategy: DeepSpeed) -> None:
    with strategy.block_backward_sync():
        strategy._model.set_gradient_accumulation_boundary.assert_called_once_with(False)
    assert strategy._model.set_gradient_accumulation_boundary.call_args.args == (True,)


@pytest.mark.parametrize(("scaled", "norm"), [(8.0, 2.0), (-1.0, math.nan)])  # -1: not finite
def test_the_norm_is_deepspeeds(strategy: DeepSpeed, scaled: float, norm: float) -> None:
    strategy._optimizers[0].scaled_global_norm.return_value = torch.tensor(scaled)
    assert clip_gradients(strategy, torch.nn.Identity(), [], limit=1.0) == pytest.approx(norm, nan_ok=True)


def test_gradients_without_a_step_are_forgotten(strategy: DeepSpeed) -> None:
    """Field bug F9: the next step's would be added to them."""
    drop_gradients(strategy)
    (optimizer,) = strategy._optimizers
    assert optimizer.averaged_gradients == {0: None, 1: None}
    assert optimizer.micro_step_id == -1
    optimizer.zero_grad.assert_called_once_with()


@pytest.mark.parametrize(("norms", "norm"), [([6.0, 8.0], 2.5), ([6.0, -1.0], math.nan)])  # 10 / 4; -1: not finite
def test_the_norm_of_stage_3_is_that_of_all_groups(strategy: DeepSpeed, norms: list[float], norm: float) -> None:
    strategy.config["zero_optimization"]["stage"] = 3
    strategy._optimizers[0]._get_norm_groups.return_value = [torch.tensor(one) for one in norms]
    assert clip_gradients(strategy, torch.nn.Identity(), [], limit=1.0) == pytest.approx(norm, nan_ok=True)
    drop_gradients(strategy)
    strategy._optimizers[0]._overflow_clean_up.assert_called_once_with(4.0)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["fsdp", "fsdp2", "deepspeed"])
def test_a_run_on_a_cuda_device(
    name: str, tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP with NCCL, offloaded, and ZeRO; two CPU processes are held against one in tests/runs/test_ranks.py."""
    if name == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("peer not installed: deepspeed")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(OVERLAY)
    files = [CONFIGS / "base.yaml", CONFIGS / f"strategy/{name}.yaml", tmp_path / "tiny.yaml"]
    words = ["fit", *(word for file in files for word in ("--config", str(file)))]
    if name != "deepspeed":
        words += ["--trainer.strategy.init_args.cpu_offload", "true"]
    cli = run([*words, f"--model.checkpoint={tiny_model_path}", "--trainer.accelerator=cuda", "--trainer.devices=1"])
    assert cli.trainer.global_step == 5
    assert cli.trainer.callback_metrics["optimization/grad_norm"] > 0
