"""The command ``scripts/estimator_lab``."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

import torch
from jaxtyping import Float
from jsonargparse import ArgumentParser, DefaultHelpFormatter
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from grpo_lit.errors import ConfigError
from grpo_lit.lab import report
from grpo_lit.lab.enumeration import estimate, single_group_steps
from grpo_lit.lab.exact import sequence_kl_gradient
from grpo_lit.lab.recipes import kl_estimators, load_recipes
from grpo_lit.lab.settings import Settings
from grpo_lit.lab.world import EOS, Policies, World
from grpo_lit.objectives import Objective

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


class _Formatter(DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Types and defaults in the help, paragraphs of the description kept."""


def measure(
    objectives: Mapping[str, Objective],
    world: World,
    policies: Mapping[str, Policies],
    truth: Float[Tensor, "C V"],
    settings: Settings,
    advance: Callable[[], None],
) -> list[report.Row]:
    """Return a row per scenario and objective.

    Args:
        objectives: By name.
        world: Prompts and completions.
        policies: By scenario.
        truth: The exact gradient.
        settings: Group size and dynamic sampling.
        advance: Called after each row.
    """
    rows = []
    for scenario, cast in policies.items():
        steps = single_group_steps(world, cast, settings.group_size, settings.dynamic_sampling)
        for name, objective in objectives.items():
            rows.append(report.compare(name, scenario, estimate(objective, steps), truth.flatten()))
            advance()
    return rows


def measure_recipes(paths: Sequence[Path], settings: Settings, progress: Progress) -> list[report.Row]:
    """Return a row per scenario and recipe, against the policy gradient."""
    world = settings.world()
    current = settings.current(world)
    objectives, policies = load_recipes(paths, settings.max_length), settings.policies(world, current)
    task = progress.add_task("recipes", total=len(objectives) * len(policies))
    truth = world.policy_gradient(current)
    return measure(objectives, world, policies, truth, settings, lambda: progress.advance(task))


def measure_kl(settings: Settings, progress: Progress) -> list[report.Row]:
    """Return a row per scenario and estimate of the KL, against minus the gradient of KL(policy || reference)."""
    world = World(settings.vocabulary, settings.max_length, settings.prompts, lambda *_: (0.0,), ("none",))
    reference = settings.near(world, settings.reference_distance, 3)
    objectives, policies = kl_estimators(), settings.policies(world, reference)
    policies.pop("mismatch")
    task = progress.add_task("KL", total=len(objectives) * len(policies))
    truth = -sequence_kl_gradient(world, settings.current(world), reference)
    # One completion says all of a penalty that is a mean over completions; equal rewards have no signal to sample for.
    settings = replace(settings, group_size=1, dynamic_sampling=False)
    return measure(objectives, world, policies, truth, settings, lambda: progress.advance(task))


def describe(settings: Settings) -> str:
    """Return in a few lines how hard the prompts are and how far apart the policies."""
    world = settings.world()
    policies = settings.policies(world, settings.current(world))
    mass = world.completion_logprobs(settings.current(world)).exp()
    right = (mass * world.scores[..., 0]).sum(-1).tolist()
    cut = mass[:, [completion[-1] != EOS for completion in world.completions]].sum(-1).tolist()
    lines = [f"prompt {x}: right {p:.3f}, truncated {q:.3f}" for x, (p, q) in enumerate(zip(right, cut, strict=True))]
    for scenario in ("stale", "mismatch"):
        cast = policies[scenario]
        lines.append(f"{scenario}: KL(sampler || policy) {world.divergence(cast.sampler, cast.current):.4f} nats")
    return "\n".join(lines)


def publish(settings: Settings, tables: Mapping[str, Sequence[report.Row]], console: Console) -> None:
    """Print the tables and write the files asked for."""
    size = f"{settings.prompts} prompts, {settings.vocabulary} tokens, length <= {settings.max_length}"
    titles = {
        "recipes": f"Recipes against the gradient of the expected reward ({size}, G = {settings.group_size})",
        "kl": f"Estimates of the KL in the loss against the gradient of KL(policy || reference) ({size}, G = 1)",
    }
    console.print(describe(settings))
    for name, rows in tables.items():
        console.print(report.table(titles[name], rows))
    plain = {key: str(value) if isinstance(value, Path) else value for key, value in vars(settings).items()}
    if settings.json:
        report.write_json(settings.json, plain, tables)
    if settings.csv:
        report.write_csv(settings.csv, tables)
    if settings.plot:
        report.write_plot(settings.plot, titles["recipes"], tables["recipes"])
    for path in filter(None, (settings.json, settings.csv, settings.plot)):
        console.print(f"wrote {path}")


def main(args: Sequence[str] | None = None) -> int:
    """Run the lab from the command line; return the exit status."""
    parser = ArgumentParser(prog="scripts/estimator_lab", description=DESCRIPTION, formatter_class=_Formatter)
    parser.add_argument("recipes", type=Path, nargs="*", default=[RECIPES], help="Recipe files, or folders of them.")
    parser.add_class_arguments(Settings)
    parsed = parser.parse_args(args)
    settings = Settings(**{field.name: parsed[field.name] for field in fields(Settings)})
    console, errors = Console(), Console(stderr=True)
    torch.set_num_threads(1)  # many tiny tensors: a second thread would only wait
    try:
        with Progress(console=errors, transient=True) as progress:
            tables = {
                "recipes": measure_recipes(parsed.recipes, settings, progress),
                "kl": measure_kl(settings, progress),
            }
        publish(settings, tables, console)
    except ConfigError as error:
        errors.print(f"error: {error}", markup=False, soft_wrap=True)
        return 2
    return 0
