"""A real run tells the same of itself as its files do afterwards, and TensorBoard has its overviews."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import plugin_data_pb2
from toys import Constant, Letters

from callbacks import Health, Panels
from callbacks.panels import layout
from grpo_lit.curves import read_scalars
from grpo_lit.errors import TrainingError
from grpo_lit.health import Rules, diagnose
from grpo_lit.health.exploration import EntropyCollapse
from grpo_lit.health.length import Truncation
from grpo_lit.health.reward import RewardHacking
from grpo_lit.rewards import RewardCombination, WeightedReward

#: Nothing of the tiny model is healthy by these: some rules see every step, some only the validations.
STRICT = Rules(
    entropy_collapse=EntropyCollapse(low=99.0, window=2),
    truncation=Truncation(share=-1.0, window=3),
    reward_hacking=RewardHacking(train_gain=-9.0, flat=9.0, solved=2.0, validations=1),
)


def told(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "health.jsonl").read_text().splitlines()]


def replayed(folder: Path, rules: Rules = STRICT) -> list[dict]:
    return [event.as_dict() for event in diagnose(read_scalars(folder), rules.active())]


@pytest.mark.parametrize("log_every", [1, 2])
def test_a_run_tells_what_its_files_tell(
    make_module: Callable, make_data: Callable, make_trainer: Callable, tmp_path: Path, log_every: int,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level("INFO")
    trainer: Trainer = make_trainer(
        max_steps=6,
        callbacks=[Health(STRICT), Panels()],
        logger=TensorBoardLogger(tmp_path, name="", version="run"),
        log_every_n_steps=log_every,
    )
    trainer.fit(make_module(), datamodule=make_data(val={"sums": Letters(size=3, heldout=True)}, num_updates=2))
    folder = tmp_path / "run"
    events = told(folder)
    assert events == replayed(folder)
    rules = {event["rule"]: event["step"] for event in events}
    assert {"entropy_collapse", "truncation", "reward_hacking"} <= rules.keys()
    assert rules["entropy_collapse"] == log_every  # the second step that is logged
    assert f"health: step {log_every}: entropy collapse: exploration/entropy is" in caplog.text
    assert len(trainer.loggers) == 1  # what listened is gone

    files = EventAccumulator(str(folder)).Reload()
    texts = b"".join(event.tensor_proto.string_val[0] for event in files.Tensors("health/text_summary"))
    assert b"**entropy collapse** at step" in texts
    shown = layout_pb2.Layout.FromString(files.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    assert {
        panel.title: {chart.title: ["Multiline", list(chart.multiline.tag)] for chart in panel.chart}
        for panel in shown.category
    } == layout(files.Tags()["scalars"])
    assert len(files.Tensors("custom_scalars__config__")) == 1

    contents = files.summary_metadata
    begun = plugin_data_pb2.HParamsPluginData.FromString(
        contents["_hparams_/session_start_info"].plugin_data.content
    ).session_start_info.hparams
    assert begun["surrogate"].string_value == "TokenClip(low=0.2, high=0.2)"
    assert begun["lr"].number_value == 1e-2
    assert begun["num_updates"].number_value == 2
    metrics = plugin_data_pb2.HParamsPluginData.FromString(
        contents["_hparams_/experiment"].plugin_data.content
    ).experiment.metric_infos
    accuracies = [f"val/sums/{kind}" for kind in ("avg@2", "greedy", "maj@2", "pass@2")]
    assert [metric.name.tag for metric in metrics] == ["reward/correct", *accuracies]
    assert [event.step for event in files.Scalars("val/sums/greedy")] == [0, 2, 4, 6]  # the row added none


def test_a_run_that_ends_in_an_error_is_named(
    make_module: Callable, make_data: Callable, make_trainer: Callable, tmp_path: Path
) -> None:
    trainer = make_trainer(callbacks=[Health(), Panels()], logger=TensorBoardLogger(tmp_path, name="", version="run"))
    data = make_data(rewards=RewardCombination({"none": WeightedReward(Constant(0.5))}))
    with pytest.raises(TrainingError):
        trainer.fit(make_module(), datamodule=data)
    assert [event["rule"] for event in told(tmp_path / "run")] == ["dead_optimizer"]
    assert told(tmp_path / "run") == replayed(tmp_path / "run", Rules())
    assert "_hparams_/session_start_info" in EventAccumulator(str(tmp_path / "run")).Reload().summary_metadata


def test_what_was_told_is_not_told_again_after_a_resume(
    make_module: Callable, make_data: Callable, make_trainer: Callable, tmp_path: Path
) -> None:
    def fit(steps: int, folder: str, checkpoint: str | None = None) -> None:
        saver = ModelCheckpoint(tmp_path / "saved", filename="x", every_n_train_steps=2, enable_version_counter=False)
        logger = TensorBoardLogger(tmp_path, name="", version=folder)
        trainer = make_trainer(max_steps=steps, callbacks=[Health(STRICT), saver], logger=logger)
        trainer.fit(make_module(), datamodule=make_data(), ckpt_path=checkpoint)

    fit(2, "first")
    fit(4, "rest", str(tmp_path / "saved" / "x.ckpt"))
    assert [(event["rule"], event["step"]) for event in told(tmp_path / "first")] == [("entropy_collapse", 1)]
    assert [(event["rule"], event["step"]) for event in told(tmp_path / "rest")] == [("truncation", 2)]


def test_a_run_without_a_logger_is_not_looked_at(
    make_module: Callable, make_data: Callable, make_trainer: Callable, tmp_path: Path
) -> None:
    with pytest.warns(UserWarning, match="Health` looks at nothing"):
        make_trainer(max_steps=1, logger=False, callbacks=[Health(STRICT), Panels()], default_root_dir=tmp_path).fit(
            make_module(), datamodule=make_data()
        )
    assert list(tmp_path.rglob("health.jsonl")) == []
