"""Curves of a run as a picture: accuracy, exploration, length, and where a step's time goes."""

import argparse
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from grpo_lit.errors import ConfigError

Scalars = dict[str, tuple[list[int], list[float]]]

#: Panel title, and the metrics in it; a trailing slash takes every metric below.
PANELS = {
    "accuracy": ("reward/correct", "val/"),
    "exploration": ("exploration/entropy", "exploration/zero_signal", "exploration/group_diversity"),
    "completion tokens": ("length/mean", "length/correct", "length/incorrect"),
    "seconds of a step": ("system/time_rollout", "system/time_learn", "system/time_sync"),
}


def read_scalars(run: Path) -> Scalars:
    """Return steps and values of every scalar of a run's TensorBoard folder, or of the newest run below it.

    Raises:
        ConfigError: The folder holds no scalars.
    """
    newest = max(run.rglob("events.out.tfevents.*"), key=lambda file: file.stat().st_mtime, default=None)
    if newest is not None:
        run = newest.parent
    events = EventAccumulator(str(run), size_guidance={"scalars": 0})
    events.Reload()
    names = events.Tags()["scalars"]
    if not names:
        raise ConfigError(f"`run` expected a folder of TensorBoard events, but got {run}, which has none")
    return {name: ([e.step for e in events.Scalars(name)], [e.value for e in events.Scalars(name)]) for name in names}


def accuracies(scalars: Scalars) -> Scalars:
    """Return the held-out accuracies alone."""
    kinds = ("greedy", "avg")
    return {n: xy for n, xy in scalars.items() if n.startswith("val/") and n.split("/")[-1].split("@")[0] in kinds}


def plot(scalars: Scalars, target: Path, title: str) -> None:
    """Draw the panels side by side."""
    import matplotlib as mpl

    mpl.use("Agg")  # no display
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(4.2 * len(PANELS), 3.2), layout="constrained")
    for axis, (panel, wanted) in zip(axes, PANELS.items(), strict=True):
        for name, (steps, values) in scalars.items():
            if name in wanted or ("val/" in wanted and name in accuracies(scalars)):
                held_out = name.startswith("val/")
                axis.plot(steps, values, "o-" if held_out else "-", linewidth=2 if held_out else 1.2, label=name)
        axis.set(title=panel, xlabel="optimizer step", ylim=(0, None))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.suptitle(title)
    figure.savefig(target, dpi=110)


def main() -> None:
    """Command line of ``scripts/curves``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="a run's folder, e.g. runs/quickstart/version_0")
    parser.add_argument("target", type=Path, help="the picture to write: .png, .svg or .pdf")
    parser.add_argument("--title", default="", help="above the panels")
    arguments = parser.parse_args()
    try:
        scalars = read_scalars(arguments.run)
    except ConfigError as error:
        parser.exit(2, f"error: {error}\n")
    plot(scalars, arguments.target, arguments.title)
    for name, (steps, values) in accuracies(scalars).items():
        print(f"{name}: " + ", ".join(f"{value:.1%} at step {step}" for step, value in zip(steps, values, strict=True)))
    seconds = scalars.get("system/time_step", ([], []))[1]
    busy = sum(sum(scalars.get(f"system/time_{phase}", ([], []))[1]) for phase in ("rollout", "learn"))
    if seconds:
        print(f"{len(seconds)} steps in {sum(seconds):.0f} s, {busy / sum(seconds):.1%} in rollouts and learning")
