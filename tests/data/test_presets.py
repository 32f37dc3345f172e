"""The overlays of configs/data: what they ask for, and that files can stand for the hub with a configuration only."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonargparse import ArgumentParser, Namespace

from grpo_lit import rewards
from grpo_lit.data import files, hub  # known to YAML by their short names
from grpo_lit.data.source import PromptSource
from grpo_lit.data.template import PromptTemplate
from grpo_lit.rollout import Completion

ROOT = Path(__file__).parents[2]
PRESETS = {path.stem: path for path in sorted((ROOT / "configs" / "data").glob("*.yaml"))}
SHARED = Path(os.environ.get("GRPO_LIT_SHARED_DATA", ROOT.parent / "shared" / "data"))
GSM8K, MATH500 = SHARED / "gsm8k", SHARED / "math500" / "test.json"

needs_shared_data = pytest.mark.skipif(not (GSM8K.is_dir() and MATH500.is_file()), reason="shared data absent")


class Host:
    """Takes the keys of the data module that a preset sets."""

    def __init__(
        self,
        train: PromptSource | None = None,
        val: dict[str, PromptSource] | None = None,
        rewards: rewards.RewardCombination | None = None,
        template: PromptTemplate = PromptTemplate(),  # noqa: B008 (frozen)
    ) -> None:
        self.train, self.val, self.rewards, self.template = train, val, rewards, template


def parser() -> ArgumentParser:
    made = ArgumentParser(exit_on_error=False)
    made.add_class_arguments(Host, "data")
    made.add_argument("--config", action="config")
    return made


def parse(preset: str, *arguments: str) -> Any:
    """Lay a preset and further words over the base file, as the command line does."""
    configs = []
    for path in (ROOT / "configs" / "base.yaml", PRESETS[preset]):
        data = yaml.safe_load(path.read_text())["data"]
        configs.append("--config=" + yaml.safe_dump({"data": {k: data[k] for k in data if k in vars(Host())}}))
    return parser().parse_args([*configs, *arguments]).data


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_names_data_sets_of_the_hub_and_its_own_splits(name):
    config = parse(name)
    for source in (config.train, *config.val.values()):
        assert source.class_path == "grpo_lit.data.hub.HubDataset"
        assert re.fullmatch(r"[\w-]+/[\w-]+", source.init_args.path)
        assert source.init_args.domain == "math"
    assert config.train.init_args.split == "train"
    assert {source.init_args.split for source in config.val.values()} == {"test"}
    assert "{question}" in config.template.user


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_an_overlay_of_data_only_that_opens_with_its_command(name):
    text = PRESETS[name].read_text()
    comment = [line for line in text.splitlines() if line.startswith("#")]
    assert re.search(r"arXiv \d{4}\.\d{5}", comment[0])
    assert f"--config configs/base.yaml --config configs/data/{name}.yaml" in comment[1]
    assert set(yaml.safe_load(text)) == {"data"}


def commented_words(name: str, **paths: Path) -> list[str]:
    """Return the words that a preset's comment gives to read files, with other paths in them."""
    lines = [line.lstrip("# ") for line in PRESETS[name].read_text().splitlines() if line.startswith("#   --")]
    words = []
    for line in lines:
        for file, path in paths.items():
            line = re.sub(rf"(path:?) {file}\.jsonl?", rf"\1 {path}", line)
        key, _, value = line.partition(" ")
        words += [key, value.strip("'")] if value.startswith("'") else line.split()
    return words


@needs_shared_data
def test_gsm8k_from_files_as_the_presets_comment_says():
    words = commented_words("gsm8k", train=GSM8K / "train.jsonl", test=GSM8K / "test.jsonl")
    data = parser().instantiate(Namespace(data=parse("gsm8k", *words))).data
    train, test = data.train, data.val["gsm8k"]
    assert (len(train), len(test), list(data.val)) == (7473, 1319, ["gsm8k"])
    assert isinstance(train, files.FileDataset)
    assert (train[0].id, train[0].answer, train[0].domain) == ("train/0", "72", "math")
    assert train[0].question.startswith("Natalia sold clips to 48 of her friends")
    assert (test[0].id, test[0].answer) == ("test/0", "18")
    # The gold answers are ones that the preset's reward reads and gives full marks to.
    reward = data.rewards.rewards["answer"].reward
    for prompt in (test[i] for i in range(0, 1319, 10)):
        said = Completion((1,), (0.0,), f"So 3 apples.\n#### {prompt.answer}", "stop", 0)
        assert reward(prompt, [said]) == [1.0]


@needs_shared_data
def test_math500_from_a_file_as_the_presets_comment_says():
    words = commented_words("math", train=MATH500, test=MATH500)
    # The training split is not among the shared data; the held-out one has the same columns but for the subject's name.
    words += ["--data.train.fields.metadata", "{subject: subject, level: level}"]
    data = parser().instantiate(Namespace(data=parse("math", *words))).data
    test = data.val["math500"]
    assert (len(test), list(data.val)) == (500, ["math500"])
    assert test[0].answer == r"\left( 3, \frac{\pi}{2} \right)"
    assert len({prompt.id for prompt in test}) == 500
    # All 500 boxes of the solutions hold what the answer column says.
    assert [prompt.answer for prompt in data.train] == [prompt.answer for prompt in test]


def test_the_hub_class_is_known_by_its_short_name():
    assert hub.HubDataset.__name__ in PRESETS["gsm8k"].read_text()
