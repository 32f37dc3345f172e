"""The whole command on the smallest model, and everything that may end it early."""

import json
import runpy
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from grpo_lit.bench import rounds, worker
from grpo_lit.bench.cli import main
from grpo_lit.bench.measurement import Measurement
from grpo_lit.bench.options import RECIPES
from grpo_lit.bench.processes import ArmError, ArmProcess
from grpo_lit.bench.rounds import gradient_distance
from grpo_lit.bench.settings import Settings

SMALL = ["--tiny", "true", "--rounds", "2", "--threads", "1", "--precision", "float32", "--arms", "ours", "plain"]
FIGURES = [field.name for field in fields(Measurement)]


class Silent:
    """Stands in for an arm's process."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name

    def wait_until_ready(self) -> None:
        return None

    def close(self) -> None:
        return None


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict:
    file = tmp_path_factory.mktemp("benchmark") / "result.json"
    # One micro-batch of ours, however many groups there are: its memory grows with them.
    assert main([*SMALL, "--groups", "100", "2", "--budget", "100000", "--plain_rows", "80", f"--json={file}"]) == 0
    return json.loads(file.read_text())


def test_ours_and_plain_agree_before_anything_is_timed(result: dict) -> None:
    found = result["verification"]
    assert 0 < found["gradient_distance"] < 1e-5
    assert found["loss_ours"] == pytest.approx(found["loss_plain"], abs=1e-6)
    assert result["failures"] == {}


def test_arms_are_interleaved_over_the_rounds(result: dict) -> None:
    order = [(m["groups"], m["arm"]) for m in result["measured"]]
    assert order == 2 * [(100, "ours"), (100, "plain"), (2, "ours"), (2, "plain")]


def test_both_did_the_same_work(result: dict) -> None:
    for groups in (2, 100):
        same = {(m["tokens"], m["flops"]) for m in result["measured"] if m["groups"] == groups}
        assert len(same) == 1
    for m in result["measured"]:
        assert min(m[name] for name in ("gradient_seconds", "optimizer_seconds", "resident_gib", "tokens")) > 0
        assert m["peak_gib"] >= 0
        assert 0 < m["flops"] / m["gradient_seconds"] < m["matmul_flops_per_second"]


def test_memory_is_that_of_a_step_whatever_was_measured_before_it(result: dict) -> None:
    def peak(arm: str, groups: int) -> float:
        (peak,) = {1024 * m["peak_gib"] for m in result["measured"] if (m["arm"], m["groups"]) == (arm, groups)}
        return peak

    # MiB. The small rollout comes after the large one, whose heap is none of it.
    assert peak("ours", 2) + 25 < peak("ours", 100)


def test_nothing_freed_counts_as_held_before_a_step(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    events = []

    def noted(name: str, value: object) -> Callable[..., object]:
        return lambda *args: (events.append(name), value)[1]

    monkeypatch.setattr(worker, "release_free_memory", noted("release", None))
    monkeypatch.setattr(worker, "_resident_bytes", noted("resident", 0))
    monkeypatch.setattr(worker.PeakMemory, "_reset", noted("peak", None))
    measured = worker.Worker("ours", settings)
    measured.verify(1, str(tmp_path / "a.pt"))
    measured.measure(1)
    measured.measure(1)
    # The last one: what was taken starts anew. A second step of this size is timed alone.
    assert events == ["release", "resident", "release", "peak", "peak"]


def test_an_arm_that_takes_the_last_memory_is_ended_and_told(capsys: pytest.CaptureFixture) -> None:
    assert main([*SMALL, "--min_free_gib", "1e9"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("GiB of memory left on this machine") == 2
    assert "tokens/s" not in printed


def test_ctrl_c_ends_every_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    started = []

    def interrupt(self: ArmProcess) -> None:
        started.append(self.process)
        if self.name == "plain":
            raise KeyboardInterrupt

    monkeypatch.setattr(ArmProcess, "wait_until_ready", interrupt)
    monkeypatch.setattr(
        ArmProcess, "ask", lambda self, action, groups, path: torch.save({"w": torch.ones(1)}, path) or {"loss": 0.0}
    )
    assert main(SMALL) == 130
    assert len(started) == 2
    assert all(process.poll() is not None for process in started)
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize(("asked", "at_once"), [([], 2), (["--one_at_a_time", "true"], 1)])
def test_arms_that_do_not_fit_beside_each_other_take_turns(
    monkeypatch: pytest.MonkeyPatch, asked: list[str], at_once: int
) -> None:
    alive: list[str] = []
    events: list[tuple[str, str, int]] = []

    class Answering(Silent):
        def __init__(self, name: str, settings: Settings) -> None:
            super().__init__(name, settings)
            alive.append(name)

        def ask(self, action: str, groups: int, path: str | None = None) -> dict:
            events.append((action, self.name, len(alive)))
            if path is None:
                return {**dict.fromkeys(FIGURES, 1.0), "arm": self.name, "groups": groups, "tokens": 9}
            torch.save({"w": torch.ones(1)}, path)
            return {"loss": 0.0}

        def close(self) -> None:
            alive.remove(self.name)

    monkeypatch.setattr(rounds, "ArmProcess", Answering)
    assert main([*SMALL, *asked]) == 0
    assert alive == []
    assert max(count for *_, count in events) == at_once
    assert [name for action, name, _ in events if action == "measure"] == ["ours", "plain"] * 2
    # No process is timed in its first step.
    assert [action for action, *_ in events].count("verify") == (2 if at_once == 2 else 6)


def test_what_a_worker_refuses_is_told(settings: Settings, tmp_path: Path) -> None:
    # Accepted by the command for ours, but the plain learner makes no gradient of an entropy bonus.
    settings.recipe = tmp_path / "bonus.yaml"
    settings.recipe.write_text("model: {objective: {entropy_coefficient: 0.1}}\n")
    process = ArmProcess("plain", settings)
    try:
        with pytest.raises(ArmError, match="`recipe` expected no entropy bonus"):
            process.wait_until_ready()
        with pytest.raises(ArmError, match="ended with status 2"):
            process.ask("measure", groups=1)
    finally:
        process.close()


def test_an_absent_peer_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(rounds.importlib.util, "find_spec", lambda name: None)
    assert main([*SMALL[:-3], "--arms", "trl"]) == 1  # nothing was measured
    assert "trl: left out, it is not installed" in capsys.readouterr().out


NAN = float("nan")


@pytest.mark.parametrize(
    ("precision", "loss", "scale", "said"),
    [
        ("float32", 0.0, 1.001, "expected the same gradient to 1e-05 and loss to 1e-05 in float32, but got 1.0e-03"),
        ("bf16", 0.0, 1.06, "expected the same gradient to 0.05 and loss to 0.01 in bfloat16, but got 6.0e-02"),
        ("bf16", 0.02, 1.0, "in bfloat16, but got 0.0e+00 and 2.0e-02"),
        ("bf16", 0.0, NAN, "expected a finite loss and gradient, but got 0 and one of norm nan from ours"),
        ("float32", 0.0, NAN, "expected a finite loss and gradient, but got 0 and one of norm nan from ours"),
        ("float32", float("inf"), 1.0, "but got inf and one of norm 5 from ours"),
        ("bf16", 0.009, 1.04, None),
    ],
)
def test_gradients_that_differ_stop_the_run(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    precision: str,
    loss: float,
    scale: float,
    said: str | None,
) -> None:
    timed = []

    class Answering(Silent):
        def ask(self, action: str, groups: int, path: str | None = None) -> dict:
            if path is None:
                timed.append(self.name)
                return {**dict.fromkeys(FIGURES, 1.0), "arm": self.name, "groups": groups, "tokens": 9}
            torch.save({"w": (scale if self.name == "ours" else 1.0) * torch.tensor([3.0, 4.0])}, path)
            return {"loss": loss if self.name == "ours" else 0.0}

    monkeypatch.setattr(rounds, "ArmProcess", Answering)
    status = main([*SMALL, "--rounds", "1", "--precision", precision])
    assert (status, timed) == ((0, ["ours", "plain"]) if said is None else (2, []))
    assert (said or "") in " ".join(capsys.readouterr().err.split())


def test_distance_by_hand(tmp_path: Path) -> None:
    # |(1, 2, 2)| = 3 apart, |(0, 0, 6)| = 6.
    torch.save({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([8.0])}, tmp_path / "a.pt")
    torch.save({"a": torch.tensor([0.0, 0.0]), "b": torch.tensor([6.0])}, tmp_path / "b.pt")
    assert gradient_distance(tmp_path / "a.pt", tmp_path / "b.pt") == pytest.approx(0.5)
    torch.save({"a": torch.zeros(2), "b": torch.zeros(1)}, tmp_path / "none.pt")
    assert gradient_distance(tmp_path / "a.pt", tmp_path / "none.pt") == float("inf")


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    assert main(["--rounds", "0"]) == 2
    assert main(["--groups", "4", "0"]) == 2
    assert main(["--recipe", str(tmp_path / "none.yaml")]) == 2
    errors = capsys.readouterr().err.replace("\n", "")
    assert "`rounds`" in errors
    assert "`groups`" in errors
    assert "none.yaml" in errors
    assert "Traceback" not in errors


def test_help_explains(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = RECIPES.parents[1] / "scripts"
    monkeypatch.setattr(sys, "argv", ["benchmark_learner", "--help"])
    monkeypatch.syspath_prepend(str(scripts))  # as Python does for a script
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(scripts / "benchmark_learner"))
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    for word in ("matmul peak", "--groups", "--plain_rows", "Examples"):
        assert word in printed
