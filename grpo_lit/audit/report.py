"""What the audit found, as tables, JSON and CSV."""

import csv
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from grpo_lit.audit.hollow import KINDS

#: Characters of a completion's end that a table shows.
_SHOWN = 60


@dataclass(frozen=True)
class Finding:
    """A completion that was judged wrongly, or not at all.

    Attributes:
        kind: ``false positive``, ``false negative``, ``error`` or ``abstention``.
        row: Name of the row.
        answer: The gold answer.
        completion: The text.
        score: What the reward said.
        reason: The error, if there was one.
    """

    kind: str
    row: str
    answer: str | None
    completion: str
    score: float | None
    reason: str = ""


@dataclass
class HollowScore:
    """What completions of one kind earned.

    Attributes:
        kind: Of completion.
        completions: How many were judged.
        mean: Score on average.
        full: How many passed for correct.
        example: One of those.
    """

    kind: str
    completions: int
    mean: float
    full: int
    example: str = ""


@dataclass
class Audit:
    """Everything that was measured.

    Attributes:
        file: The labelled completions.
        reward: Who was audited.
        rows: How many completions.
        correct: How many of them are labelled correct.
        findings: Those judged wrongly or not at all.
        seconds: Time of each judgement.
        hollow: What deserves nothing, by kind.
        counters: What the reward itself counted.
    """

    file: str
    reward: str
    rows: int
    correct: int
    findings: list[Finding] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    hollow: list[HollowScore] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)

    def count(self, kind: str) -> int:
        """Return the number of findings of one kind."""
        return sum(finding.kind == kind for finding in self.findings)

    @property
    def mistakes(self) -> int:
        """False positives, false negatives and errors together."""
        return sum(finding.kind != "abstention" for finding in self.findings)

    @property
    def hollow_full(self) -> int:
        """Hollow completions that passed for correct; guesses, which may be right, apart."""
        return sum(score.full for score in self.hollow if score.kind in KINDS)

    def summary(self) -> dict[str, Any]:
        """Return the figures of the first table."""
        milliseconds = sorted(1000 * seconds for seconds in self.seconds)
        return {
            "rows": self.rows,
            "labelled correct": self.correct,
            "false positives": self.count("false positive"),
            "false negatives": self.count("false negative"),
            "errors": self.count("error"),
            "abstentions": self.count("abstention"),
            "median ms": round(statistics.median(milliseconds), 3),
            "p99 ms": round(milliseconds[min(len(milliseconds) - 1, int(0.99 * len(milliseconds)))], 3),
            "max ms": round(milliseconds[-1], 3),
        } | self.counters


def tables(audit: Audit, show: int) -> list[Table]:
    """Return the tables for a terminal: figures, hollow completions, and at most ``show`` findings."""
    title = f"{audit.reward} on {audit.file}"
    figures = Table(title=Text(title), title_justify="left", box=box.SIMPLE, show_header=False, min_width=len(title))
    for name, value in audit.summary().items():
        figures.add_row(name, f"{value:,}")
    result = [figures]
    if audit.hollow:
        hollow = Table(title="Completions that deserve nothing", title_justify="left", box=box.SIMPLE)
        for name in ("kind", "completions", "mean score", "passed", "example"):
            hollow.add_column(name, justify="left" if name in ("kind", "example") else "right")
        for score in audit.hollow:
            row = (score.kind, str(score.completions), f"{score.mean:.3f}", str(score.full))
            hollow.add_row(*row, Text(_end(score.example)))
        result.append(hollow)
    if audit.findings:
        shown = audit.findings[:show]
        heading = f"Offending rows ({len(shown)} of {len(audit.findings)})"
        rows = Table(title=heading, title_justify="left", box=box.SIMPLE, min_width=len(heading))
        for name in ("kind", "row", "gold", "score", "end of the completion"):
            rows.add_column(name, overflow="fold")
        for finding in shown:
            said = "-" if finding.score is None else f"{finding.score:g}"
            text = Text(finding.reason or _end(finding.completion))
            rows.add_row(finding.kind, Text(finding.row), Text(_end(finding.answer or "-")), said, text)
        result.append(rows)
    return result


def write_json(path: Path, audits: Sequence[Audit]) -> None:
    """Write figures, hollow completions and every finding."""
    documents = [
        {
            "file": audit.file,
            "reward": audit.reward,
            "summary": audit.summary(),
            "hollow": [asdict(score) for score in audit.hollow],
            "findings": [asdict(finding) for finding in audit.findings],
        }
        for audit in audits
    ]
    path.write_text(json.dumps(documents, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_csv(path: Path, audits: Sequence[Audit]) -> None:
    """Write a line per finding."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["file", "kind", "row", "answer", "completion", "score", "reason"])
        writer.writeheader()
        writer.writerows({"file": audit.file, **asdict(finding)} for audit in audits for finding in audit.findings)


def _end(text: str) -> str:
    """Return the end of a text in one line."""
    line = " ".join(text[-4 * _SHOWN :].split())
    return line if len(line) <= _SHOWN else "\u2026" + line[-_SHOWN:]
