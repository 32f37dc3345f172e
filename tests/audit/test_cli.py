import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_lit.audit.cli import main
from grpo_lit.rewards import NumericMatch

REPO = Path(__file__).parents[2]
SHARED = Path(os.environ.get("GRPO_LIT_SHARED_DATA", REPO.parent / "shared/data"))
SOLUTIONS = SHARED / "verifier/gsm8k_solutions.jsonl"


@pytest.fixture
def file(tmp_path):
    rows = [("7", True), ("It is [7].", True), ("8", False), ("seven", True), ("7", False)]
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "\n".join(json.dumps({"question": "3 + 4", "gold": "7", "completion": t, "correct": c}) for t, c in rows)
    )
    return str(path)


def test_mistakes_are_shown_written_and_told_by_the_status(file, tmp_path, capsys):
    found, table = tmp_path / "found.json", tmp_path / "found.csv"
    assert main([file, "--reward=NumericMatch", f"--json={found}", f"--csv={table}"]) == 1
    shown = capsys.readouterr().out
    assert "NumericMatch on rows.jsonl" in shown
    assert "Offending rows (2 of 2)" in shown
    [document] = json.loads(found.read_text())
    assert document["summary"]["rows"] == 5
    assert document["summary"]["false positives"] == document["summary"]["false negatives"] == 1
    assert [(f["kind"], f["row"]) for f in document["findings"]] == [("false negative", "4"), ("false positive", "5")]
    with table.open() as lines:
        assert [row["completion"] for row in csv.DictReader(lines)] == ["seven", "7"]


def test_how_many_mistakes_are_allowed(file):
    assert main([file, "--reward=NumericMatch", "--max_errors=2"]) == 0
    assert main([file, "--reward=NumericMatch", "--max_errors=1"]) == 1


def test_hollow_completions_can_fail_a_run(file, capsys):
    # A question that is itself an expression equals its answer: the one hole that mathematical equivalence has.
    assert main([file, "--reward=MathEquivalence", "--max_errors=9"]) == 0
    assert main([file, "--reward=MathEquivalence", "--max_errors=9", "--max_hollow=0"]) == 1
    assert r"\boxed{3 + 4}" in capsys.readouterr().out
    assert main([file, "--reward=NumericMatch", "--reward.extract=boxed", "--max_errors=9", "--max_hollow=0"]) == 0


@pytest.mark.parametrize(("options", "status"), [([], 1), (["--fields.answer=missing"], 2)])
def test_the_reward_is_closed_however_the_audit_ends(file, options, status, monkeypatch):
    closed = []
    monkeypatch.setattr(NumericMatch, "close", lambda self: closed.append(self))
    assert main([file, "--reward=NumericMatch", *options]) == status
    assert len(closed) == 1


def test_a_yaml_file_names_the_reward_and_its_arguments(file, tmp_path):
    config = tmp_path / "reward.yaml"
    config.write_text(
        "reward:\n  class_path: grpo_lit.rewards.NumericMatch\n  init_args:\n    extract: boxed\nmax_errors: 9\n"
    )
    found = tmp_path / "found.json"
    assert main([file, f"--config={config}", f"--json={found}"]) == 0
    assert json.loads(found.read_text())[0]["summary"]["false negatives"] == 3  # no box anywhere


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--fields.answer=answer"], "`fields.answer` expected a field of the rows, but got 'answer'"),
        (["--fields.label=gold"], "`fields.label` expected true or false, but got '7'"),
    ],
)
def test_a_setting_that_cannot_be_used_ends_with_status_2(file, options, message, capsys):
    assert main([file, "--reward=NumericMatch", *options]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_the_script_explains_itself():
    script = REPO / "scripts/audit_verifier"
    assert os.access(script, os.X_OK)
    done = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0
    for word in ("--reward MathEquivalence --reward.extract last_number", "--max_errors", "false positives", "Exit"):
        assert word in done.stdout


@pytest.mark.skipif(not SOLUTIONS.is_file(), reason="shared data absent")
def test_1600_real_solutions_are_judged_without_a_mistake(tmp_path):
    found = tmp_path / "found.json"
    options = ["--reward=MathEquivalence", "--reward.extract=last_number", f"--json={found}", "--max_hollow=0"]
    assert main([str(SOLUTIONS), *options]) == 0
    summary = json.loads(found.read_text())[0]["summary"]
    assert (summary["rows"], summary["labelled correct"]) == (1600, 603)
    assert {summary[kind] for kind in ("false positives", "false negatives", "errors", "abstentions")} == {0}
