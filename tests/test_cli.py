"""The command line: every shipped YAML runs, mistakes are answered in a few lines, a second run is never refused."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from glossary import unexplained
from overlay import tiny_overlay
from torch.distributed.run import get_args_parser

from grpo_lit.ablate.cells import cells_of
from grpo_lit.ablate.spec import load_spec
from grpo_lit.cli import main, run
from grpo_lit.report.events import read_scalars

CONFIGS = Path(__file__).parents[1] / "configs"
#: Specifications of scripts/ablate are no overlays: tests/ablate.
FILES = [path.relative_to(CONFIGS) for path in CONFIGS.rglob("*.yaml")]
OVERLAYS = sorted(path.as_posix() for path in FILES if path.name != "base.yaml" and path.parts[0] != "ablation")

#: Of the tiny run: two rewards, groups large enough that dynamic sampling finds signal, prompts for all overlays.
REWARDS = {
    "rewards": {
        "answer": {"reward": {"class_path": "toys.EvenShare"}},
        "format": {"reward": {"class_path": "toys.EvenShare"}, "weight": 0.5},
    },
    "correct": "answer",
    "correct_at": 0.5,
}
QUIET = {"max_steps": 2, "enable_progress_bar": False, "enable_model_summary": False}


@pytest.fixture
def tiny_yaml(tmp_path: Path, tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An overlay that makes any configuration small; runs write under ``tmp_path``."""
    monkeypatch.chdir(tmp_path)
    train = {"class_path": "toys.Letters", "init_args": {"size": 40}}
    sampling = {"max_tokens": 5, "completions": 6}
    overlay = tiny_overlay(tiny_model_path, QUIET, train=train, rewards=REWARDS, sampling=sampling)
    del overlay["trainer"]["devices"]  # those of the overlay under test
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(overlay))
    return file


def words(subcommand: str, *files: Path | str) -> list[str]:
    return [subcommand, *(word for file in files for word in ("--config", str(file)))]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_overlay_trains_a_step(overlay: str, tiny_yaml: Path) -> None:
    single = ["--trainer.strategy", "auto", "--trainer.devices", "1"]  # two processes: tests/runs/test_ranks.py
    cli = run([*words("fit", CONFIGS / "base.yaml", CONFIGS / overlay, tiny_yaml), *single])
    assert cli.trainer.global_step == 2
    assert cli.trainer.callback_metrics["optimization/grad_norm"] > 0
    assert unexplained(set(cli.trainer.callback_metrics), rewards=("answer", "format")) == []
    assert ("system/queue_size" in cli.trainer.callback_metrics) == (overlay == "rollout/async.yaml")
    first_lines = (CONFIGS / overlay).read_text().split("model:")[0].split("trainer:")[0].split("data:")[0]
    assert "grpo-lit fit" in first_lines or "scripts/" in first_lines, "an overlay opens with the command that runs it"


#: What the panels promise, whatever else there is: TensorBoard's names in the order of README's glossary.
PROMISED = {
    "reward": "total answer format correct",
    "exploration": "entropy token_prob group_diversity group_similarity solve_all solve_none zero_signal accepted",
    "length": "mean correct incorrect truncated repetition kept dropped overlong",
    "optimization": "loss grad_norm lr clip_low clip_high epsilon_low epsilon_high ratio_max kl_reference kl_old"
    " advantage_std entropy_coefficient",
    "system": "mismatch_kl mismatch_abs ess is_cut staleness_mean staleness_max rollout_tokens_per_s tokens_sampled"
    " learner_tokens_per_s time_rollout time_learn time_sync time_step replay_size kept_tokens memory_learn",
    "shadow": "cosine_gspo norm_gspo",
    "val/letters": "greedy avg@4 pass@2 pass@4 maj@4 length truncated length@4 reward_format",
}


def test_every_metric_is_written_by_a_short_run_and_explained_in_readme(tiny_yaml: Path, tmp_path: Path) -> None:
    more = {
        "trainer": {"callbacks+": [{"class_path": "callbacks.EntropyTarget", "init_args": {"target": 1.0}}]},
        "model": {
            "objective": {"corrections+": [{"class_path": "TruncatedIS"}]},
            "shadows": {"gspo": {"surrogate": {"class_path": "SequenceClip"}}},
        },
        "data": {"evaluation": {"completions": 4}, "sampling": {"top_k": 50, "completions": 3}},
    }
    file = tmp_path / "more.yaml"
    file.write_text(yaml.safe_dump(more))
    overlays = ("recipe/deepseek_v32", "rollout/dynamic", "rollout/replay", "rollout/curriculum", "callback/overlong",
                "callback/clip_schedule", "callback/watch")  # fmt: skip
    run(words("fit", CONFIGS / "base.yaml", *(CONFIGS / f"{name}.yaml" for name in overlays), tiny_yaml, file))
    written = set(read_scalars(tmp_path / "runs"))
    promised = {f"{panel}/{name}" for panel, names in PROMISED.items() for name in names.split()}
    assert sorted(promised - written) == []
    assert unexplained(written, rewards=("answer", "format")) == []


def test_validate_test_and_predict(tiny_yaml: Path, tmp_path: Path) -> None:
    for subcommand in ("validate", "test"):
        cli = run(words(subcommand, CONFIGS / "base.yaml", tiny_yaml))
        assert 0 <= cli.trainer.callback_metrics["val/letters/greedy"] <= 1
    run(words("predict", CONFIGS / "base.yaml", tiny_yaml))


@pytest.mark.parametrize("logger", [["--trainer.logger.init_args.version", "0"], ["--trainer.logger", "false"]])
def test_a_second_run_in_the_same_folder_is_not_refused(tiny_yaml: Path, logger: list[str]) -> None:
    """Field bug G1."""
    for _ in range(2):
        cli = run([*words("fit", CONFIGS / "base.yaml", tiny_yaml), *logger, "--trainer.max_steps", "1"])
        assert cli.trainer.global_step == 1


NUMBERS = (
    "{model: {optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 3e-4}}}, data: {sampling: {top_p: 9e-1}}}"
)


@pytest.mark.parametrize("loader", ["file", "argument", "ablation"])
def test_numbers_mean_the_same_in_every_loader(
    loader: str, tiny_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Field bug G2: YAML 1.1, which scripts/ablate reads, takes 3e-4 for text."""
    (file := tmp_path / "numbers.yaml").write_text(NUMBERS)
    given = str(file)
    if loader == "argument":
        given = json.dumps(yaml.safe_load(NUMBERS))
    if loader == "ablation":
        text = f"output: {tmp_path}\nmetric: val/a/greedy\nseeds: [0]\nbase: [{CONFIGS}/base.yaml]\noverlays: "
        (spec := tmp_path / "spec.yaml").write_text(f"{text}{{numbers: {NUMBERS}}}")
        given = next(word for word in cells_of(load_spec(spec), [])[1].arguments if "3e-4" in word)
    with pytest.raises(SystemExit):
        run([*words("fit", CONFIGS / "base.yaml", tiny_yaml), "--config", given, "--print_config"])
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["model"]["optimizer"]["init_args"]["lr"] == 3e-4
    assert config["data"]["sampling"]["top_p"] == 0.9


def test_a_run_goes_on_from_its_last_checkpoint(tiny_yaml: Path, tmp_path: Path) -> None:
    run(words("fit", CONFIGS / "base.yaml", tiny_yaml))
    last = next(tmp_path.rglob("last.ckpt"))
    cli = run([*words("fit", CONFIGS / "base.yaml", tiny_yaml), "--ckpt_path", str(last), "--trainer.max_steps", "4"])
    assert cli.trainer.global_step == 4


def launched() -> list[list[str]]:
    """Return the words of every command for several machines that an overlay's comment shows."""
    comments = [file.read_text().replace("\\\n#", "") for file in (CONFIGS / "strategy").glob("*.yaml")]
    lines = [line.removeprefix("#").split() for text in comments for line in text.splitlines()]
    return [words for words in lines if words and words[0] in ("torchrun", "srun")]


def test_commands_for_several_machines_parse(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(CONFIGS.parent)
    commands = launched()
    assert {command[0] for command in commands} == {"torchrun", "srun"}
    for command in commands:
        if command[0] == "torchrun":
            parsed = get_args_parser().parse_args(command[1:])
            assert [parsed.training_script, parsed.training_script_args[0]] == ["grpo-lit", "fit"]
        start = command.index("grpo-lit")
        given = dict(pairwise(command[1:start]))
        tasks = int(given.get("--nproc-per-node") or given["--ntasks-per-node"])
        with pytest.raises(SystemExit) as stop:
            run([*command[start + 1 :], "--print_config"])
        assert stop.value.code == 0
        trainer = yaml.safe_load(capsys.readouterr().out)["trainer"]
        assert int(trainer["devices"]) == tasks
        assert trainer["num_nodes"] == int(given.get("--nnodes") or given["--nodes"])


PARALLEL = "{trainer: {strategy: {class_path: grpo_lit.strategies.FSDP2, init_args: {tensor_parallel_size: 2}}}}"
MISTAKES = {
    "unknown_class": (["--model.objective.surrogate", "TokenKlip"], ["model.objective.surrogate", "TokenKlip"]),
    "wrong_type": (["--data.prompts_per_rollout", "many"], ["data.prompts_per_rollout", "many"]),
    "float_for_int": (["--trainer.max_steps", "1.5"], ["trainer.max_steps", "1.5"]),
    "power_for_int": (["--data.prompts_per_rollout", "1e6"], ["data.prompts_per_rollout", "1000000.0"]),
    "unknown_key": (
        ["--model.max_tokens", "3"],
        ["model.max_tokens", "did you mean --model.max_tokens_per_micro_batch", "grpo-lit fit --help"],
    ),
    "misspelt_key": (["--trainer.max_step", "3"], ["did you mean --trainer.max_steps"]),
    "missing_model": (["--model.checkpoint", "no/such-model"], ["model.checkpoint", "no/such-model"]),
    "no_model_given": (["--model.checkpoint", "???"], ["model.checkpoint"]),
    "greedy_training": (["--data.sampling.temperature", "0"], ["data.sampling.temperature"]),
    "lightnings_clipping": (["--trainer.gradient_clip_val", "1"], ["model.gradient_clip_norm"]),
    "missing_checkpoint": (["--ckpt_path", "nowhere.ckpt"], ["ckpt_path", "nowhere.ckpt", "where nothing is"]),
    "no_checkpoint": (["--ckpt_path", "tiny.yaml"], ["ckpt_path", "tiny.yaml", "cannot be read"]),
    "logs_in_a_file": (["--trainer.logger.init_args.save_dir", "tiny.yaml"], ["trainer.logger", "tiny.yaml"]),
    "lightnings_accumulation": (["--trainer.accumulate_grad_batches", "2"], ["model.max_tokens_per_micro_batch"]),
    "missing_config": (["--config", "nowhere.yaml"], ["nowhere.yaml"]),
    "bad_bound": (["--model.objective.surrogate.init_args.low", "-1"], ["low"]),
    "half_precision": (["--trainer.precision", "16-true"], ["trainer.precision"]),
    "no_such_strategy": (["--trainer.strategy", "fsdp3"], ["`trainer.strategy`", "fsdp3"]),
    "option_of_no_strategy": (["--config", PARALLEL], ["trainer.strategy", "tensor_parallel_size"]),
    "no_devices": (["--trainer.devices", "0"], ["`trainer.devices`", "0"]),
    "no_such_device": (["--trainer.accelerator", "tpu"], ["`trainer.accelerator`", "tpu"]),
    "lightning_refuses": (["--trainer.max_steps", "-5"], ["`trainer.max_steps: -5`"]),
    "no_chat_template": (["--data.template.user", "no placeholder"], ["data.template.user", "{question}"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_answered_in_a_few_lines_that_name_the_key(
    name: str, tiny_yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, expected = MISTAKES[name]
    with pytest.raises(SystemExit) as stop:
        main([*words("fit", CONFIGS / "base.yaml", tiny_yaml), *arguments])
    assert stop.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    answer = "\n".join(lines[-12:])
    assert "Traceback" not in "\n".join(lines)
    for word in expected:
        assert word in answer


def test_a_broken_checkpoint_is_told_as_well_where_nothing_is_trained(
    tiny_yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*words("validate", CONFIGS / "base.yaml", tiny_yaml), "--ckpt_path", "tiny.yaml"])
    assert stop.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: `ckpt_path` expected a whole checkpoint")


def test_help_explains_the_parts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "Optimizer steps a rollout is cut into" in text
    assert "Divided into the logits" in text or "temperature" in text
    with pytest.raises(SystemExit):
        main(["fit", "--model.objective.help", "Objective"])
    assert "How good was a completion?" in capsys.readouterr().out


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "grpo_lit", "--help"], capture_output=True, text=True, check=True)
    assert all(subcommand in done.stdout for subcommand in ("fit", "validate", "test", "predict"))


def test_a_reward_that_reads_tokens_takes_the_models_tokenizer(tiny_yaml: Path, tiny_model_path: Path) -> None:
    form = "{reward: {class_path: TokenFormat, init_args: {opening: <|im_start|>, closing: <|endoftext|>}}, weight: 0}"
    options = ["--data.rewards.rewards", f"{{answer: {{reward: toys.EvenShare}}, form: {form}}}"]
    cli = run([*words("fit", CONFIGS / "base.yaml", tiny_yaml), *options, "--trainer.max_steps", "1"])
    assert cli.config.fit.data.rewards.init_args.rewards["form"].reward.init_args.tokenizer == str(tiny_model_path)
    assert "reward/form" in cli.trainer.callback_metrics
