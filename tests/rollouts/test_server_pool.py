"""Servers fail, and no sample is lost, doubled or drawn from other weights than it should be. Needs no vLLM."""

import asyncio
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from unittest.mock import Mock

import pytest
import torch
from fake_vllm import KEY, FakeVLLM, tokens_of
from torch import Tensor

from grpo_lit.errors import EngineError
from grpo_lit.rollout import Request, Sampling
from grpo_lit.rollouts.engine import EngineModel
from grpo_lit.rollouts.patience import Patience, ServerError
from grpo_lit.rollouts.serve_guard import KEY_VARIABLE
from grpo_lit.rollouts.server import Server
from grpo_lit.rollouts.server_pool import ServerPool
from grpo_lit.rollouts.vllm_options import VLLMOptions
from grpo_lit.rollouts.vllm_server import VLLMServerEngine

WEIGHTS = {"matrix": torch.arange(6.0).view(2, 3), "vector": torch.ones(4)}
#: Six prompts, four samples each.
REQUESTS = [Request((10 + prompt, 20), 4 * prompt + sample) for prompt in range(6) for sample in range(4)]
SAMPLING = Sampling(1.0, 5)


def patience(**changes: float) -> Patience:
    times = {"start_s": 2.0, "request_s": 5.0, "sync_s": 5.0, "health_s": 5.0, "backoff_s": 0.01}
    return Patience(**(times | {"retries": 2} | changes))


@pytest.fixture
def fake() -> Iterator[Callable[..., FakeVLLM]]:
    made = []

    def make(*arguments: object, **options: object) -> FakeVLLM:
        made.append(FakeVLLM(*arguments, **options))
        return made[-1]

    yield make
    for server in made:
        server.close()


@pytest.fixture
def engine_of(tiny_model_path, monkeypatch) -> Iterator[Callable[..., VLLMServerEngine]]:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    engines = []

    def make(
        *servers: FakeVLLM,
        capacity: int = 8,
        version: int | None = 3,
        transport: str = "shared_memory",
        **changes: float,
    ) -> VLLMServerEngine:
        options = VLLMOptions(max_num_seqs=capacity)
        urls = [server.url for server in servers]
        engine = VLLMServerEngine(urls, options=options, transport=transport, patience=patience(**changes))
        engines.append(engine)
        engine.start(EngineModel(str(tiny_model_path), (2,), 64))
        if version is not None:
            engine.load_weights(WEIGHTS.items(), version)
        return engine

    yield make
    for engine in engines:
        engine.close()


def check(engine: VLLMServerEngine, requests: list[Request] = REQUESTS) -> None:
    """Every request has its own answer, in order, with the engine's version."""
    drawn = engine.generate(requests, SAMPLING)
    expected = [tuple(tokens_of(list(request.prompt_ids), request.seed, 5)) for request in requests]
    assert [completion.token_ids for completion in drawn] == expected
    assert {completion.weight_version for completion in drawn} == {engine.weight_version}
    for completion in drawn:
        assert completion.logprobs == pytest.approx([-token / 100 for token in completion.token_ids])
        assert completion.finish_reason == ("stop" if completion.token_ids[-1] == 2 else "length")


def seeds(bodies: list[dict]) -> list[int]:
    return sorted(body["sampling_params"]["seed"] for body in bodies)


@pytest.fixture
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# Routing.


def test_a_prompts_samples_go_to_one_server_and_all_servers_have_work(fake, engine_of, no_warning):
    one, two = fake(), fake()
    check(engine_of(one, two))
    assert seeds(one.answered + two.answered) == [request.seed for request in REQUESTS]  # each exactly once
    prompts = [{tuple(body["token_ids"]) for body in server.answered} for server in (one, two)]
    assert not prompts[0] & prompts[1]
    assert all(prompts)  # how many each gets depends on who answers first


def test_no_server_is_asked_for_more_at_a_time_than_it_samples(fake, engine_of):
    server = fake(lambda body, count: "slow")
    check(engine_of(server, capacity=3))
    assert server.most_at_once == 3


# Failures while sampling.


@pytest.mark.parametrize("at", [0, 5])
def test_the_requests_of_a_server_that_dies_go_to_the_other(fake, engine_of, at):
    dies, lives = fake(lambda body, count: "die" if count == at else "slow"), fake()
    engine = engine_of(dies, lives)
    with pytest.warns(UserWarning, match=f"{dies.url} is out, and tried again with the next weights"):
        check(engine)
    assert len(seeds(lives.answered)) == len(set(seeds(lives.answered)))  # nothing was drawn twice there
    before = len(dies.asked)
    check(engine)
    assert len(dies.asked) == before


def test_a_hung_request_is_drawn_elsewhere_and_its_late_answer_counts_for_nothing(fake, engine_of, no_warning):
    hangs, other = fake(lambda body, count: "hang" if count == 0 else None), fake()
    engine = engine_of(hangs, other, request_s=2.0)
    check(engine)
    (seed,) = Counter(seeds(hangs.asked)) - Counter(seeds(hangs.answered))
    assert seed in seeds(other.answered)
    hangs.released.set()
    check(engine)  # one hung request is no reason to do without a server
    assert len(hangs.asked) > 12


def test_a_server_that_answers_nothing_any_more_is_found_by_its_health(fake, engine_of):
    frozen, other = fake(lambda body, count: "freeze"), fake()
    engine = engine_of(frozen, other, health_s=1.0, retries=0, request_s=60.0)
    with pytest.warns(UserWarning, match=r"tried again with the next weights: no answer to /health within 1 s"):
        check(engine)


def test_errors_of_a_server_are_retried_there_then_elsewhere(fake, engine_of):
    fails_once, fails = fake(lambda body, count: 500 if count == 0 else None), fake(lambda body, count: 503)
    engine = engine_of(fails_once, fails)
    with pytest.warns(UserWarning, match=r"requests failed in a row; the last one: .*status 503 as told") as caught:
        check(engine)
    assert {fails.url in str(warning.message) for warning in caught} == {True}  # the other one is still in
    assert seeds(fails_once.answered) == [request.seed for request in REQUESTS]


@pytest.mark.parametrize("deed", ["drop", "abort", 429])
def test_a_request_is_asked_again_where_its_prefix_is(fake, engine_of, no_warning, deed):
    server, other = fake(lambda body, count: deed if count == 2 else None), fake()
    check(engine_of(server, other))
    # How groups are shared depends on who is faster; one request is asked twice, of the same server.
    here, there = (Counter(body["sampling_params"]["seed"] for body in one.asked) for one in (server, other))
    assert sorted(here.values())[-2:] == [1, 2]
    assert set(there.values()) == {1}
    assert sorted([*here, *there]) == sorted(request.seed for request in REQUESTS)


def test_a_server_that_was_started_anew_is_not_asked(fake, engine_of):
    first, other = fake(), fake()
    engine = engine_of(first, other)
    first.die()
    anew = fake(port=first.port)  # holds the weights of the model's folder
    with pytest.warns(UserWarning, match="holds weights of version default instead of 3"):
        check(engine)
    assert anew.asked == []
    engine.load_weights(WEIGHTS.items(), 4)
    check(engine)
    assert anew.asked != []


def test_field_bug_e7_a_stale_server_is_never_asked_and_a_stale_answer_never_taken(fake, engine_of):
    stale, other = fake(), fake()
    engine = engine_of(stale, other)
    stale.version = "2"
    with pytest.warns(UserWarning, match="holds weights of version 2 instead of 3"):
        check(engine)
    assert stale.asked == []
    engine.load_weights(WEIGHTS.items(), 4)
    stale.deed = lambda body, count: "stale"  # it says 4, and samples with something else
    with pytest.warns(UserWarning, match="sampled with weights of version stale instead of 4"):
        check(engine)


def test_when_no_server_is_left_the_error_names_each_and_what_it_said_last(fake, engine_of):
    one, two = fake(lambda body, count: "die"), fake(lambda body, count: 500)
    engine = engine_of(one, two)
    with pytest.warns(UserWarning, match="is out"), pytest.raises(EngineError) as caught:
        engine.generate(REQUESTS, SAMPLING)
    assert "none of the vLLM servers" in str(caught.value)
    assert f"{one.url}: " in str(caught.value)
    assert f"{two.url}: " in str(caught.value)
    assert "status 500 as told" in str(caught.value)


def test_what_a_server_refuses_is_not_asked_again(fake, engine_of, no_warning):
    server = fake(lambda body, count: 400 if body["sampling_params"]["seed"] == 0 else None)
    engine = engine_of(server)
    with pytest.raises(EngineError, match=r"refused /inference/v1/generate with status 400: .*as told"):
        engine.generate(REQUESTS[:1], SAMPLING)
    assert len(server.asked) == 1
    check(engine, REQUESTS[1:])


# Weights.

SYNC = ["pause", "update_weight_version", "start_weight_update", "update_weights"]
SYNC += ["finish_weight_update", "reset_prefix_cache", "resume"]


def test_field_bug_e4_the_order_of_a_sync_and_what_arrives(fake, engine_of):
    servers = fake(), fake()
    engine = engine_of(*servers)
    for server in servers:
        assert server.calls[-len(SYNC) :] == SYNC  # the cache is empty before anything is sampled again
        assert server.version.startswith("3-")
        assert not server.is_paused
        assert server.weights.keys() == WEIGHTS.keys()
        assert all(torch.equal(server.weights[name], tensor) for name, tensor in WEIGHTS.items())
    assert engine.weight_version == 3


@pytest.mark.parametrize("step", ["pause", "update_weights", "reset_prefix_cache"])
def test_a_server_that_fails_in_a_sync_is_out_until_it_takes_a_whole_one(fake, engine_of, step):
    fails, other = fake(), fake()
    engine = engine_of(fails, other)
    fails.fails_at = {step}
    with pytest.warns(UserWarning, match=f"{fails.url} is out, .*{step} is told to fail"):
        engine.load_weights(WEIGHTS.items(), 4)
    check(engine)
    assert fails.asked == []
    fails.fails_at = set()
    engine.load_weights(WEIGHTS.items(), 5)
    check(engine)
    assert fails.asked != []


@pytest.mark.parametrize("answer", ["2-new", ServerError("broken", is_gone=True)])
def test_a_look_at_a_server_that_an_update_overtakes_takes_it_out_of_nothing(answer):
    # It would end the process group that the update sends through.
    pool = ServerPool([], Patience(retries=0))
    server = Mock(spec=Server, version="1-old", is_alive=True, recovering=asyncio.Lock())

    async def held_version() -> str:
        server.version = None  # the update has begun
        if isinstance(answer, ServerError):
            raise answer
        return answer

    server.held_version = held_version
    asyncio.run(pool._check_version(server))
    server.version = "1-old"
    asyncio.run(pool._note_failure(server, ServerError("gone", is_gone=True)))
    server.leave.assert_not_called()


def test_if_no_server_takes_the_weights_the_engine_closes(fake, engine_of):
    server = fake(fails_at=("finish_weight_update",))
    engine = engine_of(server, version=None)
    with (
        pytest.warns(UserWarning, match="is out"),
        pytest.raises(EngineError, match=r"took the weights.*\n.*told to fail"),
    ):
        engine.load_weights(WEIGHTS.items(), 4)
    with pytest.raises(EngineError, match="expected `start`"):
        engine.generate(REQUESTS, SAMPLING)


def test_a_learner_that_dies_while_it_sends_leaves_servers_that_say_so_and_the_next_one_goes_on(fake, engine_of):
    server = fake()
    engine = engine_of(server)

    def weights() -> Iterator[tuple[str, Tensor]]:
        yield "first", torch.ones(2, 2)
        raise MemoryError("the learner's own")

    with pytest.raises(MemoryError, match="own"):
        engine.load_weights(weights(), 4)
    assert (server.version, server.is_updating or server.is_paused) == ("incomplete", True)
    following = engine_of(server, version=None)
    server.is_updating = True  # as when the learner was killed in the middle
    following.load_weights(WEIGHTS.items(), 1)
    check(following)
    assert server.version.startswith("1-")


def test_the_same_step_of_another_run_is_another_version(fake, engine_of):
    server, other = fake(), fake()
    engine = engine_of(server, other)
    engine_of(server)  # takes one of the first run's servers, at the same step
    with pytest.warns(UserWarning, match="holds weights of version 3-"):
        check(engine)
    assert server.asked == []


# Through process groups.


def test_a_group_is_kept_while_its_server_is_and_a_server_that_fails_comes_back_with_a_fresh_one(fake, engine_of):
    fails, other = fake(), fake()
    engine = engine_of(fails, other, transport="process_group")
    first = (fails.link.address, other.link.address)
    assert first[0] != first[1]
    engine.load_weights([("matrix", torch.full((2, 3), 4.0))], 4)
    check(engine)
    assert (fails.link.address, other.link.address) == first

    fails.link.close()  # its worker is gone
    fails.link = None
    with pytest.warns(UserWarning, match=f"{fails.url} is out, and tried again with the next weights"):
        engine.load_weights([("matrix", torch.full((2, 3), 5.0))], 5)
    assert torch.equal(other.weights["matrix"], torch.full((2, 3), 5.0))
    asked = len(fails.asked)
    check(engine)
    assert len(fails.asked) == asked

    engine.load_weights(WEIGHTS.items(), 6)
    check(engine)
    assert len(fails.asked) > asked
    assert fails.link.address not in first
    assert other.link.address == first[1]
    for server in (fails, other):
        assert all(torch.equal(server.weights[name], tensor) for name, tensor in WEIGHTS.items())


def test_a_server_that_was_started_anew_gets_a_group_of_its_own_and_close_leaves_no_thread(fake, engine_of, no_warning):
    first = fake()
    engine = engine_of(first, transport="process_group")
    first.die()
    anew = fake(port=first.port)
    engine.load_weights(WEIGHTS.items(), 4)
    assert torch.equal(anew.weights["matrix"], WEIGHTS["matrix"])
    engine.close()
    deadline = time.monotonic() + 10
    while (names := [thread.name for thread in threading.enumerate()]) and "grpo-lit-link" in names:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_if_no_server_joins_its_group_the_error_says_so(fake, engine_of):
    server = fake(fails_at=("init_weight_transfer_engine",))
    with (
        pytest.warns(UserWarning, match="is out"),
        pytest.raises(EngineError, match=r"took the weights.*\n.*told to fail"),
    ):
        engine_of(server, transport="process_group", sync_s=1.0)


# The end.


def test_close_ends_a_call_that_is_running(fake, engine_of):
    server = fake(lambda body, count: "hang")
    engine, errors = engine_of(server), []

    def draw() -> None:
        with pytest.raises(EngineError, match="closed before it could answer") as caught:
            engine.generate(REQUESTS, SAMPLING)
        errors.append(caught.value)

    thread = threading.Thread(target=draw)
    thread.start()
    while not server.asked:
        thread.join(0.01)
    engine.close()
    thread.join(5)
    assert len(errors) == 1
    with pytest.raises(EngineError, match="expected `start`"):
        engine.generate(REQUESTS, SAMPLING)
    engine.close()
