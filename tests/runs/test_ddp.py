"""Two gloo processes end where one process ends: same prompts, same samples, same parameters."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

CONFIGS = Path(__file__).parents[2] / "configs"

OVERLAY = """
trainer:
  max_steps: 3
  accelerator: cpu
  enable_progress_bar: false
  enable_model_summary: false
  num_sanity_val_steps: 0
  logger: {class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: logs, name: null}}
  callbacks:
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {dirpath: saved, filename: "{step}", every_n_train_steps: 1, save_top_k: -1}
model:
  optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.5}}
  gradient_clip_norm: 0.5
  max_tokens_per_micro_batch: 60
data:
  engine: {class_path: TransformersEngine, init_args: {device: cpu}}
  train: {class_path: toys.Letters}
  val: null
  rewards: {rewards: {some: {reward: {class_path: REWARD}}}, correct: some, correct_at: 0.5}
  sampling: {max_tokens: 6, completions: 3}
  prompts_per_rollout: 5
  max_prompt_tokens: 100
  num_updates: UPDATES
"""


def run(
    folder: Path, checkpoint: Path, reward: str, recipe: str, devices: int, updates: int, resume: str = ""
) -> dict[str, torch.Tensor]:
    folder.mkdir()
    overlay = yaml.safe_load(OVERLAY.replace("REWARD", reward).replace("UPDATES", str(updates)))
    overlay["model"]["checkpoint"] = str(checkpoint)
    (folder / "tiny.yaml").write_text(yaml.safe_dump(overlay))
    strategy = "ddp" if devices > 1 else "single"
    files = [
        CONFIGS / "base.yaml",
        CONFIGS / f"recipe/{recipe}.yaml",
        CONFIGS / f"strategy/{strategy}.yaml",
        "tiny.yaml",
    ]
    command = [sys.executable, "-m", "grpo_lit", "fit", *(word for file in files for word in ("--config", str(file)))]
    command += ["--ckpt_path", resume] if resume else []
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    paths = [str(Path(__file__).parents[1] / "helpers"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_PORT": str(port), "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    state = torch.load(folder / "saved" / "step=3.ckpt", weights_only=True)
    assert state["global_step"] == 3
    return state["state_dict"]


# 5 prompts on 2 ranks are 3 and 2. Of SomePrompts every second prompt has no signal: a rank may have none at all.
@pytest.mark.parametrize(
    ("recipe", "reward", "updates"), [("grpo", "toys.SomePrompts", 1), ("dapo", "toys.EvenShare", 2)]
)
def test_two_processes_equal_one(tmp_path: Path, tiny_model_path: Path, recipe: str, reward: str, updates: int) -> None:
    one = run(tmp_path / "one", tiny_model_path, reward, recipe, devices=1, updates=updates)
    two = run(tmp_path / "two", tiny_model_path, reward, recipe, devices=2, updates=updates)
    if updates > 1:  # resumed between the two steps of a rollout, each rank needs its own share of it back
        stopped = str(tmp_path / "two" / "saved" / "step=1.ckpt")
        again = run(tmp_path / "again", tiny_model_path, reward, recipe, devices=2, updates=updates, resume=stopped)
        assert again.keys() == two.keys()
        for name, tensor in two.items():
            torch.testing.assert_close(again[name], tensor, rtol=0, atol=0)
    start = AutoModelForCausalLM.from_pretrained(tiny_model_path).state_dict()
    moved = max(float((one[f"policy.model.{name}"] - tensor).abs().max()) for name, tensor in start.items())
    assert moved > 1e-3  # or nothing is compared
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(
            two[name], tensor, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
