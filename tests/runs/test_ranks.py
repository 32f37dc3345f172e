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
from ranks_run import clip_known_gradient, fail_on_one_rank, fit, interrupt, peak_of_building
from transformers import AutoModelForCausalLM, GenerationConfig

from grpo_lit.dry_run.footprint import Footprint
from grpo_lit.export import export
from grpo_lit.module import GRPOModule
from grpo_lit.strategies.checkpoint_io import AtomicCheckpointIO

#: By recipe: further settings. Of the first rollout, one of two ranks draws only groups without signal. 3 groups on 2
#: ranks are 2 and 1; GSPO's 4 and DAPO's 2 updates leave ranks without any. DAPO's rollouts are drawn ahead: the
#: engine's thread must not meet the ranks' collectives.
SETTINGS = {
    "grpo": ["--data.prompts_per_rollout", "3"],
    "dapo": ["--data.num_updates", "2", "--data.rollout.asynchronous", "{max_staleness: 7, queue_size: 1}"],
    "gspo": ["--data.prompts_per_rollout", "8"],
    "cispo": ["--data.train", "toys.TwoDomains"],
}
ALTERNATING = "{{class_path: toys.Alternating, init_args: {{until: {}}}}}"
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
        more = []
        if recipe in SETTINGS:  # DAPO asks three prompts for each of 5 groups
            reward = ALTERNATING.format(15 if recipe == "dapo" else 8)
            more = [*SETTINGS[recipe], "--data.rewards.rewards.some.reward", reward]
        arguments = (folder, ragged_model, strategy, recipe, [*more, *words], resume)
        told = [fit(*arguments)] if strategy == "single" else pair(fit, *arguments)
        assert all(rank["global_step"] == 5 for rank in told)
        return [{"folder": Path(folder), **rank} for rank in told]

    return make


def assert_equal(two: list[Run], one: Run, atol: float = 1e-6) -> None:
    """Weights and losses are equal to 1e-6; norms, of 10^5 squares added in float32, to 5e-6 of the largest."""
    for rank in two:
        assert rank["weights"].keys() == one["weights"].keys()
        for name, tensor in one["weights"].items():
            said = f"{name} of a rank differs"
            torch.testing.assert_close(
                rank["weights"][name], tensor, rtol=0, atol=atol, msg=lambda text, said=said: f"{said}: {text}"
            )
        for name, digits in (("loss", 1), ("grad_norm", 5)):  # of a resumed run, the last ones
            bound = digits * atol * max(1.0, *map(abs, one[name]))
            assert rank[name] == pytest.approx(one[name][-len(rank[name]) :], rel=0, abs=bound), name


@pytest.mark.parametrize(
    ("recipe", "strategy"),
    [*((recipe, strategy) for recipe in SETTINGS for strategy in ("ddp", "fsdp2")), ("grpo", "fsdp"), ("dapo", "fsdp")],
)
def test_two_processes_equal_one(run: Callable[..., list[Run]], ragged_model: str, recipe: str, strategy: str) -> None:
    """Field bug F1: ranks without signal keep step. Field bug F6: one norm, which clips."""
    (one,), two = run("single", recipe), run(strategy, recipe)
    assert {rank["launcher"] for rank in two} == {"TorchElasticEnvironment"}
    before = AutoModelForCausalLM.from_pretrained(ragged_model).state_dict()
    assert max(float((one["weights"][name] - tensor).abs().max()) for name, tensor in before.items()) > 1e-3
    assert_equal(two, one)
    clipped = [norm > 0.5 for norm in one["grad_norm"]]  # model.gradient_clip_norm
    assert any(clipped)
    assert len({length for step in one["lengths"] for length in step}) > 3
    assert [sum(step) for step in zip(*(rank["signal"] for rank in two), strict=True)] == one["signal"]
    assert any(min(step) == 0 < max(step) for step in zip(*(rank["signal"] for rank in two), strict=True))
    # Of the first rollout one rank drew only groups without signal, and not fewer of them; later both had some.
    first, second = (rank["drawn"][0] for rank in two)
    assert len(first) - len(second) in (0, 1)
    assert any(first)
    assert second
    assert not any(second)
    assert any(min(step) > 0 for step in zip(*(rank["signal"] for rank in two), strict=True))


def logged(folder: Path) -> dict[str, list[float]]:
    """Return what a run's CSV logger wrote, by name."""
    with (folder / "logs" / "version_0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name]) for row in rows if row[name]] for name in rows[0]}


def test_ranks_that_draw_different_domains_log_both(run: Callable[..., list[Run]]) -> None:
    """Field bug F5: in the first step one rank has only math, the other only code, and both reduce the same names."""
    (one,), two = run("single", "cispo"), run("ddp", "cispo")
    for domain in ("math", "code"):
        rates = [logged(folder)[f"reward/correct/{domain}"] for folder in (one["folder"], two[0]["folder"])]
        assert len(rates[0]) == 5
        assert rates[1] == pytest.approx(rates[0])


#: Adam divides a gradient by its own size: d/dg lr g / (|g| + eps) <= lr / eps, so that of an element whose gradient is
#: all but 0 the rounding decides, up to lr in a step. Here elements without a gradient have 0 on any number of ranks,
#: and nearly all others are far above their rounding, so that a weight is off by 1 % of one step at most.
ADAM = "{class_path: torch.optim.AdamW, init_args: {lr: 1.0e-3, weight_decay: 0.1}}"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_equal_one_with_adam(run: Callable[..., list[Run]], strategy: str) -> None:
    (one,), two = (run(name, "cispo", "--model.optimizer", ADAM) for name in ("single", strategy))
    assert_equal(two, one, atol=1e-5)


def test_adam_leaves_no_more_equal_than_the_rounding_of_gradients() -> None:
    """Elements of gradients 1e-3 and 1e-9 that differ by 1e-9, in the first step: lr d eps / (|g| + eps)^2."""
    moved = []
    for rounding in (0.0, 1e-9):
        weight = torch.nn.Parameter(torch.zeros(2))
        weight.grad = torch.tensor([1e-3, 1e-9]) + rounding
        torch.optim.AdamW([weight], lr=1e-3).step()
        moved.append(weight.detach())
    small, large = (moved[1] - moved[0]).abs().tolist()
    assert small < 1e-9
    assert large == pytest.approx(1e-3 * (2 / 12 - 1 / 11), rel=1e-3)  # 1e-9 and 2e-9 over what they are with an eps


#: Every option of FSDP2 at once; none of them changes a result.
OPTIONS = """{trainer: {strategy: {class_path: grpo_lit.strategies.FSDP2, init_args: {reshard_after_forward: false,
  cpu_offload: true, save_distributed_checkpoint: false}}}, model: {gradient_checkpointing: true}}"""


def test_options_of_fsdp2_change_no_result(run: Callable[..., list[Run]]) -> None:
    """Offload to the CPU, recomputed activations, layers that stay gathered; and one file for a checkpoint."""
    (one,), two = run("single", "cispo"), run("fsdp2", "cispo", "--config", OPTIONS)
    assert_equal(two, one)
    assert (two[0]["folder"] / "saved" / "step=5.ckpt").is_file()
    assert max(rank["footprint"]["states"] for rank in two) <= 0.52 * one["footprint"]["states"]


def test_products_in_bf16_differ_by_their_rounding_alone(run: Callable[..., list[Run]]) -> None:
    """Weights and gradients stay float32; what shards are gathered to is cast where it is multiplied."""
    (exact,), (one,) = run("single", "cispo"), run("single", "cispo", "--trainer.precision", "bf16-mixed")
    for rank in run("fsdp2", "cispo", "--trainer.precision", "bf16-mixed"):
        assert {tensor.dtype for tensor in rank["weights"].values()} == {torch.float32}
        assert rank["grad_norm"][0] == pytest.approx(one["grad_norm"][0], rel=1e-3)
        assert rank["grad_norm"][0] != pytest.approx(exact["grad_norm"][0], rel=1e-6)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_what_one_rank_alone_may_leave_out_is_left_out_by_both(run: Callable[..., list[Run]], strategy: str) -> None:
    """Field bugs F1 and F9: OLMo 3 corrects for the sampler, whose log-probs are NaN in the third step on one rank; in
    the first, all sequences of one rank are masked."""
    words = ("--trainer.callbacks+=toys.Poison", "--trainer.callbacks+=toys.MaskFirstRank")
    words += ("--data.rollout.dynamic_sampling", "null")
    (one,), two = run("single", "olmo3", *words), run(strategy, "olmo3", *words)
    assert one["skipped"] == [0, 0, 1, 0, 0]
    assert [rank["skipped"] for rank in two] == [one["skipped"]] * 2
    assert [rank["trained"][0] for rank in two] == [0, one["trained"][0]]
    assert one["trained"][0] > 0
    assert_equal(two, one)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_run_stopped_between_two_updates_goes_on_the_same(run: Callable[..., list[Run]], strategy: str) -> None:
    """Field bug F3: each rank needs its own share of the rollout back."""
    straight = run(strategy, "dapo")
    stopped = straight[0]["folder"] / "saved" / "step=3.ckpt"
    for again, rank in zip(run(strategy, "dapo", resume=str(stopped)), straight, strict=True):
        assert len(again["loss"]) == 2
        assert_equal([again], rank, atol=0)


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


#: Nothing is saved on schedule before the interruption.
RARELY = """{class_path: callbacks.ModelCheckpoint,
  init_args: {dirpath: saved, filename: "{step}", every_n_train_steps: 4, save_last: link, save_on_exception: true}}"""


def test_sigterm_to_both_saves_what_was_learnt(
    run: Callable[..., list[Run]], pair: Pair, ragged_model: str, tmp_path: Path
) -> None:
    """In the third rollout; the shards that both write together are those of the undisturbed run's second step."""
    reward = ALTERNATING.format(8).replace("Alternating", "InterruptsBoth")
    words = [*SETTINGS["grpo"], "--data.rewards.rewards.some.reward", reward, "--trainer.callbacks", f"[{RARELY}]"]
    assert pair(interrupt, str(tmp_path / "run"), ragged_model, "fsdp2", words) == [143, 143]
    assert "SIGTERM: ended after step 2, the engine too; saved in saved/last.ckpt" in pair.logs()[0]
    undisturbed = run("fsdp2", "grpo")[0]["folder"] / "saved" / "step=2.ckpt"
    saved, expected = map(AtomicCheckpointIO().load_checkpoint, (tmp_path / "run/saved/last.ckpt", undisturbed))
    assert saved["global_step"] == 2
    for key in ("state_dict", "optimizer_states", "lr_schedulers"):
        torch.testing.assert_close(saved[key], expected[key], rtol=0, atol=0)


def test_a_gradient_of_norm_5_is_clipped_to_1_however_it_is_sharded(pair: Pair) -> None:
    """Field bug F6: (3, 4) becomes (.6, .8), of which a rank may hold one; its own norm would be 3, or 4."""
    for rank, clipped in enumerate(pair(clip_known_gradient)):
        share = [0.6, 0.8][rank : rank + 1]
        expected = {"whole": [0.6, 0.8], "fsdp": share, "fsdp2": share}
        for kind, (norm, own) in clipped.items():
            assert norm == pytest.approx(5.0)
            assert own == pytest.approx(expected.pop(kind), abs=1e-5)  # torch adds 1e-6 to the norm
        assert expected == {}


def test_no_rank_ever_holds_the_whole_model(pair: Pair, tiny_folder: Callable[..., Path]) -> None:
    """Made without memory, cut, and filled by reading what a rank keeps: half a model, and not much more at a time."""
    folder = str(tiny_folder("llama", hidden_size=256, intermediate_size=1024, num_hidden_layers=4))
    size = sum(parameter.nbytes for parameter in AutoModelForCausalLM.from_pretrained(folder).parameters())
    peaks = pair(peak_of_building, folder)
    print(f"{size} bytes of parameters; at most {peaks}")
    assert all(0.5 * size <= peak < 0.6 * size for peak in peaks)


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
        torch.testing.assert_close(tensor, one["weights"][name], rtol=0, atol=1e-6)


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
    for folder in (one["folder"], two[0]["folder"]):
        assert list(folder.glob("board/**/events.*"))
        lines = (folder / "logs" / "version_0" / "samples.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3, 4]
    said, again = logged(one["folder"]), logged(two[0]["folder"])
    assert said["optimization/epsilon_high"] == pytest.approx([0.01, 0.02, 0.03, 0.04, 0.05])
    assert said["reward/overlong_penalty"][0] < 0
    for name in SAME:
        assert again[name] == pytest.approx(said[name]), name


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
    assert time.monotonic() - started < 180  # with the start of both
    assert two._torchrun is None
