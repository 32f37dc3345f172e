"""Tables and files of the learner's benchmark."""

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from rich import box
from rich.console import Console
from rich.table import Table

from grpo_lit.bench.measurement import Measurement, Spread, Summary, flatness, summarise
from grpo_lit.bench.settings import Settings


@dataclass(frozen=True)
class Verification:
    """How far two gradients of the same step are apart.

    Attributes:
        loss_ours: Loss of ours.
        loss_plain: Loss of the plain learner.
        gradient_distance: ``|a - b| / |b|`` over all parameters.
    """

    loss_ours: float
    loss_plain: float
    gradient_distance: float


@dataclass
class Result:
    """What a run of the benchmark found.

    Attributes:
        measured: Every step, in the order in which they were made.
        verification: Ours against plain; ``None`` unless both ran.
        failures: Why arms were not measured, or not to the end.
    """

    measured: list[Measurement] = field(default_factory=list)
    verification: Verification | None = None
    failures: dict[str, str] = field(default_factory=dict)


def machine(settings: Settings) -> dict[str, Any]:
    """Return what the numbers depend on besides the code."""
    return {
        "processor": _processor(),
        "cores": psutil.cpu_count(logical=True),
        "threads": settings.threads or torch.get_num_threads(),
        "device": str(settings.device),
        "dtype": str(settings.dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def publish(settings: Settings, result: Result, console: Console) -> None:
    """Print tables and what follows from them; write the file that was asked for."""
    summaries = summarise(result.measured)
    if result.measured:
        console.print(table(settings, summaries))
    for arm in dict.fromkeys(summary.arm for summary in summaries):
        time = flatness(summaries, arm, lambda summary: summary.microseconds_per_token.median)
        memory = flatness(summaries, arm, lambda summary: summary.peak_gib)
        if time is not None:
            console.print(f"{arm}: between sizes, time per token differs by {time:.1%} and peak memory by {memory:.1%}")
    for name, reason in result.failures.items():
        console.print(f"{name}: not measured to the end: {reason}", markup=False, soft_wrap=True)
    if settings.json:
        write_json(settings.json, settings, result, summaries)
        console.print(f"wrote {settings.json}")


def table(settings: Settings, summaries: Sequence[Summary]) -> Table:
    """Return a row per arm and size: medians, and in brackets the least and the greatest of all rounds."""
    facts = machine(settings)
    title = f"{settings.preset}{' (tiny)' if settings.tiny else ''}, {facts['dtype']}, {facts['threads']} threads"
    result = Table(title=title, title_justify="left", box=box.SIMPLE)
    for name in ("groups", "arm", "tokens/s", "x plain", "peak GiB", "of plain", "matmul peak", "us/token", "update s"):
        result.add_column(name, justify="left" if name == "arm" else "right", no_wrap=True)
    for number, summary in enumerate(summaries):
        if number and summary.groups != summaries[number - 1].groups:
            result.add_section()
        result.add_row(
            str(summary.groups),
            summary.arm,
            _cell(summary.tokens_per_second, "{:.0f}"),
            _cell(summary.times_plain, "{:.2f}"),
            f"{summary.peak_gib:.2f}",
            "-" if summary.peak_of_plain is None else f"{summary.peak_of_plain:.0%}",
            _cell(summary.matmul_share, "{:.0%}"),
            f"{summary.microseconds_per_token.median:.0f}",
            f"{summary.optimizer_seconds.median:.2f}",
        )
    return result


def write_json(path: Path, settings: Settings, result: Result, summaries: Sequence[Summary]) -> None:
    """Write settings, machine, every measurement and the summaries."""
    content: Mapping[str, Any] = {
        "settings": settings.to_plain(),
        "machine": machine(settings),
        "verification": None if result.verification is None else asdict(result.verification),
        "failures": result.failures,
        "summaries": [asdict(summary) for summary in summaries],
        "measured": [asdict(measurement) for measurement in result.measured],
    }
    path.write_text(json.dumps(content, indent=2) + "\n")


def _cell(spread: Spread | None, form: str) -> str:
    if spread is None:
        return "-"
    median, low, high = (form.format(value) for value in (spread.median, spread.low, spread.high))
    return median if low == high else f"{median} ({low}-{high})"


def _processor() -> str:
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
