"""Runs of the command line that tell what came out, for one process or each of two: tests/runs/test_ranks.py."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import torch
import yaml
from lightning.pytorch.strategies import Strategy
from pair import REPO
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from toys import Record

from grpo_lit.cli import main, run
from grpo_lit.policy.checkpoint import empty_model
from grpo_lit.policy.policy import Policy
from grpo_lit.policy.sharding import read_shards, shard
from grpo_lit.strategies.gradients import clip_gradients

CONFIGS = REPO / "configs"

#: 5 steps on 5 prompts, of which 2 ranks have 3 and 2, with answers of 1 to 6 tokens.
OVERLAY = """
trainer:
  max_steps: 5
  accelerator: cpu
  enable_progress_bar: false
  num_sanity_val_steps: 0
  logger: {class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: logs, name: null}}
  callbacks:
    - class_path: callbacks.ModelCheckpoint
      init_args: {dirpath: saved, filename: "{step}", every_n_train_steps: 1, save_top_k: -1}
    - class_path: toys.Record
model:
  optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.5, momentum: 0.5}}
  gradient_clip_norm: 0.5
  max_tokens_per_micro_batch: 60
data:
  engine: {class_path: TransformersEngine, init_args: {device: cpu}}
  train: {class_path: toys.Letters, init_args: {size: 40}}
  val: null
  rewards: {rewards: {some: {reward: {class_path: toys.EvenShare}}}, correct: some, correct_at: 0.5}
  sampling: {max_tokens: 6, completions: 3}
  prompts_per_rollout: 5
  max_prompt_tokens: 100
"""


def fit(
    folder: str,
    checkpoint: str,
    strategy: str,
    recipe: str,
    words: Sequence[str] = (),
    resume: str | None = None,
) -> dict[str, Any]:
    """Train, and return what this rank knows of it: the whole weights, and what :class:`toys.Record` kept.

    Args:
        folder: Where the run writes ``saved`` and ``logs``.
        checkpoint: The model.
        strategy: Name of an overlay.
        recipe: Name of an overlay.
        words: More of the command line.
        resume: A checkpoint to go on from.
    """
    with _inside(folder, checkpoint, strategy, recipe) as command:
        cli = run([*command, *words, *(["--ckpt_path", resume] if resume else [])])
    weights = {name: tensor.detach().clone() for name, tensor in cli.model.named_weights()}
    (record,) = [part for part in cli.trainer.callbacks if isinstance(part, Record)]
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())
    launcher = type(cli.trainer.strategy.cluster_environment).__name__ if strategy != "single" else ""
    return {"weights": weights, "global_step": cli.trainer.global_step, "launcher": launcher, **record.kept}


@contextmanager
def _inside(folder: str, checkpoint: str, strategy: str, recipe: str) -> Iterator[list[str]]:
    """Make a folder the working one, and give the command of a run in it."""
    Path(folder).mkdir(exist_ok=True)  # every rank
    before = Path.cwd()
    overlay = yaml.safe_load(OVERLAY)
    overlay["model"]["checkpoint"] = checkpoint
    tiny = Path(folder) / f"tiny{os.environ.get('LOCAL_RANK', '')}.yaml"
    tiny.write_text(yaml.safe_dump(overlay))
    files = [*(CONFIGS / f"{name}.yaml" for name in ("base", f"recipe/{recipe}", f"strategy/{strategy}")), tiny]
    os.chdir(folder)
    try:
        yield ["fit", *(word for file in files for word in ("--config", str(file)))]
    finally:
        os.chdir(before)


def interrupt(folder: str, checkpoint: str, strategy: str, words: Sequence[str]) -> int:
    """Train until a signal, and return the exit status."""
    with _inside(folder, checkpoint, strategy, "grpo") as command:
        try:
            main([*command, *words])
        except SystemExit as stop:
            return int(stop.code or 0)
    return 0


def clip_known_gradient() -> dict[str, tuple[float, list[float]]]:
    """Return, by how a layer is sharded, the norm of its gradient (3, 4), and this rank's share of it clipped at 1."""
    mesh, clipped = _mesh(), {}
    for kind in ("fsdp", "fsdp2", "whole"):
        layer: Any = torch.nn.Linear(1, 2, bias=False)
        if kind == "fsdp":
            layer = FullyShardedDataParallel(layer, device_id=torch.device("cpu"))
        elif kind == "fsdp2":
            fully_shard(layer, mesh=mesh)
        (layer(torch.ones(1, 1)) * torch.tensor([3.0, 4.0])).sum().backward()
        norm = clip_gradients(Mock(spec=Strategy), layer, list(layer.parameters()), limit=1.0)
        (gradient,) = [parameter.grad for parameter in layer.parameters()]
        own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        clipped[kind] = (norm, own.flatten().tolist())
    return clipped


def _mesh() -> DeviceMesh:
    if not distributed.is_initialized():
        distributed.init_process_group("gloo")
    return init_device_mesh("cpu", (distributed.get_world_size(),))


def peak_of_building(checkpoint: str) -> int:
    """Return the most bytes that tensors take at a time while a rank gets its shards of a model.

    The file's mapping is no memory of the rank's: its pages are read as a shard is copied, and can be dropped.
    """
    mesh, mapped = _mesh(), [file.stat().st_size for file in Path(checkpoint).glob("*.safetensors")]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        policy = Policy(empty_model(checkpoint))
        shard(policy, mesh)
        read_shards(policy, checkpoint, torch.device("cpu"))
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    taken = sorted((event.start_ns(), event.nbytes()) for event in events if abs(event.nbytes()) not in mapped)
    return max(accumulate(size for _, size in taken))


def fail_on_one_rank(folder: str, checkpoint: str, grace: float) -> None:
    """Train with a reward that fails on rank 1, in its second step."""
    from grpo_lit.strategies import failures

    failures._GRACE = grace
    fit(folder, checkpoint, "ddp", "grpo", ["--data.rewards.rewards.some.reward", "toys.FailsOnOneRank"])
