"""VLLMEngine: sampling with vLLM in processes of its own on this machine, weights through shared memory."""

import atexit
import importlib.util
import os
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import psutil
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from grpo_lit.errors import ConfigError, EngineError
from grpo_lit.rollout import Completion, FinishReason, Request, Sampling
from grpo_lit.rollouts.engine import Engine, EngineModel
from grpo_lit.rollouts.staging import CudaStage, SharedMemoryStage, Stage
from grpo_lit.rollouts.vllm_kept import kept_tokens, logprobs_to_ask
from grpo_lit.rollouts.vllm_process import (
    as_engine_error,
    call_while_alive,
    end_processes,
    engine_processes,
    environment,
    interruptible,
    own_device,
)

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams
    from vllm.logprobs import FlatLogprobs

T = TypeVar("T")

_GIB = 2**30
_WORKER = "grpo_lit.rollouts.vllm_worker"  # a name, not an import: it needs vLLM


class VLLMEngine(Engine):
    """Samples with ``vllm.LLM`` on this machine, on CPU and CUDA alike.

    vLLM lives in processes of its own; new weights reach them through shared memory and vLLM's weight transfer
    interface. Under DDP every rank has an engine, on CUDA on the rank's own device. ``top_p`` and ``min_p`` need a
    ``top_k`` beside them: kept tokens are read from the log-probs of the likeliest ones.

    Args:
        dtype: Of the engine's weights; ``auto``: bfloat16 on CUDA, float32 on CPU, where it agrees with the learner to
            1e-5 nats, and is three times faster unless the processor has bfloat16 instructions.
        max_num_seqs: Completions sampled at the same time.
        gpu_memory_utilization: Share of a CUDA device that vLLM takes; the learner has the rest.
        cpu_kv_cache_gib: Memory for keys and values on CPU [GiB].
        threads: Of the engine on CPU; ``null``: as many as torch uses in the learner, which waits meanwhile unless
            rollouts are drawn ahead.
        enforce_eager: Do not compile or record graphs; ``null``: true on CPU, where that takes longer than it saves.
        tensor_parallel_size: CUDA devices that share one engine.
        weight_transfer: ``shared_memory`` works everywhere; ``cuda_ipc`` keeps the weights on the CUDA device, which
            the learner and the engine must share.
        extra: Further arguments of ``vllm.LLM``, which win over all others.
    """

    kept_needs_top_k = True

    def __init__(
        self,
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        max_num_seqs: int = 256,
        gpu_memory_utilization: float = 0.4,
        cpu_kv_cache_gib: float = 2.0,
        threads: int | None = None,
        enforce_eager: bool | None = None,
        tensor_parallel_size: int = 1,
        weight_transfer: Literal["shared_memory", "cuda_ipc"] = "shared_memory",
        extra: dict[str, Any] | None = None,
    ) -> None:
        self.dtype, self.max_num_seqs, self.gpu_memory_utilization = dtype, max_num_seqs, gpu_memory_utilization
        self.cpu_kv_cache_gib, self.threads, self.enforce_eager = cpu_kv_cache_gib, threads, enforce_eager
        self.tensor_parallel_size, self.weight_transfer, self.extra = tensor_parallel_size, weight_transfer, extra or {}
        self._llm: LLM | None = None
        self._stage: Stage | None = None
        self._model: EngineModel | None = None
        self._processes: list[psutil.Process] = []
        self._sockets: tempfile.TemporaryDirectory[str] | None = None

    def start(self, model: EngineModel) -> None:
        """Start vLLM's processes with the model's own weights."""
        if importlib.util.find_spec("vllm") is None:
            raise ConfigError(
                "`engine` expected vLLM to be installed for VLLMEngine, but got no module named 'vllm': on CUDA run "
                "`pip install 'grpo-lit[vllm-cuda]'`, on CPU `bash scripts/setup`, or sample without vLLM with "
                "`--config configs/engine/transformers.yaml`"
            )
        on_cpu = not torch.cuda.is_available()
        if self.weight_transfer == "cuda_ipc" and (on_cpu or self.tensor_parallel_size > 1):
            raise ConfigError(
                "`weight_transfer` expected shared_memory unless learner and engine share one CUDA device, but got "
                "cuda_ipc: set it to shared_memory"
            )
        rank_zero_info(f"vLLM is starting with {model.path} (about half a minute) ...")
        began = time.monotonic()
        atexit.register(_close, weakref.ref(self))
        self._model = model
        others = engine_processes()
        self._sockets = tempfile.TemporaryDirectory(prefix="vllm-")
        with environment(self._variables(on_cpu)), interruptible():
            from vllm import LLM

            try:
                with as_engine_error("start"):
                    self._llm = LLM(**self._arguments(model, on_cpu))
            finally:
                self._processes = [process for process in engine_processes() if process not in others]
                if self._llm is None:
                    end_processes(self._processes)
        stage = CudaStage if self.weight_transfer == "cuda_ipc" else SharedMemoryStage
        dtype = self._llm.model_config.dtype
        assert isinstance(dtype, torch.dtype)  # vLLM has resolved the name by now
        self._stage = stage(dtype)
        rank_zero_info(f"vLLM started in {time.monotonic() - began:.0f} s")

    @property
    def weight_dtype(self) -> torch.dtype | None:
        """Precision of matrices on their way to vLLM; ``None`` before it has started."""
        return None if self._stage is None else self._stage.dtype

    def _variables(self, on_cpu: bool) -> dict[str, str]:
        variables = {
            "GRPO_LIT_LEARNER_PID": str(os.getpid()),
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
            "VLLM_RPC_BASE_PATH": self._sockets.name if self._sockets else tempfile.gettempdir(),
            "VLLM_NO_USAGE_STATS": os.environ.get("VLLM_NO_USAGE_STATS", "1"),
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a forked copy of a process with threads may hang
            "PYTHONWARNINGS": "ignore",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        if on_cpu:
            # Left alone, vLLM binds itself to all cores but one: that is one thread of two.
            variables |= {
                "OMP_NUM_THREADS": str(self.threads or torch.get_num_threads()),
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            }
        return variables | own_device(self.tensor_parallel_size)

    def _arguments(self, model: EngineModel, on_cpu: bool) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "model": model.path,
            "dtype": ("float32" if on_cpu else "bfloat16") if self.dtype == "auto" else self.dtype,
            "max_model_len": model.max_length,
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
                "max_num_batched_tokens": max(4096, model.max_length),
            }
            if self.tensor_parallel_size == 1:
                # vLLM's default on CPU, one more process for the model, costs a core: the engine spins while it waits.
                arguments["distributed_executor_backend"] = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
        else:
            arguments["gpu_memory_utilization"] = self.gpu_memory_utilization
        return arguments | self.extra

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace every weight, forget cached prefixes, then take the version; a failure closes the engine."""
        llm, stage = self._started, self._stage
        assert stage is not None
        self.weight_version = None
        try:
            self._call("take new weights", llm.start_weight_update)
            for chunk in stage.chunks(weights):
                self._call("take new weights", partial(llm.update_weights, {"update_info": chunk.to_dict()}))
            self._call("take new weights", partial(llm.finish_weight_update, weight_version=str(version)))
            if not self._call("forget cached prefixes", llm.reset_prefix_cache):
                raise EngineError("vLLM kept prefixes of the old weights in its cache: requests were still running")
        except BaseException:
            self.close()  # half the weights are new: nothing may be sampled from that
            raise
        self.weight_version = version

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Draw one completion per request, in order; see :class:`Engine`."""
        if not requests:
            return []
        self.check_sampling(sampling)
        vocabulary = self._started.model_config.get_vocab_size()
        self._check_lengths([len(request.prompt_ids) for request in requests])
        parameters = [self._parameters(request.seed, sampling, vocabulary) for request in requests]
        outputs = self._run([request.prompt_ids for request in requests], parameters)
        return [self._completion(output, sampling, vocabulary) for output in outputs]

    def _parameters(self, seed: int, sampling: Sampling, vocabulary: int) -> "SamplingParams":
        from vllm import SamplingParams

        return SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            max_tokens=sampling.max_tokens,
            seed=seed,
            logprobs=logprobs_to_ask(sampling, vocabulary),  # 0: of the emitted token alone
            flat_logprobs=True,
            # Only the model's own list counts, not the tokenizer's end-of-text token on top of it.
            stop_token_ids=list(self._stops),
            ignore_eos=True,
            # vLLM would leave a stop token out of the text that is not special; see `_completion`.
            detokenize=False,
        )

    def _completion(self, output: "RequestOutput", sampling: Sampling, vocabulary: int) -> Completion:
        (drawn,) = output.outputs
        tokens, found = tuple(drawn.token_ids), cast("FlatLogprobs", drawn.logprobs)
        logprobs = tuple(found.logprobs[i] if sampling.temperature > 0 else 0.0 for i in found.start_indices)
        kept = kept_tokens(found, vocabulary) if sampling.truncates else None
        text = self._started.get_tokenizer().decode(tokens, skip_special_tokens=True)
        reason: FinishReason = "stop" if tokens and tokens[-1] in self._stops else "length"
        return Completion(tokens, logprobs, text, reason, self.weight_version or 0, kept)

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return log p(token_t | tokens before t) at temperature 1 for every token but the first [nats]."""
        from vllm import SamplingParams

        self._check_lengths([len(token_ids)])
        parameters = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        (output,) = self._run([tuple(token_ids)], [parameters])
        assert output.prompt_logprobs is not None
        # The first token has no log-prob. One is given for each other token, and one for the likeliest beside it.
        pairs = zip(output.prompt_logprobs[1:], token_ids[1:], strict=True)
        return [found[token].logprob for found, token in pairs if found is not None]

    def _run(self, prompts: Sequence[tuple[int, ...]], parameters: "list[SamplingParams]") -> "list[RequestOutput]":
        from vllm import TokensPrompt

        inputs = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
        return self._call("sample", partial(self._started.generate, inputs, parameters, use_tqdm=False))

    def _call(self, doing: str, function: Callable[[], T]) -> T:
        with as_engine_error(doing):
            return call_while_alive(self._processes, function)

    def _check_lengths(self, lengths: Sequence[int]) -> None:
        limit = self._model.max_length - 1 if self._model else 0
        if self._llm is not None and not 0 < min(lengths) <= max(lengths) <= limit:
            wrong = max(lengths) if max(lengths) > limit else min(lengths)
            raise EngineError(
                f"`prompt_ids` expected 1 to {limit} tokens (the engine's max_length less one), but got "
                f"{wrong}: drop long prompts, or raise the length limits of the data"
            )

    def close(self) -> None:
        """End vLLM's processes and free the shared memory."""
        llm, self._llm = self._llm, None
        stage, self._stage = self._stage, None
        self.weight_version = None
        if stage is not None:
            stage.close()
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
            end_processes(self._processes)
        if self._sockets is not None:
            self._sockets.cleanup()  # vLLM leaves its sockets behind

    @property
    def _stops(self) -> tuple[int, ...]:
        return self._model.stop_token_ids if self._model else ()

    @property
    def _started(self) -> "LLM":
        if self._llm is None:
            raise EngineError("the engine expected `start` before anything else, but it is not started")
        return self._llm


def _close(engine: "weakref.ref[VLLMEngine]") -> None:
    alive = engine()
    if alive is not None:
        alive.close()
