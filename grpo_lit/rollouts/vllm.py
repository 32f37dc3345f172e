"""VLLMEngine: sampling with vLLM in processes of its own on this machine, weights through shared memory."""

import atexit
import os
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import psutil
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from grpo_lit.errors import ConfigError, EngineError
from grpo_lit.rollout import Completion, Request, Sampling
from grpo_lit.rollouts.engine import Engine, EngineModel
from grpo_lit.rollouts.in_flight import InFlight, Updates
from grpo_lit.rollouts.staging import CudaStage, SharedMemoryStage, Stage
from grpo_lit.rollouts.vllm_in_flight import drawn_stepwise, versions_of
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
from grpo_lit.rollouts.vllm_sleep import Sleep, SleepLevel

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams, TokensPrompt
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
        sleep: What the engine does with its device memory while the learner works on the same device. ``none``: it
            stays. ``level1``: weights go to host memory, keys and values are dropped. ``level2``: both are dropped;
            the next weight sync brings every weight anyway, so that it costs no host memory and loses nothing. CUDA
            only, and only where rollouts are not drawn ahead: the engine is never idle then. While it sleeps the
            learner may fill the device, so ``gpu_memory_utilization`` may be what rollouts alone need.
        extra: Further arguments of ``vllm.LLM``, which win over all others.
    """

    kept_needs_top_k = True
    in_flight: tuple[InFlight, ...] = ("wait", "keep", "resume")

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
        sleep: SleepLevel = "none",
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
        self.weight_transfer, self.sleep = weight_transfer, sleep
        self._sleep = Sleep(sleep)
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
        arguments = self.options.arguments(model.path, model.max_length, on_cpu) | self._sleep.arguments(on_cpu)
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
                    self._llm = LLM(**arguments)
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
        llm = self._started
        with self._replaced_by(version):
            self._call("wake its weights", partial(self._sleep.wake_weights, llm))
            self._send(weights, version)
            self._call("wake its cache", partial(self._sleep.wake_cache, llm))
            if not self._call("forget cached prefixes", llm.reset_prefix_cache):
                raise EngineError("vLLM kept prefixes of the old weights in its cache: requests were still running")

    def _load_through(self, recompute: bool, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace every weight while requests are in progress, and let them go on."""
        llm = self._started
        with self._replaced_by(version):
            self._call("pause", partial(llm.sleep, level=0, mode="keep"))
            self._send(weights, version)
            if recompute:  # running requests go back to the queue, with what they have drawn, and are prefilled anew
                self._call("forget what is in progress", partial(llm.reset_prefix_cache, reset_running_requests=True))
            self._call("go on", partial(llm.wake_up, tags=["scheduling"]))

    @contextmanager
    def _replaced_by(self, version: int | None) -> Iterator[None]:
        self.weight_version = None
        try:
            yield
        except BaseException:
            self.close()  # half the weights are new: nothing may be sampled from that
            raise
        self.weight_version = version

    def _send(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        llm, stage = self._started, self._stage
        assert stage is not None
        self._call("take new weights", llm.start_weight_update)
        for chunk in stage.chunks(weights):
            self._call("take new weights", partial(llm.update_weights, {"update_info": chunk.to_dict()}))
        self._call("take new weights", partial(llm.finish_weight_update, weight_version=str(version)))

    @property
    def rests(self) -> bool:
        """Whether :meth:`rest` gives memory back."""
        return self.sleep != "none"

    def rest(self) -> None:
        """Sleep, where ``sleep`` says so; a failure closes the engine."""
        if self._llm is not None and self.rests:
            with self._replaced_by(None if self._sleep.drops_weights else self.weight_version):
                self._call("sleep", partial(self._sleep.rest, self._llm))

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Draw one completion per request, in order; see :class:`Engine`."""
        return self._generated(requests, sampling, None)

    def generate_through(self, requests: Sequence[Request], sampling: Sampling, updates: Updates) -> list[Completion]:
        """Draw, and take new weights between any two steps of vLLM; see :class:`Engine`."""
        return self._generated(requests, sampling, updates)

    def _generated(self, requests: Sequence[Request], sampling: Sampling, updates: Updates | None) -> list[Completion]:
        if not requests:
            return []
        self.check_sampling(sampling)
        vocabulary = self._started.model_config.get_vocab_size()
        self._check_lengths([len(request.prompt_ids) for request in requests])
        parameters = [self._parameters(request.seed, sampling, vocabulary) for request in requests]
        outputs = self._run([request.prompt_ids for request in requests], parameters, updates)
        return [self._completion(output, sampling, vocabulary) for output in outputs]

    def _parameters(self, seed: int, sampling: Sampling, vocabulary: int) -> "SamplingParams":
        from vllm import SamplingParams

        return SamplingParams(**sampling_arguments(seed, sampling, vocabulary, self._stops), flat_logprobs=True)

    def _completion(self, output: "RequestOutput", sampling: Sampling, vocabulary: int) -> Completion:
        (drawn,) = output.outputs
        tokens, found = tuple(drawn.token_ids), cast("FlatLogprobs", drawn.logprobs)
        text = self._started.get_tokenizer().decode(tokens, skip_special_tokens=True)
        whole = completion_of(tokens, found, text, sampling, vocabulary, self._stops, self.weight_version or 0)
        if self.weight_version is None:  # its own weights, which have no number
            return whole
        return whole.sampled_by(versions_of((s.version, s.start, s.end) for s in drawn.weight_versions or ()))

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

    def _run(
        self,
        prompts: Sequence[tuple[int, ...]],
        parameters: "list[SamplingParams]",
        updates: Updates | None = None,
    ) -> "list[RequestOutput]":
        llm = self._started
        self._call("wake", partial(self._sleep.wake, llm))
        inputs = self._inputs(prompts)
        if updates is None:
            return self._call("sample", partial(llm.generate, inputs, parameters, use_tqdm=False))
        take = partial(updates.take, partial(self._load_through, updates.recompute))
        return self._call("sample", partial(drawn_stepwise, llm, inputs, parameters, take))

    def _inputs(self, prompts: Sequence[tuple[int, ...]]) -> "list[TokensPrompt]":
        from vllm import TokensPrompt

        # What is cached of a prefix is found by requests of the same weights alone.
        salt = f"weights {self.weight_version}"
        return [TokensPrompt(prompt_token_ids=list(prompt), cache_salt=salt) for prompt in prompts]

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
        self.weight_version, self._sleep.is_asleep = None, False
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
