"""The file of predictions: what a row holds, and how the parts of several ranks become one."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy

from grpo_lit.data import predictions
from grpo_lit.data.evaluation import Evaluation, EvaluationBatch
from grpo_lit.data.fields import Fields
from grpo_lit.data.files import FileDataset
from grpo_lit.data.predictions import PredictionWriter, prediction_rows
from grpo_lit.errors import ConfigError
from grpo_lit.ranks import Ranks
from grpo_lit.rollout import Completion, Group, Prompt

MODULE = Mock(spec=LightningModule)


def group(name: str, texts: list[str], answer: str | None = "7") -> Group:
    completions = tuple(Completion((4, 2), (-0.5, -0.1), text, "stop", 0) for text in texts)
    scores = {"answer": [float(text == "7") for text in texts], "format": [None for _ in texts]}
    flags = [text == "7" for text in texts]
    prompt = Prompt(name, f"{name}\u2028 \u00e4", answer, "sums", (1,), {"prefill": ""})  # Unicode's own line end
    return Group(prompt, 0, completions, scores, [2.0 * flag for flag in flags], flags)


def batch(name: str, places: list[int], texts: list[str] | None = None) -> EvaluationBatch:
    greedy = [group(f"{name}/{place}", ["7"]) for place in places]
    sampled = [group(f"{name}/{place}", texts) for place in places] if texts else []
    return EvaluationBatch(name, places, greedy, sampled, [[None] * len(texts or [])] * len(sampled), "answer")


def trainer(folder: Path, rank: int = 0, size: int = 1, named: str | None = None) -> Any:
    strategy = Mock(spec=SingleDeviceStrategy, global_rank=rank, world_size=size)
    data = SimpleNamespace(evaluation=Evaluation(predictions=named), val={"b": None, "a": None})
    return Mock(spec=Trainer, strategy=strategy, log_dir=str(folder), datamodule=data, world_size=size)


def write(writer: PredictionWriter, run: Any, batches: list[EvaluationBatch]) -> None:
    writer.setup(run, MODULE, "predict")
    for i, part in enumerate(batches):
        writer.on_predict_batch_end(run, MODULE, prediction_rows(part), part, i)


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_row_holds_the_prompt_and_all_its_answers() -> None:
    (row,) = prediction_rows(batch("a", [4], ["7", "9"]))
    said = {"tokens": 2, "finish_reason": "stop"}
    right = {**said, "text": "7", "correct": True, "reward": 2.0, "rewards": {"answer": 1.0, "format": None}}
    wrong = {**said, "text": "9", "correct": False, "reward": 0.0, "rewards": {"answer": 0.0, "format": None}}
    completions = [{**right, "greedy": True}, {**right, "greedy": False}, {**wrong, "greedy": False}]
    expected = {"set": "a", "index": 4, "id": "a/4", "domain": "sums", "question": "a/4\u2028 \u00e4", "answer": "7"}
    assert row == {**expected, "completions": completions}


def test_the_file_appears_when_it_is_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    writer, run = PredictionWriter(), trainer(tmp_path / "version_0")
    part, file = tmp_path / "version_0/predictions.jsonl.part", tmp_path / "version_0/predictions.jsonl"
    write(writer, run, [batch("b", [0, 1], ["7"]), batch("a", [0])])
    assert not file.exists()
    assert len(read(part)) == 3  # on the disk before anything is closed
    writer.on_predict_end(run, MODULE)
    assert not part.exists()
    assert [row["id"] for row in read(file)] == ["b/0", "b/1", "a/0"]
    assert caplog.messages == [f"answers to 3 prompts are in {file}"]


def test_an_interrupted_run_says_where_its_rows_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    older = tmp_path / "mine.jsonl"
    older.write_text("of an earlier run")
    writer, run = PredictionWriter(), trainer(tmp_path, named=str(older))
    write(writer, run, [batch("b", [0, 1])])
    writer.on_exception(run, MODULE, KeyboardInterrupt())
    assert caplog.messages == [f"interrupted: answers to the first 2 prompts are in {older}.part"]
    assert [row["id"] for row in read(Path(f"{older}.part"))] == ["b/0", "b/1"]
    assert older.read_text() == "of an earlier run"


def test_an_error_in_training_concerns_no_predictions(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    writer, run = PredictionWriter(), trainer(tmp_path)
    writer.setup(run, MODULE, "fit")
    writer.on_exception(run, MODULE, KeyboardInterrupt())
    assert caplog.messages == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("named", ["taken.jsonl", "file/below.jsonl"])
def test_a_place_that_cannot_be_written_is_refused_before_anything_is_answered(tmp_path: Path, named: str) -> None:
    (tmp_path / "taken.jsonl").mkdir()
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(
        ConfigError, match=r"`data.evaluation.predictions` expected a file that can be written.*" + named
    ):
        PredictionWriter().setup(trainer(tmp_path, named=str(tmp_path / named)), MODULE, "predict")


def test_text_that_is_no_valid_unicode_ends_no_run(tmp_path: Path) -> None:
    writer, run = PredictionWriter(), trainer(tmp_path)
    half = EvaluationBatch("a", [0], [group("a/0", ["\ud83d"])], [], [], "answer")
    write(writer, run, [half])
    writer.on_predict_end(run, MODULE)
    assert read(tmp_path / "predictions.jsonl")[0]["completions"][0]["text"] == "\ud83d"


class Both(Ranks):
    """One of two ranks; what the other one gathers is the same."""

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.world_size


def two_ranks(folder: Path) -> list[tuple[PredictionWriter, Any]]:
    ranks = [(PredictionWriter(), trainer(folder, rank, 2)) for rank in range(2)]
    write(*ranks[0], [batch("b", [0, 2]), batch("b", [4]), batch("a", [0, 2, 4, 6, 8, 10])])
    write(*ranks[1], [batch("b", [1, 3]), batch("b", []), batch("a", [1, 3, 5, 7, 9])])
    return ranks


def test_the_parts_of_all_ranks_are_merged_in_the_order_of_sets_and_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predictions, "Ranks", Both)
    (first, run), (second, _) = two_ranks(tmp_path)
    second._part.flush()
    first.on_predict_end(run, MODULE)
    rows = read(tmp_path / "predictions.jsonl")
    assert [(row["set"], row["index"]) for row in rows] == [
        *(("b", i) for i in range(5)),
        *(("a", i) for i in range(11)),
    ]
    assert [file.name for file in tmp_path.iterdir()] == ["predictions.jsonl"]
    second._part.close()


def test_ranks_that_share_no_folder_keep_their_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictions, "Ranks", Both)
    (first, run), (second, _) = two_ranks(tmp_path)
    second._part.close()
    (tmp_path / "predictions.jsonl.rank1.part").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"a folder that all ranks share.*does not find .*rank1\.part"):
        first.on_predict_end(run, MODULE)
    assert len(read(tmp_path / "predictions.jsonl.rank0.part")) == 9


def test_the_file_is_a_data_set(tmp_path: Path) -> None:
    import pandas
    from datasets import Dataset

    writer, run = PredictionWriter(), trainer(tmp_path)
    write(writer, run, [batch("b", [0, 1], ["7", "9"]), batch("a", [0], ["7", "7"])])
    writer.on_predict_end(run, MODULE)
    file = tmp_path / "predictions.jsonl"
    prompts = FileDataset(str(file), fields=Fields(id="id", domain="domain"))
    assert [prompts[i].id for i in range(len(prompts))] == ["b/0", "b/1", "a/0"]
    assert (prompts[2].question, prompts[2].answer, prompts[2].domain) == ("a/0\u2028 \u00e4", "7", "sums")
    loaded = Dataset.from_json(str(file), cache_dir=str(tmp_path / "cache"))
    assert [c["correct"] for c in loaded[0]["completions"]] == [True, True, False]
    assert loaded[2]["completions"][0]["rewards"]["answer"] == 1.0
    frame = pandas.read_json(file, lines=True)
    assert list(frame["set"]) == ["b", "b", "a"]
    assert frame["completions"][0][2]["text"] == "9"
