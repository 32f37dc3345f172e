"""A run that is killed again and again, each time in processes forked from one that has everything imported.

With ``fsdp2`` it has two ranks, of which one is killed, and the last part of it one: shards of two are read by one.

``python killed_run.py MODEL FOLDER STRATEGY SEED KILLS`` prints a line of JSON for each kill, and one for the end.
"""

import io
import json
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from toys import EvenShare, Letters

from callbacks import ModelCheckpoint
from grpo_lit.data.module import RolloutDataModule
from grpo_lit.module import GRPOModule
from grpo_lit.rewards import RewardCombination, WeightedReward
from grpo_lit.rollout import Sampling
from grpo_lit.rollouts.transformers import TransformersEngine
from grpo_lit.strategies import FSDP2, failures, saving
from grpo_lit.strategies.checkpoint_io import AtomicCheckpointIO

#: Each half of a write, and the moments between the moves that put it in place, last this long [s].
SLOW = 0.05
#: Two ranks that are killed fewer times than this are killed in saves alone.
FEW = 6
#: How long a rank may take to see that the other one is gone [s].
ALONE = 30.0


class Journal(Callback):
    """Writes down what a run did: where it began, and which steps were saved."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._note("began", trainer.global_step)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._note("saved", trainer.global_step)  # what the last step wrote is in place

    def _note(self, event: str, step: int) -> None:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            return
        with self.file.open("a") as lines:
            lines.write(f"{event} {step}\n")


def slow_down() -> None:
    """Make every moment of a save long enough to be killed in."""
    write, put_in_place, remove = torch.save, saving.put_in_place, saving.remove

    def slow_write(content: Any, file: Any) -> None:
        if not isinstance(content, dict):  # a tensor among many shards
            write(content, file)
            return
        buffer = io.BytesIO()
        write(content, buffer)
        target = file.open("wb") if isinstance(file, Path) else file
        half = len(buffer.getvalue()) // 2
        target.write(buffer.getvalue()[:half])
        target.flush()
        time.sleep(SLOW)
        target.write(buffer.getvalue()[half:])
        target.flush()

    def slow(function: Any) -> Any:
        def call(path: Path) -> None:
            time.sleep(SLOW / 4)
            function(path)
            time.sleep(SLOW / 4)

        return call

    torch.save = slow_write
    saving.put_in_place, saving.remove = slow(put_in_place), slow(remove)


def train(model: str, folder: Path, strategy: str, max_steps: int, ranks: int = 1) -> None:
    """Train from the last checkpoint on, saving after every step."""
    saved = folder / "saved"
    trainer = Trainer(
        max_steps=max_steps,
        max_epochs=-1,
        accelerator="cpu",
        devices=ranks,
        strategy=FSDP2() if strategy == "fsdp2" else "auto",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            Journal(folder / "journal"),
            ModelCheckpoint(saved, filename="{step}", every_n_train_steps=1, save_top_k=1, save_last="link"),
        ],
    )
    data = RolloutDataModule(
        engine=TransformersEngine(device="cpu"),
        train=Letters(),
        rewards=RewardCombination({"even": WeightedReward(EvenShare())}, correct_at=0.5),
        sampling=Sampling(max_tokens=4, completions=2),
        prompts_per_rollout=2,
        max_prompt_tokens=100,
        checkpoint=model,
    )
    last = saved / "last.ckpt"
    module = GRPOModule(model, optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-4))
    trainer.fit(module, datamodule=data, ckpt_path=str(last) if os.path.lexists(last) else None)


def forked(model: str, folder: Path, strategy: str, max_steps: int, ranks: int) -> list[int]:
    """Return the processes that train."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child:
            children.append(child)
            continue
        try:
            if ranks > 1:
                place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "0"}
                os.environ.update({**place, "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)})
            train(model, folder, strategy, max_steps, ranks)
            os._exit(0)
        finally:
            os._exit(1)
    return children


def end(children: list[int], victim: int) -> bool:
    """Kill one rank, and return whether the others ended by themselves."""
    os.kill(children[victim], signal.SIGKILL)
    os.waitpid(children[victim], 0)
    until, left = time.monotonic() + ALONE, [child for child in children if child != children[victim]]
    while left and time.monotonic() < until:
        left = [child for child in left if os.waitpid(child, os.WNOHANG) == (0, 0)]
        time.sleep(0.01)
    for child in left:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return not left


def read(journal: Path, event: str) -> list[int]:
    """Return the steps of an event."""
    lines = journal.read_text().splitlines() if journal.exists() else []
    return [int(line.split()[1]) for line in lines if line.startswith(event)]


def main(model: str, folder: Path, strategy: str, seed: int, kills: int) -> None:
    """Kill the run at random moments and tell what each kill left behind; at last let it end."""
    slow_down()
    failures._GRACE, failures._LOOK = 0.2, 0.1  # nobody is there to be told
    ranks = 2 if strategy == "fsdp2" else 1
    journal, saved_in, moments = folder / "journal", folder / "saved", random.Random(seed)
    for number in range(kills):
        begun, saved = len(read(journal, "began")), max(read(journal, "saved"), default=0)
        children = forked(model, folder, strategy, 1000, ranks)

        def wait_until(condition: Callable[[], bool], child: int = children[0]) -> None:
            while not condition():
                if os.waitpid(child, os.WNOHANG) != (0, 0):
                    sys.exit("the run ended by itself")
                time.sleep(0.002)

        for step in (1, 2):
            begun_step = time.monotonic()
            wait_until(lambda step=saved + step: max(read(journal, "saved"), default=0) >= step)
        # While it writes; the others anywhere in a step, which lasts as long as the one before.
        aimed, lasts = number % 2 == 1 or (ranks > 1 and kills < FEW), time.monotonic() - begun_step
        if aimed:
            wait_until(lambda: any(saved_in.glob(".*.unfinished")))
        time.sleep(moments.uniform(0, SLOW if aimed else lasts))
        alone = end(children, victim=number % ranks)
        left = sorted(file.name for file in saved_in.iterdir())
        for name in left:
            if not name.startswith("."):  # every file of every checkpoint, the shards of both ranks
                AtomicCheckpointIO().load_checkpoint(saved_in / name)
        told = {"began": read(journal, "began")[begun:], "saved": max(read(journal, "saved")), "left": left}
        print(json.dumps({**told, "aimed": aimed, "ended": alone}), flush=True)
    last = max(read(journal, "saved")) + 2
    (child,) = forked(model, folder, strategy, last, ranks=1)
    _, status = os.waitpid(child, 0)
    print(json.dumps({"began": read(journal, "began")[-1:], "saved": last, "status": status}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
