"""What the lab measures and shows: recipes against the policy gradient, estimates of the KL against the KL's."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from jaxtyping import Float
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from grpo_lit.lab import report
from grpo_lit.lab.enumeration import estimate, single_group_steps
from grpo_lit.lab.exact import sequence_kl_gradient
from grpo_lit.lab.recipes import kl_estimators, load_recipes
from grpo_lit.lab.settings import Settings
from grpo_lit.lab.world import EOS, Policies, World
from grpo_lit.objectives import Objective


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


def run(recipes: Sequence[Path], settings: Settings) -> int:
    """Measure, print and write everything; return the exit status."""
    torch.set_num_threads(1)  # many tiny tensors: a second thread would only wait
    with Progress(console=Console(stderr=True), transient=True) as progress:
        tables = {
            "recipes": measure_recipes(recipes, settings, progress),
            "kl": measure_kl(settings, progress),
        }
    publish(settings, tables, Console())
    return 0
