"""The picture of a run, and the figures printed with it, come from its event files."""

from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_lit.curves import main
from grpo_lit.report.cli import main as report


def test_figures_and_picture(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "curves.png"
    main([str(run), str(picture)])
    out = capsys.readouterr().out
    assert "val/sums/greedy: 25.0% at step 0, 50.0% at step 2, 75.0% at step 3" in out
    assert "3 steps in 30 s, 90.0% in rollouts and learning" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_several_runs_over_what_they_have_sampled(
    run: Path, write: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = {"system/tokens_sampled": {0: 300.0, 1: 350.0}}
    other = write("other/version_0", tokens | {"val/sums/greedy": {0: 0.0, 1: 0.6, 2: 0.7}})
    picture = tmp_path / "curves.svg"
    main([str(run), str(other), str(picture), "--over", "system/tokens_sampled", "--title", "two"])
    lines = capsys.readouterr().out.splitlines()
    assert "plain: val/sums/greedy (over system/tokens_sampled): 25.0% at 0, 50.0% at 250, 75.0% at 400" in lines
    # 350 tokens are two thirds of the way from 250 (50 %) to 400 (75 %).
    assert lines[-1] == f"wrote {picture}"
    assert lines[-2] == (
        "val/sums/greedy at system/tokens_sampled = 350, the largest that all runs reached, linear between "
        "measurements: plain 66.7%, other 70.0%"
    )
    assert "<svg" in picture.read_text()


def test_a_run_of_one_step_has_no_curves_yet_but_a_page(
    write: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    young = write("young/version_0", {"reward/total": {0: 0.5}, "length/mean": {0: 4.0}})
    with pytest.raises(SystemExit) as stop:
        main([str(young), str(tmp_path / "curves.png")])
    assert stop.value.code == 2
    assert "at least two steps" in capsys.readouterr().err
    assert report([str(young), "--out", str(tmp_path / "page.html")]) == 0
    assert "a picture takes two steps" in capsys.readouterr().out
    assert "length/mean" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["{tmp}", "x.png"], "TensorBoard events"),
        (["{run}", "x.txt"], "x.txt"),
        (["{run}", "x.png", "--over", "reward/none"], "reward/none"),
    ],
)
def test_mistakes(
    arguments: list[str], word: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit) as stop:
        main([argument.format(tmp=tmp_path / "empty", run=run) for argument in arguments])
    assert stop.value.code == 2
    assert word in capsys.readouterr().err
