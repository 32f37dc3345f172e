"""Scalars of a run's TensorBoard folder, those of resumed runs as one history."""

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from grpo_lit.errors import ConfigError
from grpo_lit.metrics.names import is_held_out

#: Steps and values of each metric.
Scalars = dict[str, tuple[list[int], list[float]]]


def run_folder(run: Path) -> Path:
    """Return the folder with event files that is meant: the run's own, or that of the newest run below it.

    Raises:
        ConfigError: There is none.
    """
    if any(run.glob("events.out.tfevents.*")):
        return run
    newest = max(run.rglob("events.out.tfevents.*"), key=lambda file: file.stat().st_mtime, default=None)
    if newest is None:
        raise ConfigError(f"`run` expected a folder of TensorBoard events, but got {run}, which has none")
    return newest.parent


def read_scalars(run: Path) -> Scalars:
    """Return steps and values of every scalar of a run's TensorBoard folder, or of the newest run below it.

    Each start of a run writes a file of its own. Where a later one goes on from a checkpoint, what it made again, and
    what the one before had made beyond it, is the later one's.

    Raises:
        ConfigError: The folder holds no scalars.
    """
    folder = run_folder(run)
    merged: dict[str, dict[int, float]] = {}
    for file in sorted(folder.glob("events.out.tfevents.*")):  # their names begin with the time
        scalars = _scalars_of(file)
        starts = [min(values) for name, values in scalars.items() if not is_held_out(name)]
        if starts:
            merged = {name: _before(values, min(starts), is_held_out(name)) for name, values in merged.items()}
        for name, values in scalars.items():
            merged.setdefault(name, {}).update(values)
    if not any(merged.values()):
        raise ConfigError(f"`run` expected a folder of TensorBoard events, but got {folder}, which has no scalars")
    return {name: (sorted(values), [values[s] for s in sorted(values)]) for name, values in merged.items() if values}


def _scalars_of(file: Path) -> dict[str, dict[int, float]]:
    events = EventAccumulator(str(file), size_guidance={"scalars": 0})
    events.Reload()
    return {name: {event.step: event.value for event in events.Scalars(name)} for name in events.Tags()["scalars"]}


def _before(values: dict[int, float], start: int, held_out: bool) -> dict[int, float]:
    """Return what a run that begins at ``start`` leaves as it was; held-out figures there are of the same weights."""
    return {step: value for step, value in values.items() if step < start or (held_out and step == start)}
