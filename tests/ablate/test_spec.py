"""What an ablation is made of, and what it refuses."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_lit.ablate.cells import cells_of
from grpo_lit.ablate.spec import checked_overrides, load_spec, settings_of, slug
from grpo_lit.cli import run
from grpo_lit.errors import ConfigError
from grpo_lit.rollouts.asynchronous import Asynchronous

ROOT = Path(__file__).parents[2]


def test_the_baseline_each_change_alone_and_one_after_the_other(make_spec: Callable) -> None:
    spec = make_spec(overlays={name: {"model": {name: 1}} for name in "abc"})
    alone, together = [("a",), ("b",), ("c",)], [("a", "b"), ("a", "b", "c")]
    assert spec.combinations() == [(), *alone, *together]
    assert [spec.title(c) for c in spec.combinations()][::4] == ["GRPO", "+ a + b"]
    alone_only = make_spec(overlays={name: {"model": {name: 1}} for name in "abc"}, together=False)
    assert alone_only.combinations() == [(), *alone]
    cells = cells_of(spec, [])
    assert [cell.seed for cell in cells] == [0] * 6 + [1] * 6  # a whole table for the first seed first


def test_the_command_of_a_run(make_spec: Callable) -> None:
    spec = make_spec()
    cell = next(cell for cell in cells_of(spec, ["--model.z", "3"]) if len(cell.combination) == 2 and cell.seed == 1)
    configs = [cell.arguments[i + 1] for i, word in enumerate(cell.arguments) if word == "--config"]
    assert configs == [
        "base.yaml",
        json.dumps({"trainer": {"max_steps": 2}}),
        json.dumps({"model": {"x": 1}}),
        "over.yaml",
    ]
    assert cell.folder == Path("out/clip-higher+tokens/seed_1")
    words = dict(zip(cell.arguments[::2], cell.arguments[1::2], strict=True))
    assert (words["--model.z"], words["--data.seed"], words["--seed_everything"]) == ("3", "1", "1")
    own = "--trainer.logger.init_args."
    assert [words[own + key] for key in ("save_dir", "name", "version")] == ["out", "clip-higher+tokens", "seed_1"]
    assert "--ckpt_path" not in cell.command()


def test_a_half_done_run_goes_on_from_its_newest_checkpoint(make_spec: Callable) -> None:
    import os

    cell = cells_of(make_spec(), [])[0]
    folder = cell.folder / "checkpoints"
    folder.mkdir(parents=True)
    for age, name in enumerate(("last-v1.ckpt", "last.ckpt", "step=9.ckpt")):
        (folder / name).touch()
        os.utime(folder / name, (age, age))
    (folder / "last-v2.ckpt").symlink_to("deleted.ckpt")
    assert cell.command()[-2:] == ["--ckpt_path", str(folder / "last.ckpt")]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"extra": 1}, ["extra"]),
        ({"together": 1}, ["`together`", "1"]),
        ({"seeds": None}, ["seeds", "expected base"]),
        ({"seeds": []}, ["`seeds`"]),
        ({"seeds": [0, 0]}, ["`seeds`", "distinct"]),
        ({"seeds": ["0"]}, ["`seeds`"]),
        ({"metric": "reward/total"}, ["`metric`", "reward/total"]),
        ({"output": 3}, ["`output`", "3"]),
        ({"base": []}, ["`base`", "none"]),
        ({"base": ["nowhere.yaml"]}, ["`base`", "nowhere.yaml"]),
        ({"base": [3]}, ["`base`", "3"]),
        ({"overlays": {}}, ["`overlays`"]),
        ({"overlays": {"a": "spec.yaml.missing"}}, ["`overlays.a`", "spec.yaml.missing"]),
        ({"overlays": {"a": {}}}, ["`overlays.a`", "{}"]),
        ({"overlays": {"a b": {"x": 1}, "A-B": {"x": 2}}}, ["'A-B'", "'a b'"]),
        ({"overlays": {"baseline": {"x": 1}}}, ["'baseline'"]),
        ({"overlays": {"a": {"data": {"seed": 3}}}}, ["`overlays.a`", "`data.seed`"]),
    ],
)
def test_what_cannot_work_is_refused_by_name(changes: dict[str, Any], words: list[str], make_spec: Callable) -> None:
    with pytest.raises(ConfigError) as error:
        make_spec(**changes)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("text", ["[1", "3", "- a"])
def test_what_is_no_specification_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(text)
    with pytest.raises(ConfigError, match="`spec` expected"):
        load_spec(tmp_path / "spec.yaml")
    with pytest.raises(ConfigError, match=r"`spec` expected a YAML file, but got .*none.yaml"):
        load_spec(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    "word", ["--data.seed=3", "--seed_everything", "--trainer.logger.init_args.name", "--ckpt_path"]
)
def test_overrides_leave_alone_what_each_run_gets_of_its_own(word: str) -> None:
    with pytest.raises(ConfigError, match="each run of an ablation gets its own"):
        checked_overrides([word, "x"])
    assert checked_overrides(["--trainer.max_steps", "3"]) == ["--trainer.max_steps", "3"]


def test_a_run_with_other_settings_is_not_taken_for_this_ones(make_spec: Callable) -> None:
    cell = cells_of(make_spec(), [])[0]
    cell.begin()
    cell.begin()
    Path("base.yaml").write_text("model: {checkpoint: m}  # the same, said otherwise\n")
    cells_of(make_spec(), [])[0].check()
    for change in ("overrides", "file"):
        if change == "file":
            Path("base.yaml").write_text("model: {checkpoint: other}\n")
        with pytest.raises(ConfigError, match="`output` expected runs with these settings"):
            cells_of(make_spec(), ["--x", "1"] if change == "overrides" else [])[0].check()


def test_folders_are_safe_names() -> None:
    assert slug(["../Clip Higher!", "b"]) == "clip-higher+b"


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "configs/ablation").iterdir()))
def test_every_shipped_ablation_begins_with_its_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert load_spec(Path("configs/ablation") / name).output == Path("runs/ablation") / name.removesuffix(".yaml")
    lines = (ROOT / "configs/ablation" / name).read_text().splitlines()
    assert any(line.startswith(f"#   scripts/ablate configs/ablation/{name}") for line in lines[:4])


def test_the_staleness_that_is_compared_is_allowed_and_nothing_else_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    spec = load_spec(Path("configs/ablation/staleness.yaml"))
    base = [settings_of(part).get("data", {}).get("rollout", {}).get("asynchronous", {}) for part in spec.base]
    ahead = {}
    for combination in spec.combinations():
        parts = [settings_of(part) for name in combination for part in spec.overlays[name]]
        changes = [part.get("data", {}).get("rollout", {}).get("asynchronous", {}) for part in parts]
        settings = Asynchronous(**{key: value for part in (*base, *changes) for key, value in part.items()})
        ahead[combination] = (settings.rollouts_ahead(1, 0), settings.stale_old_policy)
    four = dict.fromkeys([(), ("truncated IS",), ("masked IS",)], (4, "learner"))
    assert ahead == four | {("ratio to the sampler",): (4, "sampler"), ("no staleness",): (0, "learner")}


def test_the_shipped_ablation_parses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    spec = load_spec(ROOT / "configs/ablation/quickstart.yaml")
    assert list(spec.overlays) == ["clip-higher", "dynamic sampling", "token-level loss"]
    first = (ROOT / "configs/ablation/quickstart.yaml").read_text().splitlines()[1]
    assert first == "#   scripts/ablate configs/ablation/quickstart.yaml"
    found = []
    cells = cells_of(spec, [])
    for cell in (cells[0], cells[5]):
        with pytest.raises(SystemExit) as stop:
            run(["fit", *cell.arguments, "--print_config"])
        assert stop.value.code == 0
        found.append(yaml.safe_load(capsys.readouterr().out))
    objectives = [config["model"]["objective"]["init_args"] for config in found]
    assert [o["surrogate"]["init_args"]["high"] for o in objectives] == [0.2, 0.28]
    assert [o["reduction"]["class_path"].split(".")[-1] for o in objectives] == ["SequenceMean", "TokenMean"]
    assert [config["data"]["rollout"]["dynamic_sampling"] is None for config in found] == [True, False]
    schedules = {(c["trainer"]["max_steps"], c["model"]["lr_scheduler"]["init_args"]["total_iters"]) for c in found}
    assert schedules == {(20, 20)}
    assert [(c["data"]["num_updates"], c["data"]["prompts_per_rollout"]) for c in found] == [(2, 32), (2, 16)]
    assert {c["data"]["val"]["chain_sum"]["init_args"]["size"] for c in found} == {400}
    name = spec.metric.split("/")[1]
    assert all(name in config["data"]["val"] for config in found)
