"""The command ``scripts/ablate``."""

import argparse
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_lit.ablate.cells import Cell, cells_of
from grpo_lit.ablate.runner import Runner, locked
from grpo_lit.ablate.spec import Spec, checked_overrides, checked_seeds, load_spec
from grpo_lit.ablate.table import markdown, plot, results_of, write_tables
from grpo_lit.command import own_and_passed_on
from grpo_lit.errors import ConfigError

DESCRIPTION = """\
Run a baseline, each change to it alone, and the changes one after the other, over seeds, and write a table.

The specification is a YAML file such as configs/ablation/quickstart.yaml. What follows -- goes to every run:

  scripts/ablate configs/ablation/quickstart.yaml -- --trainer.max_steps 40

Every run is a process with a folder and a log of its own below the output folder. Started again, the command goes on
with what is missing; Ctrl-C lets runs save where they are. After each run table.md, table.csv, table.json and table.png
are written anew. Checkpoints of finished runs are deleted unless asked for.

Exit status: 0; 1 where a run failed (the others are made all the same); 2 for settings that cannot work; 130 on Ctrl-C.
"""


def main(args: Sequence[str] | None = None) -> int:
    """Run an ablation from the command line; return the exit status."""
    own, passed_on = own_and_passed_on(args)
    parser = argparse.ArgumentParser(
        prog="scripts/ablate", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="scripts/ablate [options] SPEC [-- overrides of every run]",
    )  # fmt: skip
    parser.add_argument("spec", type=Path, metavar="SPEC", help="YAML file that says what is compared")
    parser.add_argument("--seeds", type=int, nargs="+", help="instead of the specification's")
    parser.add_argument("--output", type=Path, help="folder of runs and tables, instead of the specification's")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default: 1)")
    parser.add_argument("--keep_checkpoints", action="store_true", help="of finished runs too")
    parser.add_argument(
        "--dry_run", "--dry-run", action="store_true", help="print the commands that are left, and stop"
    )
    arguments = parser.parse_args(own)
    try:
        spec = load_spec(arguments.spec)
        spec = replace(spec, output=arguments.output or spec.output)
        spec = replace(spec, seeds=checked_seeds(arguments.seeds or spec.seeds))
        if arguments.jobs < 1:
            raise ConfigError(f"`jobs` expected to be >= 1, but got {arguments.jobs}")
        cells = cells_of(spec, checked_overrides(passed_on))
        for cell in cells:
            cell.check()
        if arguments.dry_run:
            print("\n".join(_plans(cells)))
            return 0
        return _run(spec, cells, arguments)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped: the same command goes on from here", file=sys.stderr)
        return 130


def _plans(cells: Sequence[Cell]) -> list[str]:
    left = [cell for cell in cells if cell.result() is None]
    commands = [line for cell in left for line in (f"# {cell.title}", shlex.join(cell.command()))]
    return [f"# {len(cells) - len(left)} of {len(cells)} runs are finished", *commands]


def _run(spec: Spec, cells: Sequence[Cell], arguments: argparse.Namespace) -> int:
    def publish() -> None:
        results = results_of(cells)
        write_tables(spec, results)
        plot(spec, results, spec.output / "table.png")

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    # Ctrl-C is ignored in the background of a shell, and so would runs: they could not be asked to save.
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with locked(spec.output) as lock:
            runner = Runner(arguments.jobs, lambda line: print(line, flush=True), arguments.keep_checkpoints, lock)
            failed = runner.run(cells, publish)
            publish()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    print(f"\n{markdown(spec, results_of(cells))}\nwrote {spec.output}/table.md, .csv, .json and .png")
    for cell in failed:
        print(f"failed: {cell.title}; log: {cell.folder / 'log.txt'}", file=sys.stderr)
    return 1 if failed else 0
