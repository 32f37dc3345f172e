"""VLLMEngine: sampling with vLLM in processes of its own on this machine, weights through shared memory."""

import atexit
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
from grpo_lit.rollout import Completion, Request, Sampling
from grpo_lit.rollouts.engine import Engine, EngineModel
from grpo_lit.rollouts.staging import CudaStage, SharedMemoryStage, Stage
from grpo_lit.rollouts.vllm_kept import completion_of
from grpo_lit.rollouts.vllm_options import (
    VLLMOptions,
    check_installed,
    check_lengths,
    sampling_arguments,
    score_arguments,
)
from grpo_lit.rollouts.vllm_process import (
    LEARNER_PID,
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
        self.options = VLLMOptions(
            dtype,
            max_num_seqs,
            gpu_memory_utilization,
            cpu_kv_cache_gib,
            threads,
            enforce_eager,
            tensor_parallel_size,
            extra,
        )
        self.weight_transfer = weight_transfer
        self._llm: LLM | None = None
        self._stage: Stage | None = None
        self._model: EngineModel | None = None
        self._processes: list[psutil.Process] = []
        self._sockets: tempfile.TemporaryDirectory[str] | None = None

    def start(self, model: EngineModel) -> None:
        """Start vLLM's processes with the model's own weights."""
        check_installed(type(self).__name__)
        on_cpu = not torch.cuda.is_available()
        if self.weight_transfer == "cuda_ipc" and (on_cpu or self.options.tensor_parallel_size > 1):
            raise ConfigError(
                "`weight_transfer` expected shared_memory unless learner and engine share one CUDA device, but got "
                "cuda_ipc: set it to shared_memory"
            )
        rank_zero_info(f"vLLM is starting with {model.path} ...")
        began = time.monotonic()
        atexit.register(_close, weakref.ref(self))
        self._model = model
        others = engine_processes()
        self._sockets = tempfile.TemporaryDirectory(prefix="vllm-")
        variables = self.options.variables(on_cpu, self._sockets.name) | {LEARNER_PID: str(os.getpid())}
        variables |= own_device(self.options.tensor_parallel_size)
        with environment(variables), interruptible():
            from vllm import LLM

            try:
                with as_engine_error("start"):
                    self._llm = LLM(**self.options.arguments(model.path, model.max_length, on_cpu))
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

        return SamplingParams(**sampling_arguments(seed, sampling, vocabulary, self._stops), flat_logprobs=True)

    def _completion(self, output: "RequestOutput", sampling: Sampling, vocabulary: int) -> Completion:
        (drawn,) = output.outputs
        tokens, found = tuple(drawn.token_ids), cast("FlatLogprobs", drawn.logprobs)
        text = self._started.get_tokenizer().decode(tokens, skip_special_tokens=True)
        version = self.weight_version or 0
        return completion_of(tokens, found, text, sampling, vocabulary, self._stops, version)

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return log p(token_t | tokens before t) at temperature 1 for every token but the first [nats]."""
        from vllm import SamplingParams

        self._check_lengths([len(token_ids)])
        parameters = SamplingParams(**score_arguments())
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
        if self._llm is not None and self._model is not None:
            check_lengths(lengths, self._model.max_length)

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
