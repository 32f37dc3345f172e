"""VLLMServerEngine: what it refuses before it starts; and with a real server, that it draws what the policy says."""

import os
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from fake_vllm import KEY, FakeVLLM
from limits import possible
from torch import Tensor
from transformers import PreTrainedModel
from updates import ScriptedUpdates, logprobs_across

from grpo_lit.errors import ConfigError, EngineError
from grpo_lit.rollout import Request, Sampling
from grpo_lit.rollouts import server_process
from grpo_lit.rollouts.engine import EngineModel
from grpo_lit.rollouts.patience import Patience
from grpo_lit.rollouts.serve_guard import KEY_VARIABLE
from grpo_lit.rollouts.transformers import TransformersEngine
from grpo_lit.rollouts.vllm_options import VLLMOptions
from grpo_lit.rollouts.vllm_server import VLLMServerEngine

needs_vllm = pytest.mark.vllm
MAX_LENGTH = 64
STOPS = (2, 3)
PROMPTS = [tuple(range(40, 60)), tuple(range(100, 107))]


# What is refused.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"urls": []}, "`urls` expected at least one address"),
        ({"urls": ["127.0.0.1:8000"]}, "`urls` expected addresses such as http://127.0.0.1:8000, but got"),
        ({"urls": ["http://10.0.0.2:8000"]}, "`transport` expected shared_file or process_group for a server on"),
        ({"servers": 0}, "`servers` expected at least 1, but got 0"),
        ({"transport": "shared_file"}, "`transport_folder` expected a folder with `transport: shared_file`"),
        ({"transport_folder": Path("weights")}, "none otherwise, but got weights with shared_memory"),
        ({"transport_host": "10.0.0.1"}, "`transport_host` expected .* but got '10.0.0.1' with shared_memory"),
        ({"transport_host": "0.0.0.0", "transport": "process_group"}, "`transport_host` expected one address of this"),
    ],
)
def test_arguments_that_cannot_work_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        VLLMServerEngine(**arguments)


@pytest.mark.parametrize("changes", [{"health_s": 0.0}, {"retries": -1}, {"backoff_s": -0.5}])
def test_patience_that_waits_for_nothing_is_refused(changes):
    (name,) = changes
    with pytest.raises(ConfigError, match=rf"`patience\.{name}` expected a positive number"):
        Patience(**changes)
    assert [Patience(backoff_s=0.5).pause_before(retry) for retry in range(3)] == [0.5, 1.0, 2.0]


@pytest.fixture
def fake(monkeypatch) -> Iterator[FakeVLLM]:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    server = FakeVLLM()
    yield server
    server.close()


def start(fake: FakeVLLM, path: Path, **options: object) -> VLLMServerEngine:
    engine = VLLMServerEngine([fake.url], patience=Patience(start_s=1.0, retries=0), **options)
    engine.start(EngineModel(str(path), STOPS, MAX_LENGTH))
    return engine


def test_without_a_key_or_with_a_wrong_one_the_variable_is_named_and_the_key_is_not(fake, tiny_model_path, monkeypatch):
    monkeypatch.setenv("OTHER_KEY", "a key that is wrong")
    with pytest.raises(EngineError, match=r"`api_key_variable` expected .* refused the key \(401\)") as caught:
        start(fake, tiny_model_path, api_key_variable="OTHER_KEY")
    assert "a key that is wrong" not in str(caught.value)
    with pytest.raises(ConfigError, match="`api_key_variable` expected the environment variable NO_KEY to hold"):
        start(fake, tiny_model_path, api_key_variable="NO_KEY")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"logprobs_mode": "raw_logprobs"}, "logprobs_mode is processed_logprobs .* but got raw_logprobs"),
        ({"max_length": MAX_LENGTH - 1}, f"`max_length` of scripts/serve expected at least {MAX_LENGTH} .* got 63"),
    ],
    ids=["field bug E1", "too short"],
)
def test_a_server_that_samples_otherwise_is_refused(fake, tiny_model_path, settings, message):
    fake.settings |= settings
    with pytest.raises(ConfigError, match=message):
        start(fake, tiny_model_path)


def test_servers_that_differ_or_were_not_started_for_this_are_refused(fake, tiny_model_path):
    other = FakeVLLM()
    other.settings["dtype"] = "bfloat16"
    with pytest.raises(ConfigError, match="`urls` expected servers alike, but got"):
        VLLMServerEngine([fake.url, other.url]).start(EngineModel(str(tiny_model_path), STOPS, MAX_LENGTH))
    other.close()
    fake.fails_at = {"collective_rpc"}
    with pytest.raises(EngineError, match=f"`urls` expected servers that `scripts/serve` has started, but {fake.url}"):
        start(fake, tiny_model_path)


def test_prompts_out_of_range_are_not_sent(fake, tiny_model_path):
    engine = start(fake, tiny_model_path)
    for prompt, message in [((1,) * 64, "1 to 63 tokens"), ((), "1 to 63 tokens"), ((260,), "tokens below 260")]:
        with pytest.raises(EngineError, match=f"`prompt_ids` expected {message}"):
            engine.generate([Request((5,), 0), Request(prompt, 0)], Sampling())
    assert engine.generate([], Sampling()) == []
    assert fake.asked == []
    engine.close()


def test_each_rank_has_its_own_share_of_the_servers(monkeypatch):
    engine = VLLMServerEngine([f"http://127.0.0.1:{port}" for port in (1, 2, 3)])
    assert len(engine._own_urls()) == 3
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert engine._own_urls() == ["http://127.0.0.1:2"]
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    with pytest.raises(ConfigError, match="`urls` expected a server for each of 4 ranks, but got 3"):
        engine._own_urls()


def test_the_probe_gets_round_to_every_server(fake, tiny_model_path):
    other = FakeVLLM()
    engine = VLLMServerEngine([fake.url, other.url])
    engine.start(EngineModel(str(tiny_model_path), STOPS, MAX_LENGTH))
    engine.load_weights([("w", torch.ones(2))], 1)
    assert engine.score((7, 9, 11)) == pytest.approx([-0.09, -0.11])
    assert engine.score((7, 9, 11)) == pytest.approx([-0.09, -0.11])
    assert (len(fake.asked), len(other.asked)) == (1, 1)
    engine.close()
    other.close()


def test_a_full_disk_under_the_transport_ends_the_engine_with_its_name(fake, tiny_model_path, tmp_path, monkeypatch):
    engine = start(fake, tiny_model_path, transport="shared_file", transport_folder=tmp_path / "weights")
    engine.load_weights([("w", torch.ones(2, 2))], 1)
    assert torch.equal(fake.weights["w"], torch.ones(2, 2))

    def full(_: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(EngineError, match=r"`transport_folder` expected room .*No space left on device"):
        engine.load_weights([("w", torch.ones(2, 2))], 2)
    assert list((tmp_path / "weights").iterdir()) == []
    assert fake.version == "incomplete"  # and nobody takes it for the new weights, or the old ones


def test_what_a_server_said_before_it_ended_is_shown(tiny_model_path, tmp_path, monkeypatch):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho the disk of the model is gone\nexit 3\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(server_process.sys, "executable", str(program))
    monkeypatch.setattr("grpo_lit.rollouts.vllm_server.check_installed", lambda name: None)
    engine = VLLMServerEngine(patience=Patience(start_s=20.0))
    with pytest.raises(EngineError, match=r"none of the vLLM servers answers(.|\n)*the disk of the model is gone"):
        engine.start(EngineModel(str(tiny_model_path), STOPS, MAX_LENGTH))
    engine.close()


# With a real server.


@pytest.fixture(scope="module")
def policy(tiny_model: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    return tiny_model("llama", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def engine(tiny_folder: Callable[..., Path]) -> Iterator[VLLMServerEngine]:
    """One server for all; its own weights are not yet the policy's."""
    options = VLLMOptions(dtype="float32", cpu_kv_cache_gib=0.25, threads=1)
    engine = VLLMServerEngine(options=options)
    folder = tiny_folder("llama", seed=5, tie_word_embeddings=True)
    engine.start(EngineModel(str(folder), STOPS, MAX_LENGTH))
    yield engine
    engine.close()


@pytest.fixture
def synced(engine: VLLMServerEngine, policy: PreTrainedModel) -> VLLMServerEngine:
    engine.load_weights(policy.state_dict().items(), version=3)
    return engine


def logprobs(model: PreTrainedModel, prompt: tuple[int, ...], tokens: tuple[int, ...], temperature: float) -> Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


@needs_vllm
def test_greedy_decoding_is_that_of_transformers(synced, policy, tiny_folder):
    other = TransformersEngine()
    other.start(EngineModel(str(tiny_folder("llama", tie_word_embeddings=True)), STOPS, MAX_LENGTH))
    other.load_weights(policy.state_dict().items(), 3)
    requests = [Request(prompt, 0) for prompt in PROMPTS]
    assert synced.generate(requests, Sampling(0.0, 12)) == other.generate(requests, Sampling(0.0, 12))


@needs_vllm
@pytest.mark.parametrize("temperature", [0.6, 1.3])
def test_field_bug_e1_logprobs_are_the_learners_at_the_temperature(synced, policy, temperature):
    requests = [Request(prompt, seed) for prompt in PROMPTS for seed in (11, 2**63 - 1)]
    drawn = synced.generate(requests, Sampling(temperature, 12))
    assert len({completion.token_ids for completion in drawn}) == 4
    for request, completion in zip(requests, drawn, strict=True):
        expected = logprobs(policy, request.prompt_ids, completion.token_ids, temperature)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)
    again = synced.generate(requests[::-1], Sampling(temperature, 12))  # as when they are asked of another server
    assert [completion.token_ids for completion in again[::-1]] == [completion.token_ids for completion in drawn]


@needs_vllm
def test_field_bug_e2_what_was_possible_is_kept_and_logprobs_are_over_it(synced, policy):
    sampling = Sampling(0.9, 12, top_k=40, top_p=0.8)
    (drawn,) = synced.generate([Request(PROMPTS[0], 5)], sampling)
    with torch.no_grad():
        logits = policy(torch.tensor([PROMPTS[0] + drawn.token_ids])).logits[0, len(PROMPTS[0]) - 1 : -1]
    for row, kept, token, logprob in zip(logits, drawn.kept.steps(), drawn.token_ids, drawn.logprobs, strict=True):
        assert kept == possible(row, sampling)
        row = row / 0.9
        assert float(row[token] - row[list(kept)].logsumexp(0)) == pytest.approx(logprob, abs=1e-4)


@needs_vllm
def test_field_bug_e4_new_weights_replace_old_ones_and_what_was_cached_of_them(synced, policy, tiny_model):
    long = tuple(range(20, 60))  # a block of 32 tokens goes into the prefix cache
    before = torch.tensor(synced.score(long))
    torch.testing.assert_close(before, logprobs(policy, long[:1], long[1:], 1.0), atol=1e-4, rtol=0)
    changed = tiny_model("llama", seed=1, tie_word_embeddings=True)

    # An update that its learner gave up leaves no trace in the next one.
    loop, pool = synced._started
    loop.run(pool.begin_update("abort"))
    synced.load_weights(changed.state_dict().items(), version=4)
    (after,) = synced.generate([Request(long, 0)], Sampling(1.0, 8))
    assert after.weight_version == 4
    torch.testing.assert_close(
        torch.tensor(after.logprobs), logprobs(changed, long, after.token_ids, 1.0), atol=1e-4, rtol=0
    )
    scores = torch.tensor(synced.score(long))
    torch.testing.assert_close(scores, logprobs(changed, long[:1], long[1:], 1.0), atol=1e-4, rtol=0)
    assert float((scores - before).abs().max()) > 1  # nats: the two policies do differ


@needs_vllm
def test_weights_arrive_through_a_process_group(synced, policy, tiny_folder, tiny_model, monkeypatch):
    (server,) = synced._pool.servers
    monkeypatch.setenv(KEY_VARIABLE, server._client.headers["authorization"].removeprefix("Bearer "))
    other = VLLMServerEngine([server.url], transport="process_group")  # one server takes weights from any transport
    other.start(EngineModel(str(tiny_folder("llama", tie_word_embeddings=True)), STOPS, MAX_LENGTH))
    other._stage.stage_bytes = 2**14  # several chunks
    changed = tiny_model("llama", seed=1, tie_word_embeddings=True)
    for version, model in [(1, policy), (2, changed)]:
        other.load_weights(model.state_dict().items(), version)
        (drawn,) = other.generate([Request(PROMPTS[0], 5)], Sampling(1.0, 12))
        assert drawn.weight_version == version
        expected = logprobs(model, PROMPTS[0], drawn.token_ids, 1.0)
        torch.testing.assert_close(torch.tensor(drawn.logprobs), expected, atol=1e-4, rtol=0)
    # A learner that goes in the middle of its weights costs the server nothing.
    loop, pool = other._started
    loop.run(pool.begin_update("abort"))
    other.close()
    synced.load_weights(policy.state_dict().items(), 5)
    assert synced.generate([Request(PROMPTS[0], 5)], Sampling(1.0, 2))[0].weight_version == 5


@needs_vllm
def test_completions_go_on_across_a_sync_and_each_token_is_of_the_weights_it_names(synced, policy, tiny_model):
    changed = tiny_model("llama", seed=1, tie_word_embeddings=True)
    # So many that the ninth look, a sixth of a second later, comes while they are drawn.
    requests = [Request(PROMPTS[1], seed) for seed in range(48)]
    updates = ScriptedUpdates(True, {8: (changed.state_dict().items(), 4)})
    drawn = synced.generate_through(requests, Sampling(1.0, 56), updates)
    assert synced.weight_version == 4
    crossed = [completion for completion in drawn if completion.versions is not None]
    assert crossed
    for completion in crossed:
        first, found = completion.versions.index(4), torch.tensor(completion.logprobs)
        before, after = logprobs_across(policy, changed, PROMPTS[1], completion.token_ids, first, False)
        torch.testing.assert_close(found, torch.cat([before, after]), atol=1e-3, rtol=0)


@needs_vllm
def test_nobody_without_the_key_reaches_a_route(synced):
    url = synced._processes[0].url
    assert httpx.get(f"{url}/health").status_code == 200
    for path in ("/update_weights", "/pause", "/start_weight_update", "/collective_rpc", "/inference/v1/generate"):
        assert httpx.post(f"{url}{path}", json={}).status_code == 401
        assert httpx.post(f"{url}{path}", json={}, headers={"Authorization": "Bearer no"}).status_code == 401
    assert synced.generate([Request(PROMPTS[0], 0)], Sampling(1.0, 2))[0].weight_version == 3


@needs_vllm
def test_a_killed_server_leaves_no_process_and_is_named(synced):
    """Last: it ends the engine."""
    (server,) = synced._processes
    processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    assert any("VLLM::" in word for process in processes for word in process.cmdline())
    os.kill(server.pid, signal.SIGKILL)
    with (
        pytest.warns(UserWarning, match=f"{server.url} is out"),
        pytest.raises(EngineError, match=f"none of the vLLM servers (.|\n)*{server.url}: "),
    ):
        synced.generate([Request(PROMPTS[0], 0)], Sampling(1.0, 2))
    synced.close()
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert alive == []
