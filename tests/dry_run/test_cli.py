"""scripts/dry_run takes the configuration of fit, and says what will not fit."""

from pathlib import Path

import pytest
from jsonargparse import Namespace

from grpo_lit.dry_run.cli import chosen_strategy, main, ranks, tell_what_does_not_fit
from grpo_lit.dry_run.room import GIB, Room
from grpo_lit.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"


def words(model: Path, *overlays: str) -> list[str]:
    files = [CONFIGS / f"{name}.yaml" for name in ("base", *overlays)]
    return [*(word for file in files for word in ("--config", str(file))), "--model.checkpoint", str(model)]


def test_a_configuration_of_fit_is_put_into_a_table(tiny_model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--data.max_prompt_tokens", "64", "--data.sampling.max_tokens", "32"]
    more = ["--memory-gib", "4", "--trainer.precision", "bf16"]  # Lightning's short name
    more += ["--model.activation_offload", "true"]
    assert main([*words(tiny_model_path, "recipe/grpo", "engine/transformers", "strategy/fsdp2"), *small, *more]) == 0
    said = capsys.readouterr()
    assert "a rank of 2" in said.out
    assert "fsdp2 *" in said.out
    (tokens,) = [line for line in said.out.splitlines() if "completion tokens" in line]
    assert tokens.count("4,096") == 2  # 32 prompts, 8 answers of 32 tokens: 8,192 on one rank
    assert said.err == ""
    assert "a rank may take 4.00 GiB: --memory-gib" in said.out
    assert "activations wait pinned in the machine's memory, beside a GPU, and are not counted" in said.out
    (moved,) = [line for line in said.out.splitlines() if line.startswith("│ activations, moved")]
    assert moved.count("(0.") == 3
    assert "* what the configuration chooses" in said.out
    # 64 answers at a time, of a rank of 16 prompts and 8 answers: 2 layers of 95 keys and values of 64 floats.
    (cache,) = [line for line in said.out.splitlines() if line.startswith("│ engine's cache")]
    assert cache.count(f"{64 * 2 * 95 * 2 * 64 * 4 / 2**30:.3f}") == 3


def test_what_does_not_fit_is_told_and_fails(tiny_model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--data.max_prompt_tokens", "64", "--data.sampling.max_tokens", "32", "--memory-gib", "0.001"]
    assert main([*words(tiny_model_path, "recipe/dapo"), *small, "--world-size", "4"]) == 1
    said = capsys.readouterr()
    assert "a rank of 4" in said.out
    for name in ("single", "ddp", "fsdp2"):
        assert f"warning: {name} does not fit: " in said.err
    assert "model.max_tokens_per_micro_batch" in said.err


def test_one_process_has_the_machine_to_itself(capsys: pytest.CaptureFixture[str]) -> None:
    rooms = {"single": Room(4 * GIB, "", on_device=False), "ddp": Room(2 * GIB, "", on_device=False)}
    assert tell_what_does_not_fit(dict.fromkeys(rooms, 3 * 2**30), rooms, "single") == 0
    assert capsys.readouterr().err.startswith("warning: ddp does not fit: 3.00 of 2.00 GiB")


def test_a_mistake_is_answered_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(tmp_path / "nothing", "recipe/grpo", "strategy/single")) == 2
    assert "model.checkpoint" in capsys.readouterr().err


def test_ranks_are_those_of_the_trainer() -> None:
    for devices, nodes, count in ((2, 1, 2), ([0, 1], 3, 6), ("4", 2, 8)):
        assert ranks(Namespace(devices=devices, num_nodes=nodes)) == count
    with pytest.raises(ConfigError, match="world-size"):
        ranks(Namespace(devices="auto", num_nodes=1))


def test_the_star_is_at_what_the_run_would_be(tiny_model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``auto`` on 4 devices is DDP, and FSDP2's own settings count."""
    more = ["--data.max_prompt_tokens", "64", "--data.sampling.max_tokens", "32", "--memory-gib", "4"]
    keep = "{class_path: grpo_lit.strategies.FSDP2, init_args: {reshard_after_forward: false}}"
    gathered = []
    for strategy in ("auto", keep):
        main([*words(tiny_model_path, "recipe/dapo"), *more, "--trainer.devices", "4", "--trainer.strategy", strategy])
        said = capsys.readouterr().out
        assert ("ddp *" in said, "fsdp2 *" in said) == (strategy == "auto", strategy == keep)
        (line,) = [line for line in said.splitlines() if "collectives per step: weights" in line]
        gathered.append(int(line.split("│")[-2].replace(",", "")))
    assert gathered[1] / gathered[0] == 3 / 5  # 2 layers and the rest: each once, or layers in backward again


def test_strategies_go_by_the_names_of_their_overlays() -> None:
    names = ("auto", "ddp", "ddp_find_unused_parameters_true")
    assert [chosen_strategy(name) for name in names] == ["single", "ddp", "ddp"]
    assert chosen_strategy("auto", world_size=2) == "ddp"  # as Lightning takes it
    for path, name in {"grpo_lit.strategies.FSDP2": "fsdp2", "lightning.pytorch.strategies.DDPStrategy": "ddp"}.items():
        assert chosen_strategy(Namespace(class_path=path)) == name


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--world-size", "-1"], "world-size"),
        (["--world-size", "0"], "world-size"),
        (["--memory-gib", "0"], "memory-gib"),
        (["--data.num_updates", "0"], "data.num_updates"),
        (["--data.sampling.max_tokens", "100000"], "data.sampling.max_tokens"),
        (["--data.num_updates", "33"], "data.prompts_per_rollout"),
        (["--trainer.strategy", "nonsense"], "nonsense"),
        (["--config", str(CONFIGS / "strategy/deepspeed.yaml")], "the parameters of ddp"),
        (["--config", str(CONFIGS / "strategy/fsdp.yaml")], "one of fsdp2"),
        (["--trainer.precision", "16"], "trainer.precision"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(
    more: list[str], named: str, tiny_model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--data.max_prompt_tokens", "64", "--data.sampling.max_tokens", "32"]
    assert main([*words(tiny_model_path, "recipe/grpo", "strategy/fsdp2"), *small, *more]) == 2
    said = capsys.readouterr().err
    assert named in said
    assert len(said.splitlines()) <= 2
