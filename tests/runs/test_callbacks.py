"""Callbacks that schedule, show and measure, in real runs of a tiny model."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from toys import Letters

from callbacks import (
    ClipSchedule,
    Cosine,
    EarlyStop,
    EntropyLoop,
    GradientNoiseScale,
    Histograms,
    Linear,
    MismatchByPosition,
    Samples,
    SoftOverlong,
)
from grpo_lit.errors import ConfigError
from grpo_lit.metrics.rates import Rates
from grpo_lit.objectives import DPPO, CappedRatio, Objective, OverlongFilter, PolicyGradient, TokenClip

LOW, HIGH = "optimization/epsilon_low", "optimization/epsilon_high"


def rows(trainer: Trainer) -> list[dict[str, float]]:
    """Return what was written, row by row."""
    with (Path(trainer.log_dir) / "metrics.csv").open() as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


class Values(Callback):
    """Keeps everything that was logged, step by step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def test_bounds_follow_their_schedules_and_are_those_of_the_step(
    make_module: Callable, make_data: Callable, make_trainer: Callable
) -> None:
    used: list[float] = []

    class Bounds(Callback):
        def on_train_batch_end(
            self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            surrogate = pl_module.objective.surrogate
            used.extend((surrogate.low, surrogate.high))

    values = Values()
    callbacks = [ClipSchedule(Linear(0.1, 0.3, 2), Cosine(0.4, 0.2, 2)), Bounds(), values]
    trainer = make_trainer(max_steps=4, callbacks=callbacks)
    trainer.fit(make_module(objective=Objective(surrogate=TokenClip(0.2, 0.2))), datamodule=make_data(num_updates=2))
    assert used == pytest.approx([0.1, 0.4, 0.2, 0.3, 0.3, 0.2, 0.3, 0.2])
    assert [step[name] for step in values.steps for name in (LOW, HIGH)] == pytest.approx(used)


@pytest.mark.parametrize(
    ("surrogate", "arguments", "message"),
    [
        (PolicyGradient(), {"high": Linear(0.2, 0.3, 2)}, r"`high`.*PolicyGradient has none"),
        (CappedRatio(), {"low": Linear(0.2, 0.3, 2)}, r"`low` or `delta_low`.*CappedRatio has none"),
        (TokenClip(), {"high": Linear(0.2, -0.1, 2)}, r"`high` of TokenClip expected to be >= 0, but got -0\.1"),
    ],
)
def test_a_surrogate_without_the_bound_is_refused(
    make_module: Callable, make_data: Callable, make_trainer: Callable, surrogate: Any, arguments: dict, message: str
) -> None:
    trainer = make_trainer(callbacks=[ClipSchedule(**arguments)], num_sanity_val_steps=0)
    with pytest.raises(ConfigError, match=message):
        trainer.fit(make_module(objective=Objective(surrogate=surrogate)), datamodule=make_data())
    with pytest.raises(ConfigError, match="`low` or `high` of ClipSchedule"):
        ClipSchedule()


def test_bounds_by_other_names(make_module: Callable, make_data: Callable, make_trainer: Callable) -> None:
    surrogate = DPPO()
    callback = ClipSchedule(Linear(0.1, 0.2, 2), Linear(0.3, 0.4, 2))
    trainer = make_trainer(max_steps=2, callbacks=[callback])
    trainer.fit(make_module(objective=Objective(surrogate=surrogate)), datamodule=make_data())
    assert (surrogate.delta_low, surrogate.delta_high, surrogate.cap) == pytest.approx((0.15, 0.35, 20.0))


def test_schedules_and_shaping_go_on_where_a_resumed_run_was(
    make_module: Callable, make_data: Callable, make_trainer: Callable, weights_of: Callable, tmp_path: Path
) -> None:
    def build(max_steps: int, *callbacks: Callback) -> tuple[Any, Any, Trainer, Values, GradientNoiseScale]:
        # No entropy of 260 tokens is above 9 nats: the loop rises at every step.
        schedule = ClipSchedule(Linear(0.3, 0.0, 6), EntropyLoop(9.0, start=0.01, rate=0.01, minimum=0.0))
        values, noise = Values(), GradientNoiseScale(decay=0.5)
        module = make_module(objective=Objective(surrogate=TokenClip()), max_tokens_per_micro_batch=60)
        parts = [schedule, SoftOverlong(cache=4), noise, values, *callbacks]
        return module, make_data(num_updates=2), make_trainer(max_steps=max_steps, callbacks=parts), values, noise

    straight, data, trainer, everything, noise = build(6)
    trainer.fit(straight, datamodule=data)
    assert [step[HIGH] for step in everything.steps] == pytest.approx([0.01, 0.02, 0.03, 0.04, 0.05, 0.06])
    saver = ModelCheckpoint(tmp_path / "saved", filename="x", every_n_train_steps=3)
    module, data, trainer, *_ = build(3, saver)
    trainer.fit(module, datamodule=data)
    resumed, data, trainer, rest, same_noise = build(6)
    trainer.fit(resumed, datamodule=data, ckpt_path=str(tmp_path / "saved" / "x.ckpt"))
    for name in (LOW, HIGH, "optimization/loss"):
        assert [step[name] for step in rest.steps] == [step[name] for step in everything.steps[3:]]
    assert same_noise.state_dict() == noise.state_dict()
    assert noise.state_dict()["noise"] != 0
    torch.testing.assert_close(weights_of(resumed), weights_of(straight), rtol=0, atol=0)


def test_the_overlong_penalty_is_in_the_reward_and_correctness_is_not_shaped(
    make_module: Callable, make_data: Callable, make_trainer: Callable
) -> None:
    values = {}
    for name, callbacks in {"plain": [], "shaped": [SoftOverlong(cache=5, weight=2.0)]}.items():
        seen = Values()
        data = make_data(val={"letters": Letters(3, heldout=True)})
        trainer = make_trainer(max_steps=1, callbacks=[*callbacks, seen])
        trainer.fit(make_module(), datamodule=data)
        values[name] = seen.steps[0] | rows(trainer)[0]  # before the first step: held-out accuracy
    shaped, plain = values["shaped"], values["plain"]
    assert shaped["reward/overlong_penalty"] < 0 < shaped["length/overlong"] <= 1
    assert shaped["reward/total"] == pytest.approx(plain["reward/total"] + shaped["reward/overlong_penalty"])
    assert 0 < plain["val/letters/avg@2"] < 1
    for name in ("reward/correct", "reward/even", "val/letters/greedy", "val/letters/avg@2"):
        assert shaped[name] == plain[name]
    assert shaped["optimization/advantage_std"] != plain["optimization/advantage_std"]


def test_samples_are_written_whole_and_as_a_table(
    make_module: Callable, make_data: Callable, make_trainer: Callable, tmp_path: Path
) -> None:
    logger = TensorBoardLogger(tmp_path, name="", version="log")
    samples = Samples(every_n_steps=2, groups=2, completions=2, characters=40)
    module = make_module(objective=Objective(filters=[OverlongFilter()]))
    values = Values()
    trainer = make_trainer(max_steps=3, callbacks=[samples, Histograms(every_n_steps=2), values], logger=logger)
    data = make_data(val={"letters": Letters(3, heldout=True)})
    trainer.fit(module, datamodule=data)
    lines = [json.loads(line) for line in (tmp_path / "log" / "samples.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 0, 2, 2]
    for line in lines:
        assert (line["answer"], line["domain"], len(line["completions"])) == ("1", "letters", 3)
        for completion in line["completions"]:
            assert completion["scores"]["even"] == completion["reward"]
            assert completion["correct"] == (completion["reward"] >= 0.5)
            assert (completion["advantage"] is None) == (completion["finish_reason"] == "length")  # left out
    known = [c["advantage"] for line in lines for c in line["completions"] if c["advantage"] is not None]
    assert known == [] or max(map(abs, known)) > 0.1
    events = EventAccumulator(str(tmp_path / "log"), size_guidance={"tensors": 0, "histograms": 0}).Reload()
    texts = events.Tensors("samples/text_summary")
    assert [text.step for text in texts] == [0, 2]
    table = texts[0].tensor_proto.string_val[0].decode().splitlines()
    assert table[0] == "| prompt | completion | reward | correct | advantage | tokens |"
    assert len(table) == 2 + 2 * 2
    assert lines[0]["question"] in table[2]
    histograms = {name: events.Histograms(name) for name in events.Tags()["histograms"]}
    assert {"length/histogram", "reward/total_histogram", "exploration/solve_rate_histogram"} <= set(histograms)
    first, second = histograms["length/histogram"]
    assert (first.step, second.step) == (0, 2)
    assert (first.histogram_value.num, second.histogram_value.num) == (12, 24)  # of one rollout, then of two
    total = first.histogram_value.sum / first.histogram_value.num
    assert total == pytest.approx(values.steps[0]["length/mean"])
    parts = [histograms[f"length/{side}_histogram"][0].histogram_value.num for side in ("correct", "incorrect")]
    assert sum(parts) == 12
    assert histograms["exploration/solve_rate_histogram"][1].histogram_value.num == 12  # prompts
    assert histograms["optimization/advantage_histogram"][0].histogram_value.num <= 12
    entropies = [part.histogram_value for part in histograms["exploration/entropy_histogram"]]
    assert len(entropies) == 2
    trained = values.steps[0]["exploration/entropy"]  # of the tokens that were trained on, as the histogram is
    assert entropies[0].sum / entropies[0].num == pytest.approx(trained, rel=1e-4)


def test_without_a_logger_samples_are_not_written(
    make_module: Callable, make_data: Callable, make_trainer: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match="Samples` writes nothing"):
        make_trainer(max_steps=1, callbacks=[Samples()], logger=False).fit(make_module(), datamodule=make_data())
    assert not list(tmp_path.rglob("*.jsonl"))


def test_a_collapsed_run_ends_by_itself_and_is_scored_once_more(
    make_module: Callable, make_data: Callable, make_trainer: Callable
) -> None:
    values = Values()
    trainer = make_trainer(max_steps=9, callbacks=[EarlyStop(entropy=9.0, patience=3), values], val_check_interval=9)
    with pytest.warns(UserWarning, match=r"EarlyStop ends the run at step 3, after 3 steps.*exploration/entropy"):
        trainer.fit(make_module(), datamodule=make_data(val={"letters": Letters(3, heldout=True)}))
    assert trainer.global_step == 3
    assert [row["step"] for row in rows(trainer) if "val/letters/greedy" in row] == [0, 3]


def test_the_gap_by_position_splits_the_gap(make_module: Callable, make_data: Callable, make_trainer: Callable) -> None:
    class Shift(Callback):
        """Makes the sampler's log-prob of token t of every answer wrong by t."""

        def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            tokens = batch.rollout.batch
            position = torch.cat([torch.arange(int(n)) for n in tokens.lengths])
            tokens.sampler_logprobs.add_(position.float())

        def on_train_batch_end(
            self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            tokens = batch.rollout.batch
            position = torch.cat([torch.arange(int(n)) for n in tokens.lengths[tokens.advantages != 0]])
            self.counts = torch.bincount(position, minlength=6)

    shift, values, module = Shift(), Values(), make_module(max_tokens_per_micro_batch=60)
    # An entropy bonus sends every sequence through the policy; those that reward moves count.
    module.objective.entropy_coefficient = 1e-4
    parts = [shift, MismatchByPosition(edges=(0, 1, 3, 100)), values]
    make_trainer(max_steps=1, callbacks=parts).fit(module, datamodule=make_data())
    (step,), n = values.steps, shift.counts.tolist()
    expected = {0: 0.0, 1: (n[1] + 2 * n[2]) / (n[1] + n[2]), 3: (3 * n[3] + 4 * n[4] + 5 * n[5]) / sum(n[3:])}
    for first, gap in expected.items():
        assert step[f"system/mismatch_abs_from_{first}"] == pytest.approx(gap, abs=1e-4)
    assert "system/mismatch_abs_from_100" not in step
    whole = sum(p * count for p, count in enumerate(n)) / sum(n)
    assert step["system/mismatch_abs"] == pytest.approx(whole, abs=1e-4)
    assert module.measurements == []
    with pytest.raises(ConfigError, match="`edges` of MismatchByPosition"):
        MismatchByPosition(edges=(1, 2))


def test_the_noise_scale_is_made_of_what_each_micro_batch_adds(
    make_module: Callable, make_data: Callable, make_trainer: Callable
) -> None:
    module, values = make_module(max_tokens_per_micro_batch=60), Values()
    parts: list[torch.Tensor] = []
    sizes: list[int] = []

    def gradient() -> torch.Tensor:
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in module.policy.parameters()]
        return torch.cat([g.flatten() for g in grads]).double()

    def backward(loss: torch.Tensor) -> None:
        before = gradient()
        type(module).manual_backward(module, loss)
        parts.append(gradient() - before)

    module.manual_backward = backward
    noise = GradientNoiseScale(decay=0.0)  # no memory: the step's own estimate
    module.measurements.append(lambda batch, output: sizes.append(len(batch.lengths)) or Rates())
    make_trainer(max_steps=1, callbacks=[noise, values]).fit(module, datamodule=make_data())
    sizes = [size for size in sizes if size]
    assert len(parts) == len(sizes) > 1
    whole = float(sum(parts).square().sum())
    shares = [size / sum(sizes) for size in sizes]
    signal = (whole - sum(float(g.square().sum()) for g in parts)) / (1 - sum(f**2 for f in shares))
    expected = 4 * (whole - signal) / signal
    if signal > 0:
        assert values.steps[0]["optimization/noise_scale"] == pytest.approx(expected, rel=1e-3)
    assert (noise.state_dict()["signal"], noise.state_dict()["noise"]) == pytest.approx(
        (signal, 4 * (whole - signal)), rel=1e-3
    )


def test_one_micro_batch_says_nothing_of_noise(
    make_module: Callable, make_data: Callable, make_trainer: Callable
) -> None:
    values = Values()
    trainer = make_trainer(max_steps=2, callbacks=[GradientNoiseScale(), values])
    with pytest.warns(UserWarning, match="two micro-batches or more"):
        trainer.fit(make_module(), datamodule=make_data())
    assert "optimization/noise_scale" not in values.steps[-1]
