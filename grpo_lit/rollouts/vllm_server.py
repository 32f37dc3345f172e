"""VLLMServerEngine: sampling with one or many vLLM servers, on this or other machines."""

import atexit
import os
import secrets
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from grpo_lit.errors import ConfigError, EngineError
from grpo_lit.policy.checkpoint import load_tokenizer
from grpo_lit.rollout import Completion, Request, Sampling
from grpo_lit.rollouts.background import BackgroundLoop
from grpo_lit.rollouts.engine import Engine, EngineModel
from grpo_lit.rollouts.in_flight import InFlight, Updates
from grpo_lit.rollouts.links import ProcessGroupStage
from grpo_lit.rollouts.patience import Patience
from grpo_lit.rollouts.serve import is_this_machine
from grpo_lit.rollouts.serve_guard import KEY_VARIABLE
from grpo_lit.rollouts.server import Pause, Server
from grpo_lit.rollouts.server_checks import agreed_settings, check_addresses, check_transport
from grpo_lit.rollouts.server_link import Links, link_device
from grpo_lit.rollouts.server_pool import ServerPool
from grpo_lit.rollouts.server_process import ServerProcess, end_servers
from grpo_lit.rollouts.staging import SharedFileStage, SharedMemoryStage, Stage
from grpo_lit.rollouts.vllm_in_flight import versions_of
from grpo_lit.rollouts.vllm_kept import ListedLogprobs, completion_of
from grpo_lit.rollouts.vllm_options import (
    VLLMOptions,
    check_installed,
    check_lengths,
    sampling_arguments,
    score_arguments,
)


class VLLMServerEngine(Engine):
    """Samples with vLLM servers over HTTP: servers of its own on this machine, or others that `scripts/serve` started.

    A server that fails is taken out and its requests go to the others; it is back with the next weight update. Seeds
    make a completion the same whoever draws it. Under several ranks each has servers of its own: every n-th of `urls`.
    `top_p` and `min_p` need a `top_k` beside them, as with VLLMEngine.

    Args:
        urls: Addresses of the servers, such as `http://10.0.0.2:8000`; `null`: start some on this machine, and end them
            with the run.
        servers: How many to start where `urls` is `null`; on CUDA they share this rank's device and its memory, so that
            servers on devices of their own are better started with `scripts/serve`.
        api_key_variable: Environment variable with the key of the servers in `urls`; servers started here get a key of
            their own.
        options: How vLLM runs the model on servers started here; those in `urls` have their own from `scripts/serve`,
            and of these only `max_num_seqs` counts: no server is sent more requests at a time.
        transport: How weights reach the servers: `shared_memory` on this machine, `shared_file` through a folder that
            learner and servers both see, `process_group` through a process group of the learner with
            each server: NCCL between CUDA devices of different machines, Gloo otherwise: servers on this machine may
            share the learner's device, between which NCCL carries nothing. A server that fails breaks its own group
            only, and has a new one with the next weights. The bytes are neither encrypted nor authenticated: between
            machines it is for networks that you trust.
        transport_folder: The folder of `shared_file`; it needs room for 256 MiB, or for the largest matrix.
        transport_host: Address of this machine at which servers find the learner with `process_group`; `null`: the one
            from which it reaches each server, 127.0.0.1 on this machine.
        pause: What a weight update between two calls does with completions that are still in progress, such as those
            that were given up as late: `wait` for them, or `abort` them. What it does in the middle of a call is
            `data.rollout.asynchronous.in_flight`.
        patience: How long to wait for a server, and how often to ask again.
    """

    kept_needs_top_k = True
    in_flight: tuple[InFlight, ...] = ("wait", "keep", "resume")

    def __init__(
        self,
        urls: list[str] | None = None,
        servers: int = 1,
        api_key_variable: str = KEY_VARIABLE,
        options: VLLMOptions | None = None,
        transport: Literal["shared_memory", "shared_file", "process_group"] = "shared_memory",
        transport_folder: Path | None = None,
        transport_host: str | None = None,
        pause: Literal["wait", "abort"] = "wait",
        patience: Patience | None = None,
    ) -> None:
        self.urls, self.servers, self.api_key_variable = urls, servers, api_key_variable
        self.options, self.patience = options or VLLMOptions(), patience or Patience()
        self.transport, self.transport_folder, self.pause = transport, transport_folder, pause
        self.transport_host = transport_host
        check_addresses(urls, servers, transport)
        check_transport(transport, transport_folder, transport_host)
        self._processes: list[ServerProcess] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._loop: BackgroundLoop | None = None
        self._pool: ServerPool | None = None
        self._stage: Stage | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._model: EngineModel | None = None
        self._vocabulary = self._scored = 0

    # ------------------------------------------------------------------ start and end

    def start(self, model: EngineModel) -> None:
        """Start servers where none are named, and wait until they answer."""
        began = time.monotonic()
        self._model, self._tokenizer = model, load_tokenizer(model.path)
        atexit.register(_close, weakref.ref(self))
        try:
            key, urls = self._start_servers(model) if self.urls is None else (self._own_key(), self._own_urls())
            self._loop = BackgroundLoop()
            self._pool = self._loop.run(self._made_pool(urls, key))
            settings = self._loop.run(self._pool.start())
            dtype, self._vocabulary = agreed_settings(settings, model)
            self._stage = self._made_stage(dtype, self._pool, settings)
        except BaseException:
            self.close()
            raise
        rank_zero_info(f"vLLM's servers answered after {time.monotonic() - began:.0f} s: {', '.join(urls)}")

    def _start_servers(self, model: EngineModel) -> tuple[str, list[str]]:
        check_installed(type(self).__name__)
        rank_zero_info(f"{self.servers} vLLM server(s) are starting with {model.path} ...")
        key = secrets.token_urlsafe(32)
        self._folder = tempfile.TemporaryDirectory(prefix="vllm-")
        for index in range(self.servers):
            log = Path(self._folder.name) / f"server{index}.log"
            self._processes.append(ServerProcess(model.path, model.max_length, self.options, key, log))
        return key, [process.url for process in self._processes]

    def _made_stage(self, dtype: torch.dtype, pool: ServerPool, settings: Sequence[dict[str, Any]]) -> Stage:
        if self.transport == "process_group":
            hosts = [str(urlsplit(server.url).hostname) for server in pool.servers]
            shared = self.urls is None or any(is_this_machine(host) for host in hosts)
            device = link_device([server["device"] for server in settings], shared)
            pool.links = Links(self.transport_host, device, self.patience.sync_s)
            return ProcessGroupStage(dtype, device)
        folder = self.transport_folder
        return SharedMemoryStage(dtype) if folder is None else SharedFileStage(dtype, folder)

    def _own_key(self) -> str:
        key = os.environ.get(self.api_key_variable)
        if not key:
            raise ConfigError(
                f"`api_key_variable` expected the environment variable {self.api_key_variable} to hold the servers' "
                "key, but got nothing: export what `scripts/serve` printed, or what it was started with"
            )
        return key

    def _own_urls(self) -> list[str]:
        """Return this rank's share: a server takes its weights from one learner."""
        ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
        rank, size = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if ranks else (0, 1)
        assert self.urls is not None
        if len(self.urls) < size:
            raise ConfigError(f"`urls` expected a server for each of {size} ranks, but got {len(self.urls)}")
        return self.urls[rank::size]

    async def _made_pool(self, urls: Sequence[str], key: str) -> ServerPool:
        """Make the servers in the loop that will use them."""
        processes = self._processes or [None] * len(urls)
        capacity = self.options.max_num_seqs
        pairs = zip(urls, processes, strict=True)
        servers = [Server(url, key, self.patience, capacity, process) for url, process in pairs]
        return ServerPool(servers, self.patience)

    def close(self) -> None:
        """Give up what is being sampled, and end the servers that were started here."""
        self.weight_version = None
        loop, self._loop = self._loop, None
        pool, self._pool = self._pool, None
        stage, self._stage = self._stage, None
        processes, self._processes = self._processes, []
        try:
            if loop is not None:
                loop.close(_closed(pool))
            if stage is not None:
                stage.close()
        finally:
            end_servers(processes)
            if self._folder is not None:
                self._folder.cleanup()

    # ------------------------------------------------------------------ weights

    @property
    def weight_dtype(self) -> torch.dtype | None:
        """Precision of matrices on their way to the servers; ``None`` before they have started."""
        return None if self._stage is None else self._stage.dtype

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace every weight of all servers that take them; if none does, or the learner fails, the engine closes."""
        self._load(self.pause, weights, version)

    def _load(self, pause: Pause, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        loop, pool = self._started
        stage = self._stage
        assert stage is not None
        self.weight_version = None
        try:
            loop.run(pool.begin_update(pause))
            for chunk in stage.chunks(weights):
                loop.run(pool.update(chunk.to_dict(), stage.to_send(chunk)))
            loop.run(pool.finish_update(version, pause))
        except BaseException:
            self.close()  # half the weights are new, and the servers say so: nothing may be sampled from that
            raise
        self.weight_version = version

    # ------------------------------------------------------------------ completions

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Draw one completion per request, in order; see :class:`Engine`."""
        return self._generated(requests, sampling, None)

    def generate_through(self, requests: Sequence[Request], sampling: Sampling, updates: Updates) -> list[Completion]:
        """Draw, and give all servers new weights while they do; see :class:`Engine`."""
        load = partial(self._load, "resume" if updates.recompute else "keep")
        return self._generated(requests, sampling, partial(updates.take, load))

    def _generated(
        self, requests: Sequence[Request], sampling: Sampling, look: Callable[[], object] | None
    ) -> list[Completion]:
        loop, pool = self._started
        if not requests:
            return []
        self.check_sampling(sampling)
        prompts = [request.prompt_ids for request in requests]
        self._check_prompts(prompts)
        stops = self._model.stop_token_ids if self._model else ()
        bodies = [
            _body(request.prompt_ids, sampling_arguments(request.seed, sampling, self._vocabulary, stops))
            for request in requests
        ]
        answers = loop.run(pool.answers(bodies, prompts), look)
        return [self._completion(answer, sampling, stops) for answer in answers]

    def _completion(self, answer: dict[str, Any], sampling: Sampling, stops: Sequence[int]) -> Completion:
        (drawn,) = answer["choices"]
        tokens, found = tuple(drawn["token_ids"]), ListedLogprobs.of(drawn["logprobs"]["content"] or ())
        assert self._tokenizer is not None
        text = str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))
        whole = completion_of(tokens, found, text, sampling, self._vocabulary, stops, self.weight_version or 0)
        if self.weight_version is None:  # their own weights, which have no number
            return whole
        spans = [(span["version"], span["start"], span["end"]) for span in drawn["weight_versions"] or ()]
        return whole.sampled_by(versions_of(spans))

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return log p(token_t | tokens before t) at temperature 1 for every token but the first [nats].

        Each call asks the next server, so that the probe after a weight update gets round to all of them.
        """
        loop, pool = self._started
        self._check_prompts([tuple(token_ids)])
        self._scored += 1
        answer = loop.run(pool.answer_of_next(_body(token_ids, score_arguments()), self._scored))
        # The first token has no log-prob. One is given for each other token, and one for the likeliest beside it.
        pairs = zip(answer["prompt_logprobs"][1:], token_ids[1:], strict=True)
        return [found[str(token)]["logprob"] for found, token in pairs]

    def _check_prompts(self, prompts: Sequence[tuple[int, ...]]) -> None:
        assert self._model is not None
        check_lengths([len(prompt) for prompt in prompts], self._model.max_length)
        highest = max(max(prompt) for prompt in prompts)
        if highest >= self._vocabulary:
            raise EngineError(
                f"`prompt_ids` expected tokens below {self._vocabulary}, the servers' vocabulary, but got {highest}: "
                "learner and servers must have the same model"
            )

    @property
    def _started(self) -> tuple[BackgroundLoop, ServerPool]:
        if self._loop is None or self._pool is None:
            raise EngineError("the engine expected `start` before anything else, but it is not started")
        return self._loop, self._pool


async def _closed(pool: ServerPool | None) -> None:
    if pool is not None:
        await pool.close()


def _body(token_ids: Sequence[int], sampling: dict[str, Any]) -> dict[str, Any]:
    return {"token_ids": list(token_ids), "sampling_params": sampling}


def _close(engine: "weakref.ref[VLLMServerEngine]") -> None:
    alive = engine()
    if alive is not None:
        alive.close()
