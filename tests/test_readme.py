"""README keeps its word: its commands parse, its files exist, its example runs, its metrics and recipes are real."""

import re
import shlex
from pathlib import Path

import pytest

from grpo_lit.cli import run

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
COMMANDS = [
    line.split("#")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    if line.strip()
]
FITS = [c for c in COMMANDS if re.match(r"(grpo-lit fit|scripts/quickstart) -", c) and "--help" not in c]


def test_readme_is_short_enough_and_has_no_gap() -> None:
    assert len(README.splitlines()) < 300
    assert "<!--" not in README


@pytest.mark.parametrize("command", FITS)
def test_every_training_command_parses(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(ROOT)
    quickstart = ["--config", "configs/base.yaml", "--config", "configs/quickstart.yaml"]
    words = shlex.split(command.removeprefix("grpo-lit fit").removeprefix("scripts/quickstart"))
    with pytest.raises(SystemExit) as stop:
        run(["fit", *(quickstart if "quickstart" in command.split(" -")[0] else []), *words, "--print_config"])
    assert stop.value.code == 0
    assert "prompts_per_rollout" in capsys.readouterr().out


def test_every_other_command_names_something_that_exists() -> None:
    rest = [command for command in COMMANDS if command not in FITS]
    assert rest
    programs = ("source", "tensorboard", "grpo-lit", "scripts/", "bash scripts/quickstart", "bash scripts/test")
    assert all(command.startswith(programs) for command in rest)
    assert "python scripts" not in README


def test_every_file_that_is_named_exists() -> None:
    named = set(re.findall(r"(?:configs|scripts|tests|grpo_lit)/[\w./]+\w", README))
    assert {"configs/base.yaml", "scripts/quickstart", "scripts/figures/quickstart.png"} <= named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_every_recipe_overlay_and_strategy_has_a_row() -> None:
    for kind in ("recipe", "rollout", "callback"):
        for file in (ROOT / "configs" / kind).glob("*.yaml"):
            assert f"`{file.stem}`" in README, file
    for file in (ROOT / "configs" / "model").glob("*.yaml"):
        assert file.name in README, file
    for file in (ROOT / "configs" / "strategy").glob("*.yaml"):
        assert f"`configs/strategy/{file.name}`" in README, file


def test_the_example_of_a_new_part_is_a_working_one() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict = {"__name__": "my_parts"}
    exec(example, names)
    assert names["SquaredRatio"](scale=2.0).scale == 2.0
