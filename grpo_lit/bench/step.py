"""The command ``scripts/benchmark_step``: where the time of whole training steps goes."""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from grpo_lit.ablate.runner import last_line
from grpo_lit.command import check_folder, exit_status, own_and_passed_on, progress_columns, wide_console
from grpo_lit.errors import ConfigError
from grpo_lit.report.events import Scalars, read_scalars

DESCRIPTION = """\
Measure whole optimizer steps of real runs: rollout, learning, weight sync, and what is left of the clock.

Without --config, the quickstart's: a real model and a real vLLM. Each --variant is a configuration on top, and is
measured beside the run without it, round by round, each run a process of its own. Words after -- go to every run.
The first step of a run, which warms caches up, is left out.

Columns: s/step: median wall time; rollout, learn, sync: their share of all wall time, of asynchronous rollouts what the
learner waited for them; busy: rollout and learn together; sampled/s, trained/s: completion tokens sampled, and trained
on, over all wall time; GiB: most memory of the learner's process, and of the engine's.

Examples:
  scripts/benchmark_step --steps 5
  scripts/benchmark_step --variant configs/engine/transformers.yaml --rounds 3 --json steps.json
  scripts/benchmark_step -- --data.prompts_per_rollout 8
"""
#: Steps of a run that are not measured.
WARM_UP = 1
_LOGGER = "lightning.pytorch.loggers.TensorBoardLogger"
#: Phases of a step that are logged as ``system/time_<phase>``.
PHASES = ("rollout", "learn", "sync")


@dataclass(frozen=True)
class Step:
    """One optimizer step.

    Attributes:
        variant: What was measured.
        seconds: Wall time.
        shares: Of it, by phase; of an asynchronous rollout what the learner waited for it.
        sampled: Completion tokens drawn.
        trained: Completion tokens that went through the learner.
        memory_learn: Peak of the learner's process [GiB].
        memory_engine: Of the engine's processes [GiB].
    """

    variant: str
    seconds: float
    shares: dict[str, float]
    sampled: float
    trained: float
    memory_learn: float
    memory_engine: float


def steps_of(variant: str, scalars: Scalars) -> Iterator[Step]:
    """Yield the measured steps of a run.

    Args:
        variant: Its name.
        scalars: What it logged.

    Raises:
        ConfigError: It made no step that could be measured.
    """

    def at(name: str, step: int) -> float:
        steps, values = scalars.get(name, ([], []))
        return dict(zip(steps, values, strict=True)).get(step, 0.0)

    steps, seconds = scalars.get("system/time_step", ([], []))
    if len(steps) <= WARM_UP:
        raise ConfigError(f"`steps` expected a run of more than {WARM_UP} steps, but {variant} made {len(steps)}")
    # Asynchronous rollouts are drawn while the learner trains: of their time a step takes what it waited for them.
    waited = "system/time_wait_rollout"
    times = {phase: f"system/time_{phase}" for phase in PHASES}
    if waited in scalars:
        times["rollout"] = waited
    sampled_before = max(at("system/tokens_sampled", step) for step in steps[:WARM_UP])
    for step, wall in list(zip(steps, seconds, strict=True))[WARM_UP:]:
        # A later update of a rollout samples nothing, and logs no count.
        sampled_by_now = max(at("system/tokens_sampled", step), sampled_before)
        sampled, sampled_before = sampled_by_now - sampled_before, sampled_by_now
        yield Step(
            variant,
            wall,
            {phase: at(name, step) / wall for phase, name in times.items()},
            sampled,
            at("system/learner_tokens_per_s", step) * at("system/time_learn", step),
            at("system/memory_learn", step),
            at("system/memory_engine", step),
        )


def run_once(variant: str, words: Sequence[str], folder: Path) -> list[Step]:
    """Train for a few steps in a process of its own and return them.

    Raises:
        ConfigError: The run failed.
    """
    own = ["--trainer.num_sanity_val_steps", "0", "--trainer.limit_val_batches", "0"]
    own += ["--trainer.enable_progress_bar", "false", "--trainer.logger", _LOGGER]
    own += ["--trainer.logger.init_args.save_dir", str(folder)]
    command, file = [sys.executable, "-m", "grpo_lit", "fit", *words, *own], folder / "log.txt"
    with file.open("w") as log:
        done = subprocess.run(command, stdout=log, stderr=log, check=False)
    if done.returncode != 0:
        raise ConfigError(f"the run {variant!r} ended with status {done.returncode}: {last_line(file)}")
    return list(steps_of(variant, read_scalars(folder)))


def table(steps: Sequence[Step]) -> Table:
    """Return a row for each variant: the median time of a step, shares and rates over all steps, peaks of memory."""
    result = Table(box=box.SIMPLE)
    names = (
        "variant",
        "s/step",
        "rollout",
        "learn",
        "sync",
        "busy",
        "sampled/s",
        "trained/s",
        "learner GiB",
        "engine GiB",
    )
    for name in names:
        result.add_column(name, justify="left" if name == "variant" else "right", no_wrap=True)
    for variant in dict.fromkeys(step.variant for step in steps):
        mine = [step for step in steps if step.variant == variant]
        # Sums over sums: a rollout may serve several steps, of which only the first samples.
        wall = sum(step.seconds for step in mine)
        shares = [sum(step.shares[phase] * step.seconds for step in mine) / wall for phase in PHASES]
        result.add_row(
            variant,
            f"{statistics.median(step.seconds for step in mine):.2f}",
            *(f"{share:.1%}" for share in [*shares, shares[0] + shares[1]]),
            *(f"{sum(getattr(step, name) for step in mine) / wall:.0f}" for name in ("sampled", "trained")),
            *(f"{max(getattr(step, name) for step in mine):.2f}" for name in ("memory_learn", "memory_engine")),
        )
    return result


def main(args: Sequence[str] | None = None) -> int:
    """Run the benchmark from the command line; return the exit status."""
    own, passed_on = own_and_passed_on(args)
    parser = argparse.ArgumentParser(
        prog="scripts/benchmark_step", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="scripts/benchmark_step [options] [-- overrides of every run]",
    )  # fmt: skip
    parser.add_argument("--config", nargs="+", default=[], help="configurations, later ones win (default: quickstart)")
    parser.add_argument("--variant", action="append", default=[], help="a configuration on top; may be given again")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps of a run (default: 5)")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each variant, interleaved (default: 1)")
    parser.add_argument("--json", type=Path, help="file for every step")
    asked = parser.parse_args(own)
    errors = Console(stderr=True)

    def measure() -> int:
        if asked.steps <= WARM_UP or asked.rounds < 1:
            raise ConfigError(f"`steps` expected > {WARM_UP} and `rounds` >= 1, but got {asked.steps}, {asked.rounds}")
        check_folder(asked.json, "json")
        steps = measured(asked, passed_on, errors)
        wide_console(110).print(table(steps))
        if asked.json:
            asked.json.write_text(json.dumps([asdict(step) for step in steps], indent=2) + "\n")
        return 0

    return exit_status(measure, errors)


def measured(asked: argparse.Namespace, overrides: Sequence[str], errors: Console) -> list[Step]:
    """Return the steps of all runs."""
    files = asked.config or ["configs/base.yaml", "configs/quickstart.yaml"]
    base = [word for file in files for word in ("--config", file)]
    names = ["base", *(Path(file).stem for file in asked.variant)]
    if len(set(names)) < len(names):
        raise ConfigError(f"`variant` expected files with names of their own, none of them base, but got {names[1:]}")
    variants = dict(zip(names, [[], *(["--config", file] for file in asked.variant)], strict=True))
    tail = ["--trainer.max_steps", str(asked.steps), *overrides]
    if not asked.config:
        from grpo_lit.policy.fetch import fetch_smollm2  # takes seconds, which --help need not wait for

        tail = ["--model.checkpoint", str(fetch_smollm2()), *tail]
    steps: list[Step] = []
    with Progress(*progress_columns(), console=errors, transient=True) as progress:
        task = progress.add_task("", total=asked.rounds * len(variants))
        for number in range(asked.rounds):
            for name, more in variants.items():
                progress.update(task, description=f"round {number + 1} of {asked.rounds}: {name}")
                with tempfile.TemporaryDirectory(prefix="grpo_lit_step_") as folder:
                    steps += run_once(name, [*base, *more, *tail], Path(folder))
                progress.advance(task)
    return steps
