"""The command ``scripts/estimator_lab``."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from jsonargparse import ArgumentParser
from rich.console import Console

from grpo_lit.command import HelpFormatter, exit_status
from grpo_lit.lab.options import Options

DESCRIPTION = """\
Compare the gradient of every recipe with the exact policy gradient, on a policy small enough to enumerate.

The policy has one logit per (prompt, prefix, token). The task: say token 1 once (prompt 0), twice (prompt 1), and so
on, and stop; one point for the count, one for stopping. A step is one group of one prompt drawn at random. All possible
groups are added up in float64, so every number is exact.

Scenarios: on_policy; stale: an older policy drew the groups and is the old policy; mismatch: the old policy is the
current one, but the engine that drew the groups is another (only corrections see it).

Columns: scale: best factor between expected gradient and truth, taken up by a learning rate; bias: their distance;
relative_bias: the share that no factor mends; cosine: of the two; variance: trace of the covariance; noise: its root
over the expected gradient, one step's noise in units of its signal.

The reference of the recipes is the current policy, so that a KL pulls at nothing. A second table, with a reference some
way off and equal rewards, holds every estimate of the KL against the exact gradient of KL(policy || reference).
"""

RECIPES = Path(__file__).parents[2] / "configs/recipe"


def main(args: Sequence[str] | None = None) -> int:
    """Run the lab from the command line; return the exit status."""
    parser = ArgumentParser(prog="scripts/estimator_lab", description=DESCRIPTION, formatter_class=HelpFormatter)
    parser.add_argument("recipes", type=Path, nargs="*", default=[RECIPES], help="Recipe files, or folders of them.")
    parser.add_class_arguments(Options)
    parsed = parser.parse_args(args)
    # What takes seconds to import is not needed to print the help.
    from grpo_lit.lab.measuring import run
    from grpo_lit.lab.settings import Settings

    settings = Settings(**{field.name: parsed[field.name] for field in fields(Options)})
    return exit_status(lambda: run(parsed.recipes, settings), Console(stderr=True))
