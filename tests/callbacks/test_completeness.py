"""Every callback and schedule is explained, found by its name, and has a row in README."""

import inspect
import re
from pathlib import Path

import pytest
from lightning.pytorch import Callback

import callbacks
from grpo_lit.cli import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PARTS = [
    part
    for name in callbacks.__all__
    if issubclass(part := getattr(callbacks, name), Callback | callbacks.Schedule) and not inspect.isabstract(part)
]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_a_part_describes_every_argument_and_has_a_row(part: type) -> None:
    assert f"{part.__name__}`" in README
    if part is callbacks.ModelCheckpoint:
        return  # its arguments are Lightning's
    for name in list(inspect.signature(part).parameters):
        assert re.search(rf"\n\s+{name}: ", part.__doc__ or ""), name


def test_help_lists_the_callbacks_and_explains_each(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fit", "--config", str(ROOT / "configs" / "base.yaml"), "--help"])
    text = capsys.readouterr().out
    assert [part for part in PARTS if issubclass(part, Callback) and f"callbacks.{part.__name__}" not in text] == []
    with pytest.raises(SystemExit):
        main(["fit", "--trainer.callbacks.help", "callbacks.ClipSchedule"])
    text = capsys.readouterr().out
    assert "the upper bound" in text.lower()
    assert "EntropyLoop" in text
