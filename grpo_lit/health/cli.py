"""The command ``scripts/diagnose``."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml
from jsonargparse import ArgumentParser
from rich.console import Console
from rich.table import Table
from rich.text import Text

from grpo_lit.curves import read_scalars
from grpo_lit.errors import ConfigError
from grpo_lit.health.monitor import diagnose
from grpo_lit.health.rule import Event
from grpo_lit.health.rules import Rules
from grpo_lit.metrics.names import is_held_out

#: Steps that the windows of most rules take.
FEW_STEPS = 10
DESCRIPTION = """Say what was wrong with a run, from its TensorBoard events: the episodes that callbacks.Health tells
while a run goes on, with their likely causes and what to check or change. Thresholds are those of the run's own
config.yaml, where it has one, and can be set here: --rules.entropy_collapse.low 0.05. The exit status is 0 for a
healthy run, 1 for a sick one, 2 where nothing could be read."""


def recorded_rules(run: Path) -> list[str]:
    """Return the thresholds that a run was watched with, as words of the command line.

    Args:
        run: Its folder, or one above; the newest run counts.
    """
    newest = max(run.rglob("events.out.tfevents.*"), key=lambda file: file.stat().st_mtime, default=None)
    file = None if newest is None else newest.with_name("config.yaml")
    if file is None or not file.exists():
        return []
    trainer = (yaml.safe_load(file.read_text()) or {}).get("trainer") or {}
    watching = [part for part in trainer.get("callbacks") or [] if part["class_path"] == "callbacks.Health"]
    rules = (watching[0].get("init_args") or {}).get("rules") if watching else None
    return [f"--rules.{name}={json.dumps(value)}" for name, value in (rules or {}).items()]


def table(events: Sequence[Event]) -> Table:
    """Return a row per event; keys have a line's room even in a terminal of 80 columns."""
    shown = Table(show_lines=True)
    shown.add_column("seen", max_width=26, overflow="fold")
    shown.add_column("why, and what to do", overflow="fold")
    for event in events:
        parts = [("likely causes", event.causes), ("what to check or change", event.checks)]
        told = "\n".join(f"{heading}:\n" + "\n".join(f"- {text}" for text in texts) for heading, texts in parts)
        shown.add_row(Text(f"step {event.step}: {event.rule.replace('_', ' ')}\n{event.symptom}"), Text(told))
    return shown


def main(args: Sequence[str] | None = None) -> int:
    """Diagnose a run from the command line; return the exit status."""
    parser = ArgumentParser(prog="scripts/diagnose", description=DESCRIPTION)
    parser.add_argument("run", type=Path, help="A run's folder; of several below it the newest.")
    parser.add_argument("--json", action="store_true", help="Print JSON instead of a table.")
    parser.add_class_arguments(Rules, "rules")
    words = list(sys.argv[1:] if args is None else args)
    run = parser.parse_args(words).run
    try:
        if not run.exists():
            raise ConfigError(f"`run` expected a run's folder, but got {run}, which does not exist")
        parsed = parser.parse_args([*recorded_rules(run), *words])
        rules = parser.instantiate(parsed).rules
        scalars = read_scalars(run)
    except ConfigError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, soft_wrap=True)
        return 2
    # What is logged of a step stands at the number of steps before it, held-out figures at that of all.
    steps = max(step + (not is_held_out(name)) for name, (own, _) in scalars.items() for step in own)
    if not steps:
        Console(stderr=True).print(f"error: `run` expected steps, but {run} has made none yet", soft_wrap=True)
        return 2
    events = diagnose(scalars, rules.active())
    if parsed.json:
        found = [event.as_dict() for event in events]
        print(json.dumps({"run": str(run), "steps": steps, "healthy": not events, "events": found}, indent=2))
    elif events:
        Console().print(table(events))
    else:
        print(f"healthy: {len(rules.active())} rules found nothing in {steps} steps of {run}")
        if steps < FEW_STEPS:
            print(f"  which says little: most rules look at {FEW_STEPS} steps")
    return int(bool(events))
