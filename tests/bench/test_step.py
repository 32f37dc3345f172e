"""Whole steps: figures by hand, and a real run of a tiny model."""

import json
from pathlib import Path

import pytest
import yaml
from overlay import tiny_overlay
from rich.console import Console

from grpo_lit.bench import step
from grpo_lit.bench.step import main, steps_of, table
from grpo_lit.errors import ConfigError

SCALARS = {
    "system/time_step": ([0, 1, 2], [50.0, 10.0, 2.0]),
    "system/time_rollout": ([0, 1], [40.0, 6.0]),  # the third step is a later update
    "system/time_learn": ([0, 1, 2], [8.0, 3.0, 1.5]),
    "system/time_sync": ([0, 1], [1.0, 0.5]),
    "system/tokens_sampled": ([0, 1], [100.0, 340.0]),
    "system/learner_tokens_per_s": ([0, 1, 2], [5.0, 40.0, 60.0]),
    "system/memory_learn": ([0, 1, 2], [1.0, 2.0, 1.5]),
    "system/memory_engine": ([0, 1], [3.0, 3.5]),
}


def test_figures_by_hand() -> None:
    second, third = steps_of("base", SCALARS)
    assert second.shares == {"rollout": 0.6, "learn": 0.3, "sync": 0.05}
    assert (second.seconds, second.sampled, second.trained) == (10.0, 240.0, 120.0)
    assert (third.sampled, third.trained, third.shares["rollout"]) == (0.0, 90.0, 0.0)
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table([second, third]))
    row = console.export_text().splitlines()[-2].split()
    # 12 s of wall time: 6 + 0, 3 + 1.5 and 0.5 + 0 of it, 240 tokens sampled, 210 trained on.
    assert row == ["base", "6.00", "50.0%", "37.5%", "4.2%", "87.5%", "20", "18", "2.00", "3.50"]


def test_of_rollouts_drawn_meanwhile_only_the_wait_counts() -> None:
    waited = {"system/time_wait_rollout": ([0, 1], [9.0, 2.0])}
    # 6 s of the thread's and 3 s of the learner's in a step of 6 s, of which the learner waited for 2.
    scalars = SCALARS | waited | {"system/time_step": ([0, 1], [50.0, 6.0])}
    (second,) = steps_of("async", scalars)
    assert second.shares["rollout"] == pytest.approx(2 / 6)
    assert second.shares["rollout"] + second.shares["learn"] == pytest.approx(5 / 6)


def test_a_file_in_no_folder_is_refused_before_any_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(step, "measured", lambda *args: pytest.fail("a run was made"))
    assert main(["--json", str(tmp_path / "none" / "a.json")]) == 2
    assert "`json` expected a file in a folder that exists" in capsys.readouterr().err


def test_a_rollout_after_a_later_update_counts_its_own_tokens() -> None:
    scalars = {"system/time_step": ([0, 1, 2], [1.0] * 3), "system/tokens_sampled": ([0, 2], [100.0, 250.0])}
    assert [made.sampled for made in steps_of("base", scalars)] == [0.0, 150.0]


def test_a_run_of_warm_up_alone_measures_nothing() -> None:
    with pytest.raises(ConfigError, match="`steps` expected a run of more than 1"):
        list(steps_of("base", {"system/time_step": ([0], [1.0])}))


def test_steps_of_a_real_run(
    tmp_path: Path, tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{root}:{root / 'tests/helpers'}")
    file, out = tmp_path / "tiny.yaml", tmp_path / "steps.json"
    file.write_text(yaml.safe_dump(tiny_overlay(tiny_model_path, val={})))
    assert main(["--config", str(root / "configs/base.yaml"), str(file), "--steps", "3", "--json", str(out)]) == 0
    steps = json.loads(out.read_text())
    assert len(steps) == 2
    for made in steps:
        assert 0 < made["shares"]["learn"] + made["shares"]["rollout"] < 1
        assert 0 < made["trained"] <= made["sampled"] + 1e-3  # a rate times its time
        assert made["sampled"] <= 4 * 3 * 5
    assert "busy" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [["--steps", "1"], ["--rounds", "0"], ["--config", "absent.yaml"], ["--variant", "a/base.yaml"]]
)
def test_bad_arguments_are_answered_in_a_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert "error:" in capsys.readouterr().err
