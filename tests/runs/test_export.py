"""An exported checkpoint is a model that transformers loads, with the weights that were trained."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_lit.errors import ConfigError
from grpo_lit.export import export
from grpo_lit.export_cli import main
from grpo_lit.policy.checkpoint import stop_token_ids

PROBE = [5, 80, 120, 33, 200, 7]


@pytest.fixture
def trained(make_module: Callable, make_data: Callable, make_trainer: Callable, tmp_path: Path) -> tuple[Any, Path]:
    """A module after two steps, and its checkpoint."""
    saver = ModelCheckpoint(tmp_path / "saved", filename="end", every_n_train_steps=2)
    module = make_module()
    make_trainer(max_steps=2, callbacks=[saver]).fit(module, datamodule=make_data())
    return module, tmp_path / "saved" / "end.ckpt"


def logprobs(model: Any, tokens: list[int]) -> list[float]:
    ids = torch.tensor([tokens])
    return model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].tolist()


def test_transformers_loads_what_was_trained(trained: tuple[Any, Path], tmp_path: Path, tiny_model_path: Path) -> None:
    module, checkpoint = trained
    folder = export(checkpoint, tmp_path / "exported")
    model = AutoModelForCausalLM.from_pretrained(folder)
    expected = logprobs(module.policy.model.cpu(), PROBE)
    assert logprobs(model, PROBE) == pytest.approx(expected, abs=1e-6)
    start = AutoModelForCausalLM.from_pretrained(tiny_model_path)
    assert max(abs(a - b) for a, b in zip(logprobs(start, PROBE), expected, strict=True)) > 1e-2
    assert AutoTokenizer.from_pretrained(folder).chat_template
    assert stop_token_ids(str(folder)) == stop_token_ids(str(tiny_model_path))


def test_bad_arguments_are_refused(
    trained: tuple[Any, Path], tmp_path: Path, tiny_folder: Callable, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    _, checkpoint = trained
    content = torch.load(checkpoint)
    monkeypatch.setattr(sys, "argv", ["export", str(tmp_path / "nothing.ckpt"), str(tmp_path / "out")])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("error: `checkpoint` expected a checkpoint file or a folder of shards")
    other = tmp_path / "other.ckpt"
    note = content["grpo_lit"] | {"checkpoint": str(tiny_folder("llama", hidden_size=128))}
    fewer = dict([*content["state_dict"].items()][1:])
    for changed, said in (
        ({"state_dict": {}}, "written by grpo-lit fit"),
        (content | {"grpo_lit": note}, "another model now: .* is .*64.* and .*128"),  # exchanged under its name
        (content | {"state_dict": fewer}, "is nothing in the checkpoint"),
    ):
        torch.save(changed, other)
        with pytest.raises(ConfigError, match=f"^`checkpoint` expected .*{said}"):
            export(other, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"^`target` expected a folder that can be written to"):
        export(checkpoint, checkpoint)
    with pytest.raises(ConfigError, match=r"^`--adapter` expected"):
        export(checkpoint, tmp_path / "out", adapter=True)
    export(checkpoint, tmp_path / "out", torch.bfloat16)
    with pytest.raises(ConfigError, match="holds one"):
        export(checkpoint, tmp_path / "out")
