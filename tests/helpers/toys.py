"""Small parts that tests plug into the real training path."""

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from grpo_lit.callback import RolloutCallback
from grpo_lit.data.source import PromptSource
from grpo_lit.data.stream import PromptStream
from grpo_lit.metrics.rollout import has_signal
from grpo_lit.rewards.reward import Reward
from grpo_lit.rollout import Completion, Group, Prompt


@dataclass
class Letters(PromptSource):
    """Prompts of different lengths: a, bb, ccc, ..."""

    size: int = 12
    heldout: bool = False

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Prompt:
        letter = chr((65 if self.heldout else 97) + index % 26)
        return Prompt(id=f"letters/{index}", question=letter * (1 + index), answer="1", domain="letters")


class EvenShare(Reward):
    """Share of even token ids: a random model has some of it in every group, and can learn more."""

    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float | None]:
        return [sum(t % 2 == 0 for t in c.token_ids) / max(len(c.token_ids), 1) for c in completions]


@dataclass
class Constant(Reward):
    """The same score for everything: no group ever has signal."""

    value: float = 0.0

    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float | None]:
        return [self.value] * len(completions)


def place(prompt: Prompt, size: int = 40) -> int:
    """Where ``Letters(size)`` asks a prompt in its first pass under the default seed; two ranks take turns."""
    stream = SimpleNamespace(source=range(size), seed=0, epoch=0)
    return PromptStream._permutation(stream).index(int(prompt.id.rsplit("/", 1)[1]))


@dataclass
class TwoDomains(Letters):
    """Of the first 5 prompts, the first of two ranks gets all of one domain, the second all of the other."""

    size: int = 40

    def __getitem__(self, index: int) -> Prompt:
        prompt = super().__getitem__(index)
        return replace(prompt, domain=("math", "code")[place(prompt, self.size) % 2])


class SomePrompts(Reward):
    """EvenShare on every second prompt, 0 on the others: groups with signal and groups without."""

    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float | None]:
        if int(prompt.id.rsplit("/", 1)[1]) % 2:
            return [0.0] * len(completions)
        return EvenShare()(prompt, completions)


@dataclass
class Alternating(Reward):
    """EvenShare, but 0 on the first prompts that the second of two ranks gets where a rollout has more than those."""

    until: int = 8

    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float | None]:
        silent = place(prompt) < self.until and place(prompt) % 2
        return [0.0] * len(completions) if silent else EvenShare()(prompt, completions)


class InterruptsBoth(Alternating):
    """Alternating, until both ranks are in the third rollout of 3 prompts, where SIGTERM reaches them."""

    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float | None]:
        if place(prompt) >= 6:
            store, rank = _get_default_store(), int(os.environ["LOCAL_RANK"])
            store.set(f"interrupted/{rank}", str(os.getpid()))
            if rank == 0:
                for pid in [int(store.get(f"interrupted/{other}")) for other in (1, 0)]:
                    os.kill(pid, signal.SIGTERM)
            time.sleep(30)  # what the signal raises ends this
        return super().__call__(prompt, completions)


class FailsOnOneRank(EvenShare):
    """EvenShare, until the second process is asked for the second time."""

    calls = 0

    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float | None]:
        self.calls += 1
        if os.environ.get("LOCAL_RANK") == "1" and self.calls > 3:
            raise ValueError(f"{prompt.id} cannot be judged")
        return super().__call__(prompt, completions)


class MaskFirstRank(RolloutCallback):
    """Masks every sequence that the first of two ranks draws for the first step of 5 prompts, on any number of them."""

    def on_groups_scored(self, trainer: Trainer, module: Any, groups: Sequence[Group]) -> None:
        for group in groups:
            if place(group.prompt) in (0, 2, 4):
                group.masked = [True] * len(group.completions)


class Poison(Callback):
    """Makes the third minibatch's log-probs of the sampler NaN, on the first rank alone."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 2 and trainer.is_global_zero:
            batch.rollout.batch.sampler_logprobs.fill_(float("nan"))


class Record(RolloutCallback):
    """Keeps what a rank saw of a run.

    Attributes:
        kept: ``loss``, ``grad_norm`` and ``skipped`` of every step; ``signal``: its sequences with an advantage;
            ``drawn``: for each round of prompts whether each of its groups has signal; ``trained``: its sequences that
            no mask or filter left out, of each step; ``lengths`` of its answers; ``footprint``: bytes of parameters,
            gradients and optimizer states before the last step.
    """

    def __init__(self) -> None:
        lists = ("loss", "grad_norm", "skipped", "signal", "drawn", "trained", "lengths")
        self.kept: dict[str, Any] = {**{name: [] for name in lists}, "footprint": {}}

    def on_groups_scored(self, trainer: Trainer, module: Any, groups: Sequence[Group]) -> None:
        self.kept["drawn"].append([has_signal(group.rewards) for group in groups])

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for name in ("loss", "grad_norm", "skipped"):
            self.kept[name].append(float(trainer.callback_metrics[f"optimization/{name}"]))
        chosen = batch.rollout.batch.select(batch.rollout.updates[batch.update])
        self.kept["signal"].append(int((chosen.advantages != 0).sum()))
        self.kept["trained"].append(len(chosen.lengths))
        self.kept["lengths"].append(chosen.lengths.tolist())

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
        states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
        kinds = {"parameters": [*pl_module.parameters()], "gradients": gradients, "states": states}
        self.kept["footprint"] = {k: sum(_local(tensor).nbytes for tensor in tensors) for k, tensors in kinds.items()}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
