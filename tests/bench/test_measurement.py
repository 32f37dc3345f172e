"""Medians, ratios and shares by hand."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from grpo_lit.bench.measurement import Measurement, Spread, flatness, summarise
from grpo_lit.bench.report import Result, Verification, publish
from grpo_lit.bench.rounds import WIDTH
from grpo_lit.bench.settings import Settings
from grpo_lit.command import wide_console

ONE = Measurement(
    arm="ours",
    groups=8,
    tokens=1000,
    loss=0.5,
    gradient_seconds=2.0,
    optimizer_seconds=0.25,
    peak_gib=1.0,
    resident_gib=2.0,
    flops=3e11,
    matmul_flops_per_second=5e11,
)


def rounds(arm: str, seconds: list[float], groups: int = 8) -> list[Measurement]:
    return [replace(ONE, arm=arm, groups=groups, gradient_seconds=s) for s in seconds]


def test_rates_of_one_step() -> None:
    assert ONE.tokens_per_second == 500
    assert ONE.matmul_share == pytest.approx(0.3)  # 1.5e11 of 5e11 each second


def test_a_ratio_compares_the_same_round() -> None:
    # Rounds of 1, 2, 4 s against 2, 8, 12 s: ratios 2, 4, 3, median 3; of the medians it would be 8 / 2 = 4.
    ours, plain = summarise(rounds("ours", [1.0, 2.0, 4.0]) + rounds("plain", [2.0, 8.0, 12.0]))
    assert ours.times_plain == Spread(3.0, 2.0, 4.0)
    assert plain.times_plain == Spread(1.0, 1.0, 1.0)
    assert ours.tokens_per_second == Spread(500.0, 250.0, 1000.0)
    assert ours.microseconds_per_token.median == pytest.approx(2000)


def test_memory_is_the_highest_of_all_rounds() -> None:
    ours = [replace(ONE, peak_gib=peak) for peak in (0.5, 0.75)]
    plain = [replace(ONE, arm="plain", peak_gib=peak) for peak in (3.0, 2.0)]
    summary = summarise(ours + plain)[0]
    assert (summary.peak_gib, summary.peak_of_plain) == (0.75, 0.25)


def test_an_arm_alone_is_compared_with_nothing() -> None:
    (summary,) = summarise(rounds("ours", [1.0]))
    assert summary.times_plain is None
    assert summary.peak_of_plain is None


def test_an_arm_that_ended_early_is_compared_where_it_was_measured() -> None:
    ours, plain = summarise(rounds("ours", [1.0, 1.0]) + rounds("plain", [5.0]))
    assert ours.times_plain == Spread(5.0, 5.0, 5.0)
    assert plain.tokens_per_second.median == 200


def test_flat_means_that_no_size_is_slower() -> None:
    # 1000 tokens in 1 s with 4 groups, in 1.1 s with 8.
    summaries = summarise(rounds("ours", [1.0], groups=4) + rounds("ours", [1.1], groups=8))
    assert flatness(summaries, "ours", lambda summary: summary.microseconds_per_token.median) == pytest.approx(0.1)
    assert flatness(summaries[:1], "ours", lambda summary: summary.peak_gib) is None


def test_no_cell_is_cut_in_a_pipe(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    seconds = {"compiled": [0.0125, 0.01, 0.05], "plain": [0.125, 0.25, 0.5]}
    measured = [
        replace(one, optimizer_seconds=100.0, peak_gib=100.0, flops=4e9)
        for arm, each in seconds.items()
        for one in rounds(arm, each, groups=1024)
    ]
    publish(Settings(threads=1), Result(measured), wide_console(WIDTH))
    printed = capsys.readouterr().out
    assert "80000 (20000-100000)" in printed
    assert "10.00 (10.00-25.00)" in printed
    assert "64% (16%-80%)" in printed
    assert "update s" in printed
    assert "…" not in printed


def test_table_and_file(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    measured = rounds("ours", [1.0, 2.0]) + rounds("plain", [4.0, 4.0]) + rounds("ours", [1.0], groups=16)
    result = Result(measured, Verification(0.1, 0.1, 2e-7), {"trl": "ended with status 1: [no] memory"})
    settings = Settings(json=tmp_path / "a.json", threads=3, precision="float32")
    publish(settings, result, Console(width=120))
    printed = capsys.readouterr().out
    assert "3.00 (2.00-4.00)" in printed
    assert "3 threads" in printed
    assert "ours: between sizes, time per token differs by 50.0% and peak memory by 0.0%" in printed  # 1.5 ms and 1 ms
    assert "trl: not measured to the end: ended with status 1: [no] memory" in printed
    data = json.loads((tmp_path / "a.json").read_text())
    assert len(data["measured"]) == 5
    assert data["summaries"][0]["times_plain"] == {"median": 3.0, "low": 2.0, "high": 4.0}
    assert data["verification"]["gradient_distance"] == 2e-7
    assert data["machine"]["dtype"] == "float32"
    assert data["settings"]["preset"] == "short"
