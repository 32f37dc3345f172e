import csv
import json
import math

import pytest
import torch
from rich.console import Console

from grpo_lit.lab.enumeration import Estimate
from grpo_lit.lab.report import compare, table, write_csv, write_json, write_plot


def row(mean: list[float], variance: float = 4.0, truth: tuple[float, ...] = (2.0, 0.0)):
    vectors = (torch.tensor(values, dtype=torch.float64) for values in (mean, truth))
    return compare("mine", "stale", Estimate(next(vectors), variance), next(vectors))


def test_numbers_by_hand():
    # E[g] = (3, 4), t = (2, 0): s = 6 / 4, bias |(1, 4)| = sqrt 17, |(3, 4) - (3, 0)| / 3 = 4/3, cosine 6 / (5 * 2),
    # noise sqrt(4) / 5.
    got = row([3.0, 4.0])
    assert got.scale == pytest.approx(1.5)
    assert got.bias == pytest.approx(math.sqrt(17))
    assert got.relative_bias == pytest.approx(4 / 3)
    assert got.cosine == pytest.approx(0.6)
    assert got.noise == pytest.approx(0.4)
    assert (got.recipe, got.scenario, got.variance) == ("mine", "stale", 4.0)


def test_relative_bias_is_the_tangent_of_the_angle():
    # Whatever the scale, and for an estimator that points backwards too.
    for mean in ([1.0, 2.0], [10.0, 20.0], [-1.0, 2.0]):
        got = row(mean)
        assert got.relative_bias == pytest.approx(math.tan(math.acos(abs(got.cosine))))


def test_an_expected_gradient_of_zero_has_no_direction():
    got = row([1e-17, -1e-17])
    assert (got.scale, got.bias) == (0.0, 2.0)
    assert all(math.isnan(value) for value in (got.relative_bias, got.cosine, got.noise))


def test_a_right_angle_has_no_scale():
    got = row([0.0, 3.0])
    assert (got.scale, got.cosine) == (0.0, 0.0)
    assert math.isinf(got.relative_bias)


def test_json_takes_no_nan(tmp_path):
    rows = [row([3.0, 4.0]), row([0.0, 0.0]), row([0.0, 3.0])]
    write_json(tmp_path / "a.json", {"seed": 1}, {"recipes": rows})
    text = (tmp_path / "a.json").read_text()
    loaded = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert loaded["settings"] == {"seed": 1}
    assert loaded["recipes"][0]["cosine"] == pytest.approx(0.6)
    assert loaded["recipes"][1]["cosine"] is None
    assert loaded["recipes"][2]["relative_bias"] is None


def test_csv_names_the_table_of_each_row(tmp_path):
    write_csv(tmp_path / "a.csv", {"recipes": [row([3.0, 4.0])], "kl": [row([3.0, 4.0])]})
    with (tmp_path / "a.csv").open() as file:
        read = list(csv.DictReader(file))
    assert [line["table"] for line in read] == ["recipes", "kl"]
    assert float(read[0]["scale"]) == pytest.approx(1.5)


def test_table_fits_a_terminal_of_80_columns(capsys):
    Console(width=80).print(table("title", [row([3.0, 4.0]), row([0.0, 0.0]), row([2e-20, 0.0], variance=1e-40)]))
    printed = capsys.readouterr().out
    assert "…" not in printed
    assert "4.12" in printed
    assert "-" in printed


def test_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib").use("Agg")
    write_plot(tmp_path / "a.png", "title", [row([3.0, 4.0]), row([0.0, 0.0]), row([0.0, 3.0])])
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
