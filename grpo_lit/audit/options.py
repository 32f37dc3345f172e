"""How an audit can be asked for; light, so that its help is there at once."""

from dataclasses import dataclass, field
from pathlib import Path

from grpo_lit.audit.samples import Fields


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
