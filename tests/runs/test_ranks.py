"""Two gloo processes, whole or in shards, end where one process ends: same prompts, samples and parameters."""

import csv
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from processes import REPO, python
from transformers import AutoModelForCausalLM

from grpo_lit.export import export

CONFIGS = REPO / "configs"

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
    - class_path: toys.Footprint
model:
  optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.5, momentum: 0.5}}
  gradient_clip_norm: 0.5
  max_tokens_per_micro_batch: 60
data:
  engine: {class_path: TransformersEngine, init_args: {device: cpu}}
  train: {class_path: toys.Letters, init_args: {size: 40}}
  val: null
  rewards: {rewards: {some: {reward: {class_path: REWARD}}}, correct: some, correct_at: 0.5}
  sampling: {max_tokens: 6, completions: 3}
  prompts_per_rollout: 5
  max_prompt_tokens: 100
  num_updates: UPDATES
"""


def run(
    folder: Path,
    checkpoint: Path,
    strategy: str,
    recipe: str = "grpo",
    reward: str = "toys.EvenShare",
    updates: int = 1,
    resume: Path | None = None,
    trainer: dict[str, Any] | None = None,
    ahead: bool = False,
) -> Path:
    """Fit in processes of its own, and return the last checkpoint."""
    folder.mkdir()
    overlay = yaml.safe_load(OVERLAY.replace("REWARD", reward).replace("UPDATES", str(updates)))
    overlay["model"]["checkpoint"] = str(checkpoint)
    overlay["trainer"] |= trainer or {}
    if ahead:
        overlay["data"]["rollout"] = {"asynchronous": {"max_staleness": 7, "queue_size": 1}}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(overlay))
    files = [CONFIGS / f"{name}.yaml" for name in ("base", f"recipe/{recipe}", f"strategy/{strategy}")]
    words = [word for file in [*files, "tiny.yaml"] for word in ("--config", str(file))]
    python("-m", "grpo_lit", "fit", *words, *(["--ckpt_path", str(resume)] if resume else []), cwd=folder)
    return folder / "saved" / "step=3.ckpt"


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    state = torch.load(checkpoint, weights_only=True)
    assert state["global_step"] == 3
    return state["state_dict"]


#: FSDP2 writing what the other strategies write, to compare with them.
IN_ONE_FILE = {"strategy": {"init_args": {"save_distributed_checkpoint": False}}}


# 5 prompts on 2 ranks are 3 and 2. Of SomePrompts every second prompt has no signal: a rank may have none at all.
@pytest.mark.parametrize(
    ("recipe", "reward", "updates", "strategies"),
    [("grpo", "toys.SomePrompts", 1, ["ddp", "fsdp2"]), ("dapo", "toys.EvenShare", 2, ["ddp", "fsdp2"])],
)
def test_two_processes_equal_one(
    tmp_path: Path, tiny_model_path: Path, recipe: str, reward: str, updates: int, strategies: list[str]
) -> None:
    # Several steps on a rollout that was drawn ahead: the engine's thread must not meet the ranks' collectives.
    fit = partial(run, checkpoint=tiny_model_path, reward=reward, recipe=recipe, updates=updates, ahead=updates > 1)
    one = weights(fit(tmp_path / "one", strategy="single"))
    for strategy in strategies:
        trainer = IN_ONE_FILE if strategy == "fsdp2" else None
        end = fit(tmp_path / strategy, strategy=strategy, trainer=trainer)
        two = weights(end)
        assert_equal_and_moved(one, two, tiny_model_path)
        if updates > 1:  # resumed between the two steps of a rollout, each rank needs its own share of it back
            stopped = end.with_name("step=1.ckpt")
            again = weights(fit(tmp_path / f"{strategy} again", strategy=strategy, resume=stopped, trainer=trainer))
            assert again.keys() == two.keys()
            for name, tensor in two.items():
                torch.testing.assert_close(again[name], tensor, rtol=0, atol=0)


def assert_equal_and_moved(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor], start: Path) -> None:
    before = AutoModelForCausalLM.from_pretrained(start).state_dict()
    moved = max(float((one[f"policy.model.{name}"] - tensor).abs().max()) for name, tensor in before.items())
    assert moved > 1e-3  # or nothing is compared
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(
            two[name], tensor, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_shards_of_two_ranks_go_on_on_one_and_back(tmp_path: Path, tiny_model_path: Path) -> None:
    one = weights(run(tmp_path / "one", tiny_model_path, "single"))
    two = run(tmp_path / "two", tiny_model_path, "fsdp2")
    assert sorted(file.name for file in two.iterdir()) == [".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt"]
    stopped = two.with_name("step=1.ckpt")
    alone = run(tmp_path / "alone", tiny_model_path, "fsdp2", resume=stopped, trainer={"devices": 1})
    back = run(tmp_path / "back", tiny_model_path, "fsdp2", resume=alone.with_name("step=2.ckpt"))
    # Parameters, gradients and momentum lie on the two ranks in halves, to within the rows that do not divide.
    whole, *halves = (
        json.loads((folder / f"footprint{rank}.json").read_text())
        for folder, rank in ((tmp_path / "one", 0), (tmp_path / "two", 0), (tmp_path / "two", 1))
    )
    for kind, size in whole.items():
        assert sum(half[kind] for half in halves) == size
        assert max(half[kind] for half in halves) <= 0.52 * size, kind
    for end in (two, alone, back):
        exported = AutoModelForCausalLM.from_pretrained(export(end, tmp_path / f"exported from {end.parts[-3]}"))
        for name, tensor in exported.state_dict().items():
            torch.testing.assert_close(tensor, one[f"policy.model.{name}"], rtol=1e-5, atol=1e-6)


#: Callbacks that shape, steer and watch; no entropy of 260 tokens reaches 9 nats, so the loop rises at every step.
WATCHED = """
- class_path: lightning.pytorch.callbacks.ModelCheckpoint
  init_args: {dirpath: saved, filename: "{step}", every_n_train_steps: 1, save_top_k: -1}
- {class_path: callbacks.SoftOverlong, init_args: {cache: 4}}
- class_path: callbacks.ClipSchedule
  init_args: {high: {class_path: EntropyLoop, init_args: {target: 9.0, start: 0.01, rate: 0.01, minimum: 0.0}}}
- {class_path: callbacks.MismatchByPosition, init_args: {edges: [0, 2, 4]}}
- {class_path: callbacks.Samples, init_args: {every_n_steps: 1, groups: 1}}
- {class_path: callbacks.Histograms, init_args: {every_n_steps: 2}}
- class_path: callbacks.EarlyStop
- class_path: callbacks.GradientNoiseScale
"""
SAME = ("optimization/epsilon_high", "reward/overlong_penalty", "length/overlong", "length/repetition")


def test_callbacks_shape_and_say_the_same_on_two_processes(tmp_path: Path, tiny_model_path: Path) -> None:
    ends, logged = [], []
    for strategy in ("single", "ddp"):
        end = run(
            tmp_path / strategy, tiny_model_path, strategy, updates=2, trainer={"callbacks": yaml.safe_load(WATCHED)}
        )
        ends.append(weights(end))
        logs = tmp_path / strategy / "logs" / "version_0"
        with (logs / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        logged.append({name: [float(row[name]) for row in rows if row[name]] for name in SAME})
        samples = [json.loads(line) for line in (logs / "samples.jsonl").read_text().splitlines()]
        assert [sample["step"] for sample in samples] == [0, 1, 2]
    assert_equal_and_moved(*ends, tiny_model_path)
    assert logged[0]["optimization/epsilon_high"] == pytest.approx([0.01, 0.02, 0.03])
    assert logged[0]["reward/overlong_penalty"][0] < 0
    for name in SAME:
        assert logged[1][name] == pytest.approx(logged[0][name]), name
