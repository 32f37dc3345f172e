"""Two gloo processes, whole or in shards, end where one process ends: same prompts, samples and parameters."""

import csv
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pair as pair_module
import pytest
import torch
from heldout_run import evaluate
from pair import Pair, leave_alone
from ranks_run import fail_on_one_rank, fit
from transformers import AutoModelForCausalLM, GenerationConfig

from grpo_lit.dry_run.footprint import Footprint
from grpo_lit.export import export
from grpo_lit.module import GRPOModule

#: By recipe: further settings. Of SomePrompts every second prompt has no signal, so that a rank may have none at all;
#: 3 groups on 2 ranks are 2 and 1; GSPO's 4 and DAPO's 2 updates on 5 prompts leave ranks without any. DAPO's rollouts
#: are drawn ahead: the engine's thread must not meet the ranks' collectives.
SETTINGS = {
    "grpo": ["--data.rewards.rewards.some.reward", "toys.SomePrompts", "--data.prompts_per_rollout", "3"],
    "dapo": ["--data.num_updates", "2", "--data.rollout.asynchronous", "{max_staleness: 7, queue_size: 1}"],
    "gspo": [],
    "cispo": ["--data.rewards.rewards.some.reward", "toys.SomePrompts"],
}
Run = dict[str, Any]


@pytest.fixture(scope="module")
def ragged_model(tiny_folder: Callable[..., Path]) -> str:
    """A model for which every eighth token ends the answer."""
    folder = tiny_folder("llama")
    GenerationConfig(eos_token_id=list(range(2, 260, 8)), pad_token_id=0).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def run(pair: Pair, ragged_model: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Run]]:
    """``run("ddp", "grpo")``: what each rank knows of a run, made once; ``folder`` is where it wrote."""

    @functools.cache
    def make(strategy: str, recipe: str, *words: str, resume: str | None = None) -> list[Run]:
        folder = str(tmp_path_factory.mktemp(f"{strategy}-{recipe}"))
        arguments = (folder, ragged_model, strategy, recipe, [*SETTINGS.get(recipe, []), *words], resume)
        told = [fit(*arguments)] if strategy == "single" else pair(fit, *arguments)
        assert all(rank["global_step"] == 5 for rank in told)
        return [{"folder": Path(folder), **rank} for rank in told]

    return make


def assert_equal(two: list[Run], one: Run, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    for rank in two:
        assert rank["weights"].keys() == one["weights"].keys()
        for name, tensor in one["weights"].items():
            said = f"{name} of a rank differs"
            torch.testing.assert_close(
                rank["weights"][name], tensor, rtol=rtol, atol=atol, msg=lambda text, said=said: f"{said}: {text}"
            )
        for name in ("loss", "grad_norm"):  # of a resumed run, the last ones
            assert rank[name] == pytest.approx(one[name][-len(rank[name]) :], rel=max(rtol, 1e-4), abs=atol), name


@pytest.mark.parametrize(
    ("recipe", "strategy"),
    [*((recipe, strategy) for recipe in SETTINGS for strategy in ("ddp", "fsdp2")), ("grpo", "fsdp"), ("dapo", "fsdp")],
)
def test_two_processes_equal_one(run: Callable[..., list[Run]], ragged_model: str, recipe: str, strategy: str) -> None:
    """Field bug F1: ranks without signal keep step. Field bug F6: one norm, which clips."""
    (one,), two = run("single", recipe), run(strategy, recipe)
    before = AutoModelForCausalLM.from_pretrained(ragged_model).state_dict()
    assert max(float((one["weights"][name] - tensor).abs().max()) for name, tensor in before.items()) > 1e-3
    assert_equal(two, one)
    clipped = [norm > 0.5 for norm in one["grad_norm"]]  # model.gradient_clip_norm
    assert any(clipped)
    assert len({length for step in one["lengths"] for length in step}) > 3
    assert [sum(step) for step in zip(*(rank["signal"] for rank in two), strict=True)] == one["signal"]
    if recipe in ("grpo", "gspo"):
        assert any(min(step) == 0 < max(step) for step in zip(*(rank["signal"] for rank in two), strict=True))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_both(
    run: Callable[..., list[Run]], strategy: str
) -> None:
    """Field bug F9: OLMo 3 corrects for the sampler, whose log-probs are NaN."""
    word = "--trainer.callbacks+=toys.Poison"
    (one,), two = run("single", "olmo3", word), run(strategy, "olmo3", word)
    assert one["skipped"] == [0, 0, 1, 0, 0]
    assert [rank["skipped"] for rank in two] == [one["skipped"]] * 2
    assert_equal(two, one)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_run_stopped_between_two_updates_goes_on_the_same(run: Callable[..., list[Run]], strategy: str) -> None:
    """Field bug F3: each rank needs its own share of the rollout back."""
    straight = run(strategy, "dapo")
    stopped = straight[0]["folder"] / "saved" / "step=3.ckpt"
    for again, rank in zip(run(strategy, "dapo", resume=str(stopped)), straight, strict=True):
        assert len(again["loss"]) == 2
        assert_equal([again], rank, rtol=0, atol=0)


@pytest.mark.parametrize(("wrote", "goes_on"), [("fsdp2", "single"), ("single", "ddp")])
def test_a_rollout_in_progress_goes_on_on_another_number_of_ranks(
    run: Callable[..., list[Run]], wrote: str, goes_on: str
) -> None:
    """The second update on a rollout of two, with groups carried over and drawn ahead."""
    (one,), stopped = run("single", "dapo"), run(wrote, "dapo")[0]["folder"] / "saved" / "step=3.ckpt"
    again = run(goes_on, "dapo", resume=str(stopped))
    assert len(again[0]["loss"]) == 2
    assert_equal(again, one)


@pytest.mark.parametrize(
    ("wrote", "goes_on"),
    [("fsdp2", "single"), ("fsdp2", "ddp"), ("single", "fsdp2"), ("fsdp", "single"), ("single", "fsdp")],
)
def test_any_strategy_goes_on_from_any_checkpoint(run: Callable[..., list[Run]], wrote: str, goes_on: str) -> None:
    """Shards of two ranks on one and on two that hold all, and one file in shards."""
    (one,), stopped = run("single", "grpo"), run(wrote, "grpo")[0]["folder"] / "saved" / "step=2.ckpt"
    assert stopped.is_dir() == (wrote == "fsdp2")
    again = run(goes_on, "grpo", resume=str(stopped))
    assert len(again[0]["loss"]) == 3
    assert_equal(again, one)


def test_shards_hold_a_half_and_are_exported(run: Callable[..., list[Run]], ragged_model: str, tmp_path: Path) -> None:
    (one,), two = run("single", "grpo"), run("fsdp2", "grpo")
    momentum = functools.partial(torch.optim.SGD, lr=0.5, momentum=0.5)
    told = Footprint.of(GRPOModule(ragged_model, optimizer=momentum))  # as scripts/dry_run says it
    for rank, seen in enumerate(two):
        expected = {"parameters": 2 * told.parameters.bytes(2, rank), "gradients": told.gradients.bytes(2, rank)}
        assert seen["footprint"] == expected | {"states": told.states.bytes(2, rank)}  # of policy and reference
    # Parameters, gradients and momentum lie on the two ranks in halves, to within the rows that do not divide.
    for kind, size in one["footprint"].items():
        assert sum(rank["footprint"][kind] for rank in two) == size
        assert max(rank["footprint"][kind] for rank in two) <= 0.52 * size, kind
    last = two[0]["folder"] / "saved" / "step=5.ckpt"
    assert sorted(file.name for file in last.iterdir()) == [".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt"]
    exported = AutoModelForCausalLM.from_pretrained(export(last, tmp_path / "exported"))
    for name, tensor in exported.state_dict().items():
        torch.testing.assert_close(tensor, one["weights"][name], rtol=1e-5, atol=1e-6)


#: Callbacks that shape, steer and watch; no entropy of 260 tokens reaches 9 nats, so the loop rises at every step.
WATCHED = """
- class_path: toys.Record
- {class_path: callbacks.SoftOverlong, init_args: {cache: 4}}
- class_path: callbacks.ClipSchedule
  init_args: {high: {class_path: EntropyLoop, init_args: {target: 9.0, start: 0.01, rate: 0.01, minimum: 0.0}}}
- {class_path: callbacks.MismatchByPosition, init_args: {edges: [0, 2, 4]}}
- {class_path: callbacks.Samples, init_args: {every_n_steps: 1, groups: 1}}
- {class_path: callbacks.Histograms, init_args: {every_n_steps: 2}}
- class_path: callbacks.EarlyStop
- class_path: callbacks.GradientNoiseScale
- class_path: callbacks.Health
- class_path: callbacks.Panels
- class_path: callbacks.Console
"""
LOGGERS = """
- {class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: logs, name: null}}
- {class_path: lightning.pytorch.loggers.TensorBoardLogger, init_args: {save_dir: board}}
"""
SAME = ("optimization/epsilon_high", "reward/overlong_penalty", "length/overlong", "length/repetition")


def test_callbacks_shape_and_say_the_same_on_two_processes(run: Callable[..., list[Run]]) -> None:
    """Field bug F5: tables are written on rank 0 alone, which alone has a writer, and nobody waits for the other."""
    words = ("--trainer.callbacks", WATCHED, "--trainer.logger", LOGGERS, "--trainer.enable_checkpointing", "false")
    (one,), two = run("single", "dapo", *words), run("ddp", "dapo", *words)
    assert_equal(two, one)
    logged = []
    for folder in (one["folder"], two[0]["folder"]):
        logs = folder / "logs" / "version_0"
        with (logs / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        logged.append({name: [float(row[name]) for row in rows if row[name]] for name in SAME})
        assert list(folder.glob("board/**/events.*"))
        samples = [json.loads(line) for line in (logs / "samples.jsonl").read_text().splitlines()]
        assert [sample["step"] for sample in samples] == [0, 1, 2, 3, 4]
    assert logged[0]["optimization/epsilon_high"] == pytest.approx([0.01, 0.02, 0.03, 0.04, 0.05])
    assert logged[0]["reward/overlong_penalty"][0] < 0
    for name in SAME:
        assert logged[1][name] == pytest.approx(logged[0][name]), name


def test_two_processes_measure_and_write_what_one_does(pair: Pair, tmp_path: Path, tiny_model_path: Path) -> None:
    arguments = (str(tiny_model_path), str(tmp_path / "one"), str(tmp_path / "two"))
    evaluate(arguments[0], arguments[1], devices=1)
    pair(evaluate, arguments[0], arguments[2], devices=2)
    one, two = ({file.name: file.read_text() for file in Path(folder).iterdir()} for folder in arguments[1:])
    assert {"metrics.csv", "predictions.jsonl"} <= two.keys()
    assert {name for name in two if name.startswith("predictions")} == {"predictions.jsonl"}
    for name in ("metrics.csv", "predictions.jsonl"):
        assert two[name] == one[name]
    assert not [log for log in pair.logs() if "sync_dist" in log]


def test_one_ranks_failure_is_told_by_all_and_ends_all(pair: Pair, tmp_path: Path, tiny_model_path: Path) -> None:
    """The other rank waits in a collective, where the failed one, which stays here, never comes."""
    started = time.monotonic()
    ended, failed = pair.attempt(fail_on_one_rank, str(tmp_path / "run"), str(tiny_model_path), grace=2.0, seconds=60)
    assert time.monotonic() - started < 40
    assert ended is None
    assert "cannot be judged" in failed
    for log in pair.logs():
        assert "cannot be judged" in log
    assert "rank 1 failed, and ends the run" in pair.logs()[0]


def test_a_partner_that_dies_ends_a_test_with_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_module, "ALONE", 0.2)
    two, started = Pair(tmp_path), time.monotonic()
    with pytest.raises(AssertionError, match="out of memory"):
        two(leave_alone, "out of memory", seconds=600)
    assert time.monotonic() - started < 60
    assert not two._processes
