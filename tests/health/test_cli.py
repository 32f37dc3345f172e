"""``scripts/diagnose`` says what was wrong with a finished run."""

import json
import os
import re
from pathlib import Path

import pytest
import yaml
from synthetic import SICK, Run, healthy
from torch.utils.tensorboard import SummaryWriter

from grpo_lit.health import Rules, diagnose
from grpo_lit.health.cli import main

ROOT = Path(__file__).parents[2]


def written(run: Run, folder: Path) -> Path:
    with SummaryWriter(folder / "version_0") as writer:
        for name, (steps, values) in run.items():
            for step, value in zip(steps, values, strict=True):
                writer.add_scalar(name, value, step)
    return folder


@pytest.fixture(scope="module")
def sick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(SICK["entropy falls"][2](healthy(0)), tmp_path_factory.mktemp("sick"))


def test_a_healthy_run(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main([str(written(healthy(0), tmp_path))]) == 0
    assert capsys.readouterr().out.startswith("healthy: 13 rules found nothing in 160 steps")


def test_a_run_of_one_step_is_no_proof_of_health(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main([str(written({"reward/correct": ([0], [0.5]), "val/a/greedy": ([0], [0.1])}, tmp_path))]) == 0
    assert re.search(r"nothing in 1 steps of .*\n  which says little", capsys.readouterr().out)


def test_a_run_without_a_step_is_neither_healthy_nor_sick(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main([str(written({"val/a/greedy": ([0], [0.1])}, tmp_path))]) == 2
    told = capsys.readouterr()
    assert re.search(r"error: `run` expected steps, but .* has made none yet", told.err)
    assert not told.out


@pytest.mark.parametrize("columns", [80, 200])
def test_a_sick_run_in_a_table(
    columns: int, sick: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main([str(sick)]) == 1
    out = capsys.readouterr().out
    assert "entropy collapse" in out
    assert "callbacks.EntropyTarget" in out
    keys = re.findall(r"[`/][\w./]+|callbacks\.\w+", " ".join(check for rule in Rules().all() for check in rule.checks))
    assert max(map(len, keys)) < 40  # so that none is broken in a terminal of 80 columns
    assert "…" not in out


def test_a_sick_run_as_json(sick: Path, capsys: pytest.CaptureFixture) -> None:
    assert main([str(sick), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    (event,) = diagnose(SICK["entropy falls"][2](healthy(0)), Rules().active())
    assert told == {"run": str(sick), "steps": 160, "healthy": False, "events": [event.as_dict()]}


def test_thresholds_come_from_the_run_and_the_command_line_has_the_last_word(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run = written(SICK["entropy falls"][2](healthy(0)), tmp_path)
    rules = {"entropy_collapse": {"low": 0.001}, "off": ["truncation"]}
    health = {"class_path": "callbacks.Health", "init_args": {"rules": rules}}
    config = tmp_path / "version_0" / "config.yaml"
    config.write_text(yaml.safe_dump({"trainer": {"callbacks": [{"class_path": "callbacks.Console"}, health]}}))
    assert main([str(run)]) == 0
    assert "12 rules" in capsys.readouterr().out
    assert main([str(run), "--rules.entropy_collapse.low", "0.1"]) == 1
    assert main([str(run), "--rules.off", "[entropy_collapse]"]) == 0
    config.write_text(yaml.safe_dump({"trainer": {"callbacks": None}}))
    assert main([str(run)]) == 1


def test_what_cannot_be_read_is_refused(tmp_path: Path, sick: Path, capsys: pytest.CaptureFixture) -> None:
    assert main([str(tmp_path / "nowhere")]) == 2
    assert main([str(sick), "--rules.off", "[sleep]"]) == 2
    assert "sleep" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main([str(sick), "--rules.entropy_collapse.low", "small"])
    assert stop.value.code == 2


def test_the_script_can_be_run() -> None:
    assert os.access(ROOT / "scripts/diagnose", os.X_OK)
