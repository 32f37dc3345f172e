import csv
import json
import runpy
import sys
from pathlib import Path

import pytest

from grpo_lit.lab.cli import RECIPES, main

SMALL = ["--vocabulary", "2", "--max_length", "2", "--group_size", "3"]


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> tuple[dict, Path]:
    folder = tmp_path_factory.mktemp("lab")
    files = [f"--{kind}={folder / f'lab.{kind}'}" for kind in ("json", "csv")]
    recipes = [str(RECIPES / f"{name}.yaml") for name in ("dr_grpo", "reinforce", "grpo")]
    assert main([*recipes, *SMALL, *files, f"--plot={folder / 'lab.png'}"]) == 0
    return json.loads((folder / "lab.json").read_text()), folder


def test_unbiased_recipes_show_their_factor(result):
    # On-policy: dr_grpo (G-1)/(G L) = 2/3 / 2 and reinforce 1/L = 1/2, nothing left after it.
    rows = {(row["recipe"], row["scenario"]): row for row in result[0]["recipes"]}
    assert len(rows) == 3 * 3
    assert rows["dr_grpo", "on_policy"]["scale"] == pytest.approx(1 / 3)
    assert rows["reinforce", "on_policy"]["scale"] == pytest.approx(1 / 2)
    for recipe in ("dr_grpo", "reinforce"):
        assert rows[recipe, "on_policy"]["relative_bias"] < 1e-10
        assert rows[recipe, "stale"]["relative_bias"] > 1e-3
        assert rows[recipe, "mismatch"]["relative_bias"] > 1e-3
    assert rows["grpo", "on_policy"]["relative_bias"] > 1e-2


def test_kl_table_shows_k1_at_rest(result):
    rows = {(row["recipe"], row["scenario"]): row for row in result[0]["kl"]}
    assert rows["k1", "on_policy"]["cosine"] is None
    assert rows["k1", "on_policy"]["scale"] == 0
    assert rows["k2", "on_policy"]["scale"] == pytest.approx(rows["k3 x ratio", "on_policy"]["scale"])
    assert rows["k3 x ratio", "stale"]["cosine"] > 0.9


def test_files_hold_the_same_rows(result):
    data, folder = result
    with (folder / "lab.csv").open() as file:
        read = list(csv.DictReader(file))
    assert [row["recipe"] for row in read] == [row["recipe"] for table in ("recipes", "kl") for row in data[table]]
    assert data["settings"]["group_size"] == 3
    assert (folder / "lab.png").stat().st_size > 1000


def test_seed_decides(tmp_path):
    def run(seed: int) -> list:
        file = tmp_path / "a.json"
        assert main([str(RECIPES / "grpo.yaml"), *SMALL, "--seed", str(seed), f"--json={file}"]) == 0
        return json.loads(file.read_text())["recipes"]

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_dynamic_sampling_scales_by_the_chance_of_signal(tmp_path, result):
    # New prompts replace dropped groups: the same direction, a longer step.
    file = tmp_path / "a.json"
    assert main([str(RECIPES / "dr_grpo.yaml"), *SMALL, "--dynamic_sampling", "true", f"--json={file}"]) == 0
    row = json.loads(file.read_text())["recipes"][0]
    assert row["relative_bias"] < 1e-10
    assert row["scale"] > 1.1 / 3


def test_user_errors_are_one_line(capsys, tmp_path):
    assert main([str(tmp_path / "none.yaml"), *SMALL]) == 2
    assert main([str(RECIPES / "grpo.yaml"), "--vocabulary", "1"]) == 2
    errors = capsys.readouterr().err
    assert "none.yaml" in errors
    assert "`vocabulary`" in errors
    assert "Traceback" not in errors


def test_help_explains(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["estimator_lab", "--help"])
    monkeypatch.syspath_prepend(str(RECIPES.parents[1] / "scripts"))  # as Python does for a script
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(RECIPES.parents[1] / "scripts/estimator_lab"))
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert "relative_bias" in printed
    assert "--group_size" in printed
