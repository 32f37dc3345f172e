"""New weights for servers in the middle of their completions: nothing is lost, doubled, or of weights nobody knows."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
from fake_vllm import KEY, FakeVLLM, tokens_of

from grpo_lit.errors import EngineError
from grpo_lit.rollout import Completion, Request, Sampling
from grpo_lit.rollouts.engine import EngineModel
from grpo_lit.rollouts.in_flight import Load, Updates
from grpo_lit.rollouts.patience import Patience
from grpo_lit.rollouts.serve_guard import KEY_VARIABLE
from grpo_lit.rollouts.vllm_options import VLLMOptions
from grpo_lit.rollouts.vllm_server import VLLMServerEngine

WEIGHTS = {"matrix": torch.arange(6.0).view(2, 3), "vector": torch.ones(4)}
#: Four prompts, two samples each.
REQUESTS = [Request((10 + prompt, 20), 2 * prompt + sample) for prompt in range(4) for sample in range(2)]
SAMPLING = Sampling(1.0, 6)


@pytest.fixture
def engine_of(tiny_model_path, monkeypatch) -> Iterator[Callable[..., VLLMServerEngine]]:
    """Servers that hold version 3."""
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    engines, servers = [], []

    def make(*fakes: FakeVLLM) -> VLLMServerEngine:
        patience = Patience(start_s=2.0, request_s=9.0, sync_s=5.0, health_s=5.0, retries=2, backoff_s=0.01)
        options = VLLMOptions(max_num_seqs=2)
        engine = VLLMServerEngine([fake.url for fake in fakes], options=options, patience=patience)
        engines.append(engine)
        servers.extend(fakes)
        engine.start(EngineModel(str(tiny_model_path), (2,), 64))
        engine.load_weights(WEIGHTS.items(), 3)
        return engine

    yield make
    for engine in engines:
        engine.close()
    for server in servers:
        server.close()


def across(body: dict, count: int) -> str | None:
    """The first two requests of a server go on across an update."""
    return "across" if count < 2 else None


@dataclass(frozen=True)
class WhenCrossing(Updates):
    """New weights come once, when all servers hold requests that wait for them."""

    servers: list[FakeVLLM]
    loaded: list[int] = field(default_factory=list)

    def take(self, load: Load) -> bool:
        ready = not self.loaded and all(server.crossing.is_set() for server in self.servers)
        if ready:
            self.loaded.append(7)
            load(WEIGHTS.items(), 7)
        return ready


def through(engine: VLLMServerEngine, servers: list[FakeVLLM], recompute: bool = True) -> list[Completion]:
    """Draw everything, and check that each answer is there once, with its own tokens."""
    drawn = engine.generate_through(REQUESTS, SAMPLING, WhenCrossing(recompute, servers))
    for request, completion in zip(REQUESTS, drawn, strict=True):
        assert list(completion.token_ids) == tokens_of(list(request.prompt_ids), request.seed, 6)
        assert list(completion.token_versions) == sorted(completion.token_versions)
        assert {*completion.token_versions} <= {3, 7}
    return drawn


@pytest.mark.parametrize("recompute", [True, False])
def test_field_bug_e4_requests_go_on_and_caches_are_those_of_their_weights(engine_of, recompute):
    servers = [FakeVLLM(across), FakeVLLM(across)]
    engine = engine_of(*servers)
    before = [len(server.queries) for server in servers]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drawn = through(engine, servers, recompute)
    crossed = [completion for completion in drawn if completion.versions is not None]
    assert [completion.versions for completion in crossed] == [(3, 3, 3, 7, 7, 7)] * 4
    assert engine.weight_version == 7
    for server, first in zip(servers, before, strict=True):
        quiet = ("/inference", "/weight_info", "/health")
        asked = [query.strip("/") for query in server.queries[first:] if not query.startswith(quiet)]
        assert asked == [
            "pause?mode=keep&clear_cache=false",
            *["update_weight_version", "start_weight_update", "update_weights", "finish_weight_update"],
            *(["reset_prefix_cache?reset_running_requests=true"] if recompute else []),
            "resume",
        ]
        salts = [body["cache_salt"].partition("-")[0] for body in server.asked]
        assert salts[:2] == ["3", "3"]
        assert {*salts[2:]} <= {"7"}  # what is sent after the update finds nothing that the old weights left
    assert sum(len(server.answered) for server in servers) == len(REQUESTS)


def test_what_a_server_loses_in_an_update_is_drawn_by_the_other_after_it(engine_of):
    fails, other = FakeVLLM(across), FakeVLLM(across)
    engine = engine_of(fails, other)
    fails.fails_at = {"update_weights"}
    with pytest.warns(UserWarning, match=f"{fails.url} is out, .*update_weights is told to fail"):
        drawn = through(engine, [fails, other])
    # The two that waited on the one that is out are drawn anew, whole, with the new weights.
    assert sum(completion.versions is not None for completion in drawn) == 2
    assert len(other.asked) == len(REQUESTS)


def test_if_no_server_takes_the_weights_the_engine_closes(engine_of):
    server = FakeVLLM(across)
    engine = engine_of(server)
    server.fails_at = {"finish_weight_update"}
    with pytest.warns(UserWarning, match="is out"), pytest.raises(EngineError, match="took the weights"):
        through(engine, [server])
    with pytest.raises(EngineError, match="expected `start`"):
        engine.generate(REQUESTS, SAMPLING)


def test_tokens_of_weights_that_a_server_never_had_are_not_taken(engine_of):
    odd, other = FakeVLLM(lambda body, count: ("across", "stale")[count] if count < 2 else None), FakeVLLM(across)
    engine = engine_of(odd, other)
    with pytest.warns(UserWarning, match=f"{odd.url} is out, .*it sampled with weights of version stale"):
        through(engine, [other])
