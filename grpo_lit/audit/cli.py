"""The command ``scripts/audit_verifier``."""

import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from jsonargparse import ArgumentParser
from rich.console import Console

from grpo_lit.audit.options import Settings
from grpo_lit.command import HelpFormatter, exit_status

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


def _reward(words: Sequence[str]) -> type:
    """Return the type of a reward; for the help alone, text will do, and takes no seconds to import."""
    if {"-h", "--help"} & set(words):
        return str
    from grpo_lit.rewards import Reward

    return Reward


def main(args: Sequence[str] | None = None) -> int:
    """Audit from the command line; return the exit status."""
    words = list(sys.argv[1:] if args is None else args)
    parser = ArgumentParser(prog="scripts/audit_verifier", description=DESCRIPTION, formatter_class=HelpFormatter)
    parser.add_argument("--config", action="config", help="YAML file with any of these settings.")
    parser.add_argument("files", type=Path, nargs="+", help="JSONL files of labelled completions.")
    who = "Who judges: a short name (NumericMatch, MathEquivalence, ...) or a class path; --reward.help NAME: its keys."
    parser.add_argument("--reward", type=_reward(words), required=True, help=who)
    parser.add_class_arguments(Settings)
    parsed = parser.parse_args(words)
    made = parser.instantiate(parsed)
    settings = Settings(**{field.name: made[field.name] for field in fields(Settings)})
    from grpo_lit.audit.auditing import run

    errors = Console(stderr=True)
    return exit_status(lambda: run(made.reward, made.files, settings, errors), errors)
