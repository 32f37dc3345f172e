"""The learner's benchmark itself: processes, verification, rounds."""

import importlib.util
import itertools
import math
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from grpo_lit.bench.measurement import Measurement
from grpo_lit.bench.processes import ArmError, ArmProcess
from grpo_lit.bench.report import Result, Verification, publish
from grpo_lit.bench.settings import Settings
from grpo_lit.bench.workload import make_objective
from grpo_lit.command import progress_columns, wide_console
from grpo_lit.errors import ConfigError

#: How far ours and plain may be apart in the same step: their losses, as a share of the loss where that is above 1, and
#: their gradients, as a share of the gradient. Of bf16 gradients 7.6e-3 was measured with SmolLM2-135M's shapes.
TOLERANCES = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (1e-2, 5e-2)}
#: Columns of the table with every cell at its widest.
WIDTH = 130
#: Groups of the step on which ours and plain must agree.
VERIFIED_GROUPS = 2


class Benchmark:
    """One run: processes, verification, rounds.

    Args:
        settings: What was asked for.
        arms: Names of the arms.
        groups: Sizes of rollouts.
        console: For what is found on the way.
        progress: For what is left.
    """

    def __init__(
        self, settings: Settings, arms: Sequence[str], groups: Sequence[int], console: Console, progress: Progress
    ) -> None:
        self.settings, self.arms, self.groups = settings, list(arms), list(groups)
        self.console, self.progress = console, progress
        self.result = Result()
        self.processes: dict[str, ArmProcess] = {}

    def run(self) -> Result:
        """Return what was found; arms that fail are left out from there on."""
        if "trl" in self.arms and importlib.util.find_spec("trl") is None:
            self.console.print("trl: left out, it is not installed (pip install trl)")
            self.arms.remove("trl")
        total = (1 + self.settings.rounds * len(self.groups)) * len(self.arms)
        self.task = self.progress.add_task("start", total=total)
        with ExitStack() as stack, tempfile.TemporaryDirectory(prefix="grpo_lit_bench_") as folder:
            stack.callback(self._close)
            self._verify(Path(folder))
            for number, groups, name in itertools.product(range(self.settings.rounds), self.groups, self.arms):
                what = f"round {number + 1} of {self.settings.rounds}, {groups} groups"
                answer = self._try(name, what, Path(folder), action="measure", groups=groups)
                if answer is not None:
                    self.result.measured.append(Measurement(**answer))
        return self.result

    def _verify(self, folder: Path) -> None:
        """Hold the gradients of ours and plain against each other; every arm has then made a step.

        Raises:
            ConfigError: An arm's loss or gradient is not finite, or those two are too far apart.
        """
        losses = {}
        for name in self.arms:
            answer = self._try(name, "start, and check of the gradient", folder)
            if answer is None:
                continue
            losses[name], norm = answer["loss"], gradient_norm(folder / f"{name}.pt")
            if not (math.isfinite(losses[name]) and math.isfinite(norm)):
                raise ConfigError(
                    f"`arms` expected a finite loss and gradient, but got {losses[name]:g} and one of norm {norm:g} "
                    f"from {name}: nothing is timed. Leave {name} out of `arms`, or see whether `precision: float32` "
                    "makes it finite"
                )
        if not {"ours", "plain"} <= losses.keys():
            return
        distance = gradient_distance(folder / "ours.pt", folder / "plain.pt")
        found = Verification(losses["ours"], losses["plain"], distance)
        self.result.verification = found
        self.console.print(
            f"ours and plain: loss {found.loss_ours:.6g} and {found.loss_plain:.6g}, gradients {distance:.1e} apart"
        )
        of_losses, of_gradients = TOLERANCES[self.settings.dtype]
        apart = abs(found.loss_ours - found.loss_plain) / max(abs(found.loss_plain), 1.0)
        if not (apart <= of_losses and distance <= of_gradients):
            dtype = str(self.settings.dtype).removeprefix("torch.")
            raise ConfigError(
                f"`arms` expected the same gradient to {of_gradients:g} and loss to {of_losses:g} in {dtype}, but got "
                f"{distance:.1e} and {apart:.1e}: nothing is timed, since one of them is wrong"
            )

    def _try(self, name: str, what: str, folder: Path, **request: Any) -> dict[str, Any] | None:
        """Return an arm's answer to a request, or to the first one of its process; ``None`` once the arm has failed."""
        self.progress.update(self.task, description=f"{name}: {what}")
        answer = None
        if name not in self.result.failures:
            try:
                answer = self._started(name, folder)
                if request:
                    answer = self.processes[name].ask(**request)
            except ArmError as error:
                self.result.failures[name] = str(error)
        self.progress.advance(self.task)
        return answer

    def _started(self, name: str, folder: Path) -> dict[str, Any] | None:
        """Start an arm's process if it has none; return what it says of its first step, which is not timed."""
        if name in self.processes:
            return None
        if self.settings.one_at_a_time:
            self._close()
        self.processes[name] = ArmProcess(name, self.settings)
        self.processes[name].wait_until_ready()
        return self.processes[name].ask("verify", groups=VERIFIED_GROUPS, path=str(folder / f"{name}.pt"))

    def _close(self) -> None:
        while self.processes:
            self.processes.popitem()[1].close()


def gradient_distance(got: Path, expected: Path) -> float:
    """Return ``|a - b| / |b|`` of two gradients, parameter by parameter in float64, from the files that hold them."""
    a, b = (torch.load(path, mmap=True) for path in (got, expected))
    apart = math.sqrt(sum(float((a[name].double() - b[name].double()).square().sum()) for name in b))
    norm = gradient_norm(expected)
    return apart / norm if norm > 0 else math.inf  # a gradient of zeros verifies nothing


def gradient_norm(path: Path) -> float:
    """Return ``|a|`` of a gradient, in float64, from the file that holds it."""
    return math.sqrt(sum(float(part.double().square().sum()) for part in torch.load(path, mmap=True).values()))


def run(settings: Settings, arms: Sequence[str], groups: Sequence[int]) -> int:
    """Measure, print and write everything; return the exit status: 1 where an arm failed or none was measured."""
    make_objective(settings)  # a recipe that cannot be measured is told before anything starts
    console = wide_console(WIDTH)
    with Progress(*progress_columns(), console=Console(stderr=True), transient=True) as progress:
        result = Benchmark(settings, arms, groups, console, progress).run()
    publish(settings, result, console)
    return 1 if result.failures or not result.measured else 0
