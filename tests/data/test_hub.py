"""Hugging Face data sets: a local clone stands for the hub, which tests never ask."""

import json
import re
from pathlib import Path

import datasets
import pytest

import grpo_lit
from grpo_lit.data.fields import Fields
from grpo_lit.data.hub import HubDataset, SavedDataset
from grpo_lit.errors import ConfigError

ROWS = [{"question": f"q{i}", "answer": f"so #### {i}", "extra": "x"} for i in range(5)]


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A folder as the hub has it, with two splits, and a cache of its own."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "sums"
    folder.mkdir()
    for split, rows in (("train", ROWS), ("test", ROWS[:2])):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def test_a_data_set_of_the_hub_by_its_split(clone):
    train, test = HubDataset(clone, extract="gsm8k", domain="math"), HubDataset(clone, split="test", extract="gsm8k")
    assert [(p.id, p.question, p.answer, p.domain) for p in train] == [
        (f"sums/train/{i}", f"q{i}", str(i), "math") for i in range(5)
    ]
    assert [p.id for p in test] == ["sums/test/0", "sums/test/1"]
    assert len(HubDataset(clone, split="train[:3]", extract="gsm8k")) == 3


def test_what_the_hub_has_not_is_refused_with_its_name(clone):
    with pytest.raises(ConfigError, match=r"got .*sums/validation.*Unknown split"):
        HubDataset(clone, split="validation")
    with pytest.raises(ConfigError, match=r"got .*sums/socratic/train.*BuilderConfig"):
        HubDataset(clone, "socratic")
    with pytest.raises(ConfigError, match="did you mean answer"):
        HubDataset(clone, fields=Fields(answer="anser"))
    # HF_HUB_OFFLINE is set in tests.
    with pytest.raises(ConfigError, match=r"got nobody/no-such-set/train at v1: .*FileDataset"):
        HubDataset("nobody/no-such-set", revision="v1")


def test_a_saved_data_set_with_and_without_splits(tmp_path):
    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": data, "test": data.select(range(2))}).save_to_disk(tmp_path / "two")
    assert [p.id for p in SavedDataset(str(tmp_path / "one"))][-1] == "one/4"
    test = SavedDataset(str(tmp_path / "two"), "test", extract="gsm8k")
    assert [(p.id, p.answer) for p in test] == [("two/test/0", "0"), ("two/test/1", "1")]
    for path, split, message in (
        ("two", None, "`split` .* expected one of train, test, but got None"),
        ("two", "dev", "expected one of train, test, but got 'dev'"),
        ("one", "train", "expected to be absent"),
    ):
        with pytest.raises(ConfigError, match=message):
            SavedDataset(str(tmp_path / path), split)
    with pytest.raises(ConfigError, match="`path` expected a folder that `save_to_disk` wrote"):
        SavedDataset(str(tmp_path))
    with pytest.raises(ConfigError, match="`path` expected a folder that `save_to_disk` wrote"):
        SavedDataset("nowhere")
    with pytest.raises(ConfigError, match="SavedDataset"):
        HubDataset(str(tmp_path / "one"))


def test_a_shuffled_or_filtered_data_set_keeps_its_order(tmp_path):
    datasets.Dataset.from_list(ROWS).select([4, 0, 2]).save_to_disk(tmp_path / "some")
    assert [p.question for p in SavedDataset(str(tmp_path / "some"))] == ["q4", "q0", "q2"]


def test_columns_that_nobody_reads_are_left_where_they_are(tmp_path):
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    source = SavedDataset(str(tmp_path / "one"))
    assert source._rows.read(0, 1) == [{"question": "q0", "answer": "so #### 0"}]
    with pytest.raises(ConfigError, match="Its columns are question, answer, extra"):
        SavedDataset(str(tmp_path / "one"), fields=Fields("q", "a"))


def test_the_library_is_imported_only_when_used():
    # It takes two seconds.
    sources = Path(grpo_lit.__file__).parent.rglob("*.py")
    late = re.compile(r"^(import|from) (datasets|pyarrow)\b", re.MULTILINE)
    assert not [path for path in sources if late.search(path.read_text())]
