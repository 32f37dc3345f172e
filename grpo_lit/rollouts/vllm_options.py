"""What vLLM is told, however it is run: by ``vllm.LLM`` in this machine's processes, or by servers."""

import importlib.util
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from grpo_lit.errors import ConfigError, EngineError
from grpo_lit.rollout import Sampling
from grpo_lit.rollouts.vllm_kept import logprobs_to_ask

_GIB = 2**30
_WORKER = "grpo_lit.rollouts.vllm_worker"  # a name, not an import: it needs vLLM


@dataclass(frozen=True)
class VLLMOptions:
    """How vLLM runs the model.

    Attributes:
        dtype: Of the engine's weights; ``auto``: bfloat16 on CUDA, float32 on CPU.
        max_num_seqs: Completions sampled at the same time.
        gpu_memory_utilization: Share of a CUDA device that vLLM takes; the learner has the rest.
        cpu_kv_cache_gib: Memory for keys and values on CPU [GiB].
        threads: On CPU; ``null``: as many as torch would use.
        enforce_eager: Do not compile or record graphs; ``null``: true on CPU, where that takes longer than it saves.
        tensor_parallel_size: CUDA devices that share one engine.
        extra: Further arguments of vLLM by their names in Python, which win over all others.
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_num_seqs: int = 256
    gpu_memory_utilization: float = 0.4
    cpu_kv_cache_gib: float = 2.0
    threads: int | None = None
    enforce_eager: bool | None = None
    tensor_parallel_size: int = 1
    extra: dict[str, Any] | None = None

    def arguments(self, path: str, max_length: int, on_cpu: bool) -> dict[str, Any]:
        """Return the arguments of ``vllm.LLM``.

        Args:
            path: Folder or hub id of the model.
            max_length: Most tokens of a prompt and its completion together.
            on_cpu: Whether there is no CUDA device.
        """
        arguments: dict[str, Any] = {
            "model": path,
            "dtype": ("float32" if on_cpu else "bfloat16") if self.dtype == "auto" else self.dtype,
            "max_model_len": max_length,
            "max_num_seqs": self.max_num_seqs,
            "enforce_eager": on_cpu if self.enforce_eager is None else self.enforce_eager,
            "tensor_parallel_size": self.tensor_parallel_size,
            "logprobs_mode": "processed_logprobs",  # after temperature and top-k: what the tokens were drawn from
            "max_logprobs": -1,  # as many as a top-k needs; no more are listed than a request asks for
            "generation_config": "vllm",  # no top-p or repetition penalty from the model's generation_config.json
            "weight_transfer_config": {"backend": "grpo_lit_stage"},
            "worker_extension_cls": f"{_WORKER}.WorkerExtension",
            "use_tqdm_on_load": False,
            "seed": 0,
        }
        if on_cpu:
            arguments |= {
                "kv_cache_memory_bytes": int(self.cpu_kv_cache_gib * _GIB),
                # A prompt split over two steps rewinds its request's random stream, which CPU generators cannot:
                # vLLM 0.32 dies of it ("CPU Generator does not use offset").
                "enable_chunked_prefill": False,
                # The least that vLLM's CPU attention takes. Prefixes are shared in whole blocks, and a question is
                # shorter than the default of 128: the completions of a group would each compute it again.
                "block_size": 32,
                "max_num_batched_tokens": max(4096, max_length),
            }
            if self.tensor_parallel_size == 1:
                # vLLM's default on CPU, one more process for the model, costs a core: the engine spins while it waits.
                arguments["distributed_executor_backend"] = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
        else:
            arguments["gpu_memory_utilization"] = self.gpu_memory_utilization
        return arguments | (self.extra or {})

    def variables(self, on_cpu: bool, sockets: str) -> dict[str, str]:
        """Return the environment variables of vLLM's processes.

        Args:
            on_cpu: Whether there is no CUDA device.
            sockets: Folder for the sockets between them.
        """
        variables = {
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
            "VLLM_RPC_BASE_PATH": sockets,
            "VLLM_NO_USAGE_STATS": os.environ.get("VLLM_NO_USAGE_STATS", "1"),
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a forked copy of a process with threads may hang
            "PYTHONWARNINGS": "ignore",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        if on_cpu:
            import torch  # takes a second, which the help of scripts/serve need not wait for

            # Left alone, vLLM binds itself to all cores but one: that is one thread of two.
            variables |= {
                "OMP_NUM_THREADS": str(self.threads or torch.get_num_threads()),
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            }
        return variables


def flags(arguments: dict[str, Any]) -> list[str]:
    """Return arguments of ``vllm.LLM`` as command-line words of ``vllm serve``; the model is the first of them."""
    words: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if name == "model":
            words.insert(0, str(value))
        elif isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            words.append(f"--{flag}={json.dumps(value) if isinstance(value, dict | list) else value}")
    return words


def sampling_arguments(seed: int, sampling: Sampling, vocabulary: int, stops: Sequence[int]) -> dict[str, Any]:
    """Return the arguments of ``vllm.SamplingParams``, plain types only.

    Args:
        seed: Of this completion.
        sampling: How it is drawn.
        vocabulary: How many tokens there are.
        stops: Every token that ends it.
    """
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "max_tokens": sampling.max_tokens,
        "seed": seed,
        "logprobs": logprobs_to_ask(sampling, vocabulary),  # 0: of the emitted token alone
        # Only the model's own list counts, not the tokenizer's end-of-text token on top of it.
        "stop_token_ids": list(stops),
        "ignore_eos": True,
        # vLLM would leave a stop token out of the text that is not special: the learner's side decodes.
        "detokenize": False,
    }


def score_arguments() -> dict[str, Any]:
    """Return the arguments of ``vllm.SamplingParams`` that give the log-prob of each token of the prompt."""
    return {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}


def check_lengths(lengths: Sequence[int], max_length: int) -> None:
    """Refuse prompts that leave no room for a completion, which vLLM would refuse in other words.

    Raises:
        EngineError: A prompt is empty or too long.
    """
    limit = max_length - 1
    if not 0 < min(lengths) <= max(lengths) <= limit:
        wrong = max(lengths) if max(lengths) > limit else min(lengths)
        raise EngineError(
            f"`prompt_ids` expected 1 to {limit} tokens (the engine's max_length less one), but got "
            f"{wrong}: drop long prompts, or raise the length limits of the data"
        )


def check_installed(engine: str) -> None:
    """Refuse to start where there is no vLLM.

    Raises:
        ConfigError: Names the ways to get it, or to do without.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            f"`engine` expected vLLM to be installed for {engine}, but got no module named 'vllm': on CUDA run "
            "`pip install 'grpo-lit[vllm-cuda]'`, on CPU `bash scripts/setup`, or sample without vLLM with "
            "`--config configs/engine/transformers.yaml`"
        )
