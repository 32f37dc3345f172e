"""Whole runs of validate, test and predict: names, intervals, files, interruption, and two processes as one."""

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from heldout_run import evaluate
from lightning.pytorch import Trainer
from toys import Letters

from callbacks import Console
from grpo_lit.data.evaluation import Evaluation
from grpo_lit.metrics.evaluation import majority
from grpo_lit.rollout import Completion, Request, Sampling
from grpo_lit.rollouts.transformers import TransformersEngine

NAMES = {"greedy", "avg@4", "pass@2", "pass@4", "maj@4"}
SHAPE = {"length", "truncated", "reward_format", "length@4", "truncated@4", "reward_format@4"}


def metrics(folder: Path) -> dict[str, float]:
    with (folder / "metrics.csv").open() as file:
        (row,) = csv.DictReader(file)
    return {name: float(value) for name, value in row.items() if name.startswith("val/")}


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_validate_measures_what_predict_writes(tmp_path: Path, tiny_model_path: Path) -> None:
    evaluate(str(tiny_model_path), str(tmp_path), devices=1)
    logged, written = metrics(tmp_path), rows(tmp_path / "predictions.jsonl")
    assert [(row["set"], row["index"]) for row in written] == [*(("many", i) for i in range(5)), ("alone", 0)]
    assert set(logged) == {
        f"val/{name}/{figure}{end}"
        for name in ("many", "alone")
        for figure in NAMES | SHAPE
        for end in ("", "/ci_low", "/ci_high")
    }
    assert all(
        logged[f"{n}/ci_low"] <= v <= logged[f"{n}/ci_high"]
        for n, v in logged.items()
        if not n.endswith(("/ci_low", "/ci_high"))
    )
    many = [row["completions"] for row in written if row["set"] == "many"]
    assert [[c["greedy"] for c in completions] for completions in many] == [[True, *[False] * 4]] * 5
    sampled = [completions[1:] for completions in many]
    expected = {
        "greedy": fmean(c[0]["correct"] for c in many),
        "avg@4": fmean(c["correct"] for group in sampled for c in group),
        "pass@4": fmean(any(c["correct"] for c in group) for group in sampled),
        "maj@4": fmean(
            majority([c["text"].strip() or None for c in group], [c["correct"] for c in group]) for group in sampled
        ),
        "length": fmean(c[0]["tokens"] for c in many),
        "truncated@4": fmean(c["finish_reason"] == "length" for group in sampled for c in group),
        "reward_format@4": fmean(c["rewards"]["format"] for group in sampled for c in group),
    }
    assert {name: logged[f"val/many/{name}"] for name in expected} == pytest.approx(expected)
    assert 0 < expected["avg@4"] < 1  # or nothing is told apart
    assert all(c["correct"] == (c["rewards"]["even"] >= 0.5) for group in many for c in group)


def test_the_console_has_intervals_outside_of_training_and_curves_have_none(
    make_module: Callable, make_data: Callable, make_trainer: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    def told(run: Callable[[Trainer], Any]) -> list[str]:
        caplog.clear()
        run(trainer := make_trainer(max_steps=1, callbacks=[Console()]))
        ends = {name for name in trainer.callback_metrics if name.endswith(("/ci_low", "/ci_high"))}
        assert bool(ends) == (trainer.state.fn != "fit")
        return [message for message in caplog.messages if message.startswith("step 0: val/letters/greedy")]

    data = {"val": {"letters": Letters(4, heldout=True)}}
    for name in ("validate", "test"):
        (line,) = told(
            lambda t, name=name: getattr(t, name)(make_module(), datamodule=make_data(**data), verbose=False)
        )
        assert line.count("[") == 4  # greedy, avg@2, pass@2, maj@2
    (line,) = told(lambda t: t.fit(make_module(), datamodule=make_data(**data)))
    assert "[" not in line
    assert "val/letters/maj@2" in line


class Interrupted(TransformersEngine):
    """Answers two calls, and is interrupted in the third."""

    calls = 0

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        self.calls += 1
        if self.calls > 2:
            raise KeyboardInterrupt
        return super().generate(requests, sampling)


def test_what_was_answered_before_ctrl_c_is_kept(
    make_module: Callable, make_data: Callable, make_trainer: Callable, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    file = tmp_path / "mine" / "answers.jsonl"
    data = make_data(
        engine=Interrupted(device="cpu"),
        val={"letters": Letters(5, heldout=True)},
        evaluation=Evaluation(prompts_per_batch=2, predictions=str(file)),
    )
    with pytest.raises(SystemExit):
        make_trainer().predict(make_module(), datamodule=data)
    assert [row["id"] for row in rows(Path(f"{file}.part"))] == [f"letters/{i}" for i in range(4)]
    assert f"interrupted: answers to the first 4 prompts are in {file}.part" in caplog.messages
    assert not file.exists()
