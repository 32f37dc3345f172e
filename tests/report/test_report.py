"""The page: everything a run left, nothing that it wrote taken for markup, and no word from elsewhere."""

import json
import os
import re
import shutil
import stat
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from grpo_lit.errors import ConfigError
from grpo_lit.report.cli import main
from grpo_lit.report.health import episodes, marks
from grpo_lit.report.page import differing
from grpo_lit.report.record import flattened, names_of, read_jsonl, read_run, read_runs
from grpo_lit.report.samples import COMPLETIONS, GROUPS, STEPS, shown

HOSTILE = "</pre></details><script>alert(1)</script><img src=x onerror=alert(1)>{{ 7 * 7 }}\ud800\x00\u202e\u2028&amp;"
ALLOWED = (
    *("html", "head", "meta", "title", "style", "body", "h1", "h2", "div", "span", "bdi", "p", "code", "strong", "br"),
    *("table", "tr", "th", "td", "figure", "figcaption", "ol", "ul", "li", "details", "summary", "pre"),
    *("svg", "defs", "g", "path", "use", "text", "clippath", "rect"),
)


class Reader(HTMLParser):
    """Notes tags, attributes and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.add(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += f"{data} "


def event(step: int, rule: str = "entropy_collapse", **more: object) -> dict:
    return {"step": step, "rule": rule, "metric": "m", "symptom": f"symptom {step}", "causes": ["a", "b"], **more}


def fill(folder: Path, text: str = "42", seed: int = 0) -> None:
    config = {"seed_everything": seed, "trainer": {"max_steps": 40}, "data": {"val": {"sums": {"init_args": {}}}}}
    (folder / "config.yaml").write_text(yaml.safe_dump({**config, "note": text.replace("\x00", "")}))
    noted = {"versions": {"torch": "2.13", "python": text}, "held_out_prompts": {"sums": 200}}
    (folder / "versions.json").write_text(json.dumps(noted))
    (folder / "health.jsonl").write_text(
        "".join(json.dumps(event(step, advice=[text, "x"]) | {"symptom": text}) + "\n" for step in (1, 2)) + "{broken\n"
    )
    completion = {"text": text, "reward": 1.0, "correct": True, "advantage": 0.5, "finish_reason": "length"}
    groups = [{"step": s, "prompt": text, "completions": [completion, {"text": None}, 3]} for s in range(3)]
    (folder / "samples.jsonl").write_text("".join(json.dumps(group) + "\n" for group in groups))


def report(*arguments: object) -> Reader:
    assert main([str(argument) for argument in arguments]) == 0
    page = Path(arguments[arguments.index("--out") + 1])
    assert page.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    return Reader(page.read_text(encoding="utf-8"))


def test_one_run(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(run)
    read = report(run, "--out", tmp_path / "report.html")
    text = " ".join(read.text.split())
    for expected in (
        "plain/version_0 3 of 40 400 3 steps in 30 s, 90.0% in rollouts and learning",
        # 150 of 200 by Wilson: 68.6 % to 80.5 %.
        "val/sums/greedy 25.0% at step 0 75.0% at step 3 +50.0 points 68.6% to 80.5% 75.0% at step 3",
        "1 entropy collapse step 1 to 2, 2 times",
        "unreadable lines of health.jsonl that are left out: 1",
        "correct, reward 1, advantage 0.5, cut off 42",
        "torch 2.13",
        "max_steps: 40",
        "Constant: system/time_learn 3",
    ):
        assert expected in text
    assert "val/sums/greedy: 25.0% at step 0" in capsys.readouterr().out


def test_runs_are_overlaid_and_compared(run: Path, write: Callable, tmp_path: Path) -> None:
    other = write("other/version_0", {"val/sums/greedy": {0: 0.0, 2: 0.5}, "reward/correct": {0: 0.5, 1: 0.25}})
    fill(run)
    fill(other, seed=1)
    read = report(run, other, "--out", tmp_path / "report.html")
    text = " ".join(read.text.split())
    assert "val/sums/greedy at step 2, the largest that all runs reached" in text
    assert "plain 50.0%, other 50.0%" in text
    assert "Settings that differ: key plain other seed_everything 0 1" in text
    assert len(set(re.findall(r"background: (#\w+)", " ".join(value for _, value in read.attributes if value)))) == 2


def test_what_a_model_writes_is_text(run: Path, tmp_path: Path) -> None:
    hostile = run.with_name("<b>run")
    shutil.move(run, hostile)
    fill(hostile, HOSTILE)
    read = report(hostile, "--out", tmp_path / "report.html", "--title", "<i>title")
    assert read.tags <= set(ALLOWED)
    assert not [name for name, _ in read.attributes if name.startswith("on") or name == "src"]
    assert read.text.count("<script>alert(1)</script>") >= 5  # symptom, advice, prompt, completion, configuration
    assert "{{ 7 * 7 }}" in read.text
    assert "<i>title" in read.text


def test_the_page_is_one_file_without_scripts(run: Path, tmp_path: Path) -> None:
    fill(run)
    read = report(run, "--out", tmp_path / "report.html")
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in read.attributes
    links = [value for name, value in read.attributes if name.endswith("href")]
    assert all(value.startswith("#") for value in links)
    ids = {value for name, value in read.attributes if name == "id"}
    assert {value[1:] for value in links} <= ids
    page = (tmp_path / "report.html").read_text()
    assert set(re.findall(r"https?://[^\s\"'<>]+", page)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert "prefers-color-scheme: dark" in page
    assert ("content", "width=device-width, initial-scale=1") in read.attributes


def test_a_run_that_wrote_events_only(run: Path, tmp_path: Path) -> None:
    text = " ".join(report(run, "--over", "system/tokens_sampled", "--out", tmp_path / "r.html").text.split())
    for said in ("has no health.jsonl", "No run has a samples.jsonl", "has no config.yaml", "were not recorded"):
        assert said in text


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["nowhere"], "nowhere"),
        (["plain", "plain/version_0"], "twice"),
        (["plain", "--out", "page.txt"], "page.txt"),
        (["plain", "--out", "no/folder/page.html"], "no/folder/page.html"),
        (["plain", "--over", "no/metric"], "no/metric"),
    ],
)
def test_mistakes(
    arguments: list[str], word: str, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run.parents[1])
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert word in capsys.readouterr().err


def test_broken_files_are_left_out_and_counted(run: Path) -> None:
    text = '{"step": 0}\nnull\n[1]\n\n{"a": "b\u2028c"}\n' + "[" * 100_000 + "\n"
    (run / "samples.jsonl").write_text(text)
    (run / "config.yaml").write_text("a: [unclosed")
    (run / "versions.json").write_bytes(b"\xff\xfe")
    read = read_run(run, "x")
    assert read.samples == [{"step": 0}, {"a": "b\u2028c"}]
    assert read.unreadable == {"samples.jsonl": 2}
    assert (read.settings(), read.versions, read.held_out_prompts) == ({}, {}, {})
    assert read_jsonl(run / "missing.jsonl") == ([], 0)


def test_the_number_of_held_out_prompts_of_older_runs_is_in_their_configuration(run: Path) -> None:
    (run / "config.yaml").write_text("data: {val: {sums: {init_args: {size: 7}}, other: {init_args: {}}}}")
    assert read_run(run, "x").held_out_prompts == {"sums": 7}


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (["runs/a/version_0"], ["a/version_0"]),
        (["runs/a/version_0", "runs/b/version_0"], ["a", "b"]),
        (["runs/a/version_0", "runs/a/version_1"], ["version_0", "version_1"]),
        (["runs/a/version_0", "runs/b/version_1"], ["a/version_0", "b/version_1"]),
        (["runs/a", "runs/a/a"], ["a", "a/a"]),
    ],
)
def test_runs_are_named_by_what_tells_them_apart(folders: list[str], names: list[str]) -> None:
    assert names_of([Path(folder) for folder in folders]) == names


def test_a_run_that_did_not_watch_itself_is_diagnosed(write: Callable) -> None:
    folder = write("run", {"exploration/entropy": dict.fromkeys(range(20), 0.01), "reward/total": {0: 0.5}})
    read = read_run(folder, "x")
    assert not read.watched
    assert "entropy_collapse" in [found["rule"] for found in read.health]
    assert episodes([read])[0].lists[0][0] == "likely causes"
    (folder / "health.jsonl").touch()
    assert (read_run(folder, "x").watched, read_run(folder, "x").health) == (True, [])


def test_a_run_is_named_once(run: Path) -> None:
    with pytest.raises(ConfigError, match="twice"):
        read_runs([run, run / "../version_0"])


def test_events_of_one_rule_are_one_episode(run: Path) -> None:
    rows = [event(30), event(2), event(31), event(31, "other_rule"), {"rule": "no step"}, event(2, metric="n")]
    (run / "health.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    runs = read_runs([run])
    found = episodes(runs)
    assert [(e.number, e.rule, e.when) for e in found] == [
        (1, "entropy collapse", "step 2 to 31, 3 times"),
        (2, "entropy collapse", "step 2"),
        (3, "other rule", "step 31"),
    ]
    assert found[0].lists == [("likely causes", ["a", "b"])]
    # The axis ends at 3: marks at 2 and 31, and the two at 2 share one.
    assert [(mark.x, mark.text) for mark in marks(runs, found, None)] == [(2.0, "1,2"), (31.0, "3")]
    # Over tokens, a step stands where its rollout had brought the count.
    assert [mark.x for mark in marks(runs, found, "system/tokens_sampled")] == [400.0]


def test_a_page_shows_some_samples_of_the_whole_run(run: Path) -> None:
    completion = {"text": "x" * 9000, "correct": False, "reward": None}
    rows = [
        {"step": step, "prompt": f"p/{i}", "question": "?", "answer": 5, "completions": [completion] * 20}
        for step in range(0, 400, 20)
        for i in range(6)
    ]
    (run / "samples.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    made = shown(read_run(run, "x"))
    steps = sorted({group["step"] for group in made["groups"]})
    assert len(steps) == STEPS
    assert (steps[0], steps[-1]) == (0, 380)
    assert made["shown"] == f"{STEPS * GROUPS} of 120 prompts"
    group = made["groups"][0]
    assert (group["prompt"], group["about"]) == ("?", "p/0, answer 5")
    assert group["more"] == f"and {20 - COMPLETIONS} more completions"
    assert group["completions"][0]["figures"] == "wrong, reward unknown"
    assert len(group["completions"][0]["text"]) < 6000


def test_settings_that_differ() -> None:
    one, two = dict(flattened({"a": {"b": 1, "c": []}, "d": [{"e": 1}]})), {"a.b": "2", "a.c": "[]"}
    assert one == {"a.b": "1", "a.c": "[]", "d.0.e": "1"}
    assert differing([one, two]) == [("a.b", ["1", "2"]), ("d.0.e", ["1", "–"])]


@pytest.mark.parametrize("script", ["report", "curves"])
def test_the_commands_can_be_run(script: str) -> None:
    assert os.stat(Path(__file__).parents[2] / "scripts" / script).st_mode & stat.S_IXUSR
