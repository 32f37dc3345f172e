"""The command ``scripts/audit_verifier``."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from jsonargparse import ArgumentParser, DefaultHelpFormatter
from rich.console import Console
from rich.progress import Progress

from grpo_lit.audit.judge import Judge, distinct_prompts
from grpo_lit.audit.report import Audit, tables, write_csv, write_json
from grpo_lit.audit.samples import Fields, read_samples
from grpo_lit.errors import ConfigError
from grpo_lit.rewards import Reward

DESCRIPTION = r"""
Find what a verifier gets wrong before a policy does.

Judges every row of a JSONL file of labelled completions and lists false positives, false negatives, errors,
abstentions and the time of a judgement. Then judges completions that deserve nothing, built from the questions and
gold answers of the same file: empty ones, empty places for an answer, the question repeated, the answer among its
neighbours; and, where all answers are letters, what guessing one letter earns.

The reward is named by its short name or class path, its arguments after it, or both in a YAML file:

  scripts/audit_verifier solutions.jsonl --reward MathEquivalence --reward.extract last_number
  scripts/audit_verifier rows.jsonl --config reward.yaml       # reward: {class_path: my.Reward, init_args: {...}}

Rows as {"question": "...", "gold": "18", "completion": "... A: 18", "correct": true} need no other option: solutions to
GSM8K that end in the answer are judged without a mistake by the first command above. Other names: --fields.answer.

Exit status: 0; 1 for more mistakes (false positives, false negatives and errors together) than max_errors, or more
hollow completions that pass for correct than max_hollow; 2 for a setting or a file that cannot be used.
"""


class _Formatter(DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Types and defaults in the help, paragraphs of the description kept."""


@dataclass
class Settings:
    """How to audit.

    Args:
        fields: Which field of a row holds what.
        correct_at: Score from which on a completion passes for correct.
        max_errors: Most mistakes for exit status 0.
        max_hollow: Most hollow completions that may pass for correct, for exit status 0; null: any number.
        prompts: Questions for which hollow completions are built, the first of each file; 0: none.
        show: Most offending rows in the table; the files hold all.
        json: File for the figures and all findings.
        csv: File for all findings.
    """

    fields: Fields = field(default_factory=Fields)
    correct_at: float = 1.0
    max_errors: int = 0
    max_hollow: int | None = None
    prompts: int = 50
    show: int = 20
    json: Path | None = None
    csv: Path | None = None


def main(args: Sequence[str] | None = None) -> int:
    """Audit from the command line; return the exit status."""
    parser = ArgumentParser(prog="scripts/audit_verifier", description=DESCRIPTION, formatter_class=_Formatter)
    parser.add_argument("--config", action="config", help="YAML file with any of these settings.")
    parser.add_argument("files", type=Path, nargs="+", help="JSONL files of labelled completions.")
    parser.add_argument("--reward", type=Reward, required=True, help="Who judges: a short name or a class path.")
    parser.add_class_arguments(Settings)
    parsed = parser.parse_args(args)
    made = parser.instantiate(parsed)
    settings = Settings(**{field.name: made[field.name] for field in fields(Settings)})
    console, errors = Console(), Console(stderr=True)
    try:
        audits = _audits(made.reward, made.files, settings, errors)
    except ConfigError as error:
        errors.print(f"error: {error}", markup=False, soft_wrap=True)
        return 2
    finally:
        made.reward.close()
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
