"""An audit itself: every file read, judged, shown and written."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from grpo_lit.audit.judge import Judge, distinct_prompts
from grpo_lit.audit.options import Settings
from grpo_lit.audit.report import Audit, tables, write_csv, write_json
from grpo_lit.audit.samples import read_samples
from grpo_lit.rewards import Reward


def run(reward: Reward, files: Sequence[Path], settings: Settings, errors: Console) -> int:
    """Audit a reward, print and write what was found; return the exit status."""
    try:
        audits = _audits(reward, files, settings, errors)
    finally:
        reward.close()
    console = Console()
    for audit in audits:
        console.print(*tables(audit, settings.show))
    if settings.json:
        write_json(settings.json, audits)
    if settings.csv:
        write_csv(settings.csv, audits)
    for path in filter(None, (settings.json, settings.csv)):
        console.print(f"wrote {path}", markup=False)
    mistakes, passed = sum(audit.mistakes for audit in audits), sum(audit.hollow_full for audit in audits)
    return int(mistakes > settings.max_errors or (settings.max_hollow is not None and passed > settings.max_hollow))


def _audits(reward: Reward, files: Sequence[Path], settings: Settings, console: Console) -> list[Audit]:
    """Audit every file, with a bar; all are read before any is judged."""
    read = {file: read_samples(file, settings.fields) for file in files}
    audits = []
    with Progress(console=console, transient=True) as progress:
        for file, samples in read.items():
            total = len(samples) + min(settings.prompts, len(distinct_prompts(samples)))
            task = progress.add_task(file.name, total=total)
            judge = Judge(reward, settings.correct_at, lambda task=task: progress.advance(task))  # type: ignore[misc]
            audits.append(judge.audit(file.name, samples, settings.prompts))
    return audits
