"""One arm in a process of its own: ``python -m grpo_lit.bench.worker ARM SETTINGS_AS_JSON``.

It reads one request a line from standard input and answers each with one line of JSON. It ends with its input.
"""

import gc
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import psutil
import torch

from grpo_lit.bench.arms import Arm, CompiledArm, OurArm, PlainArm
from grpo_lit.bench.flops import ModelWork, matmul_flops_per_second, step_flops
from grpo_lit.bench.measurement import Measurement
from grpo_lit.bench.settings import Settings
from grpo_lit.bench.workload import make_batch
from grpo_lit.errors import ConfigError
from grpo_lit.metrics.memory import PeakMemory, release_free_memory

_GIB = 2.0**30
#: Rows of the square matrices whose product is the machine's peak: large enough to be limited by arithmetic alone.
_MATMUL_SIZE = {"cpu": 2048, "cuda": 8192}


class Worker:
    """Measures one arm.

    Args:
        name: Of the arm.
        settings: Of the benchmark.
    """

    def __init__(self, name: str, settings: Settings) -> None:
        if settings.threads:
            torch.set_num_threads(settings.threads)
        self.name, self.settings = name, settings
        self.arm = make_arm(name, settings)
        self.work = ModelWork.of(self.arm.models.policy)
        self.forwards = int(self.arm.objective.needs_reference)
        self.groups = 0
        self.resident: float | None = None
        self.peaks: dict[int, float] = {}

    def verify(self, groups: int, path: str) -> dict[str, Any]:
        """Make an untimed step and write its gradient."""
        self._prepare(groups)
        parameters = dict(self.arm.models.policy.named_parameters())
        step = self.arm.step(lambda: torch.save({name: p.grad.cpu() for name, p in parameters.items()}, path))
        return {"loss": step.loss}

    def measure(self, groups: int) -> dict[str, Any]:
        """Make a step and return its :class:`Measurement`; the first of a size, which memory is of, is not timed."""
        batch = make_batch(self.settings, groups)
        self._prepare(groups)
        if groups not in self.peaks:
            # What the heap keeps of other sizes would look as if it were in use. No timed step begins so: it would
            # wait for all of its memory.
            release_free_memory(self.settings.device)
            memory = PeakMemory(self.settings.device)
            self.arm.step(lambda: None)
            self.peaks[groups] = memory.take()
        rate, step = self._matmul_rate(), self.arm.step(lambda: None)
        return asdict(
            Measurement(
                arm=self.name,
                groups=groups,
                tokens=batch.tokens,
                loss=step.loss,
                gradient_seconds=step.gradient_seconds,
                optimizer_seconds=step.optimizer_seconds,
                peak_gib=self.peaks[groups] - self.resident,
                resident_gib=self.resident,
                flops=step_flops(self.work, batch, self.forwards),
                matmul_flops_per_second=max(rate, self._matmul_rate()),
            )
        )

    def _prepare(self, groups: int) -> None:
        if groups != self.groups:
            self.arm.prepare(groups)
            self.groups = groups
        gc.collect()
        if self.resident is None:
            # The heap keeps the zero gradients that made the moments: a step would use them again, and seem to need
            # none.
            release_free_memory(self.settings.device)
            self.resident = _resident_bytes(self.settings.device) / _GIB

    def _matmul_rate(self) -> float:
        device = self.settings.device
        size = 256 if self.settings.tiny else _MATMUL_SIZE[device.type]
        return matmul_flops_per_second(size, self.settings.dtype, device)


def make_arm(name: str, settings: Settings) -> Arm:
    """Return an arm by its name."""
    if name == "trl":
        from grpo_lit.bench.trl_arm import TRLArm

        return TRLArm(settings)
    return {"ours": OurArm, "compiled": CompiledArm, "plain": PlainArm}[name](settings)


def _resident_bytes(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else psutil.Process().memory_info().rss


def main() -> int:
    """Answer requests until they end; an error ends the process, and its last line says which."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer

    def answer(values: dict[str, Any]) -> None:
        print(json.dumps(values), file=answers, flush=True)

    try:
        worker = Worker(sys.argv[1], Settings.from_plain(json.loads(sys.argv[2])))
    except ConfigError as error:
        answer({"error": str(error)})
        return 2
    actions: dict[str, Callable[..., dict[str, Any]]] = {"verify": worker.verify, "measure": worker.measure}
    answer({})
    for line in sys.stdin:
        request = json.loads(line)
        answer(actions[request.pop("action")](**request))
    return 0


if __name__ == "__main__":
    sys.exit(main())
