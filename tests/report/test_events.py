"""Scalars are read as one history, whatever was resumed, and of the run that is meant."""

from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_lit.errors import ConfigError
from grpo_lit.metrics.names import by_importance, is_accuracy
from grpo_lit.report.events import read_scalars, run_folder

ACCURACY = "val/sums/greedy"


def test_what_a_resumed_run_makes_again_is_the_later_ones(write: Callable) -> None:
    # Killed at step 5, resumed from the checkpoint of step 3: steps 3 and 4 are made again; step 5 never was.
    write("run", {"reward/total": dict.fromkeys(range(5), 1.0), ACCURACY: {0: 0.1, 3: 0.3, 5: 0.5}})
    folder = write("run", {"reward/total": dict.fromkeys((3, 4), 2.0)})
    scalars = read_scalars(folder)
    assert scalars["reward/total"] == ([0, 1, 2, 3, 4], [1.0, 1.0, 1.0, 2.0, 2.0])
    # The accuracy of step 3 is of the weights that were resumed; that of step 5 is of weights that are gone.
    assert scalars[ACCURACY] == ([0, 3], pytest.approx([0.1, 0.3]))


def test_a_run_that_starts_anew_in_the_same_folder_replaces_the_other(write: Callable) -> None:
    write("run", {"reward/total": dict.fromkeys(range(5), 1.0), "reward/old": {4: 1.0}, ACCURACY: {0: 0.5, 4: 0.5}})
    folder = write("run", {"reward/total": {0: 2.0}, ACCURACY: {0: 0.25}})
    assert read_scalars(folder) == {"reward/total": ([0], [2.0]), ACCURACY: ([0], [0.25])}


def test_a_later_validation_alone_replaces_nothing_else(write: Callable) -> None:
    write("run", {"reward/total": {0: 1.0, 1: 1.0}, ACCURACY: {0: 0.5}})
    folder = write("run", {ACCURACY: {2: 0.75}})
    assert read_scalars(folder) == {"reward/total": ([0, 1], [1.0, 1.0]), ACCURACY: ([0, 2], [0.5, 0.75])}


def test_the_newest_run_below_a_folder_is_meant(write: Callable, tmp_path: Path) -> None:
    import os

    old, new = (write(f"runs/version_{i}", {"reward/total": {0: float(i)}}) for i in (0, 1))
    for age, folder in ((1000, new), (2000, old)):  # version_0 is being written to
        for file in folder.iterdir():
            os.utime(file, (age, age))
    assert run_folder(tmp_path / "runs") == old
    assert run_folder(new) == new
    write("runs/version_0/deeper", {"reward/total": {0: 9.0}})
    assert run_folder(old) == old


@pytest.mark.parametrize("metrics", [None, {}])
def test_a_folder_without_scalars_is_refused(metrics: dict | None, write: Callable, tmp_path: Path) -> None:
    folder = tmp_path if metrics is None else write("run", metrics)
    with pytest.raises(ConfigError, match="`run` expected a folder of TensorBoard events"):
        read_scalars(folder)


def test_accuracies_and_their_order() -> None:
    names = ["val/b/pass@16", "val/b/pass@2", "val/a/avg@4", "val/b/greedy", "val/b/greedy/ci_low", "val/b/length"]
    assert by_importance(names) == ["val/b/greedy", "val/a/avg@4", "val/b/pass@2", "val/b/pass@16"]
    assert not is_accuracy("reward/greedy")
