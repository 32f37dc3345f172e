"""VLLMEngine, with a real vLLM: it draws what the policy says, follows new weights, and leaves nothing behind."""

import importlib.util
import math
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from limits import possible
from members import at_once
from torch import Tensor
from transformers import PreTrainedModel
from updates import ScriptedUpdates, logprobs_across

from grpo_lit.errors import ConfigError, EngineError
from grpo_lit.rollout import Completion, Request, Sampling
from grpo_lit.rollouts.engine import EngineModel
from grpo_lit.rollouts.links import Link, Meeting
from grpo_lit.rollouts.staging import Chunk, SharedMemoryStage, StagedTensor
from grpo_lit.rollouts.vllm import VLLMEngine
from grpo_lit.rollouts.vllm_process import engine_processes

needs_vllm = pytest.mark.vllm
LAUNCHER = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}
#: The tiny tokenizer's own end token: no stop token of the engine's here.
EOS = 2
MAX_LENGTH = 160
PROMPTS = [tuple(range(40, 60)), tuple(range(100, 107))]


@pytest.fixture(scope="module")
def policy(tiny_model: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    """The learner: head and embedding tied, as in the small models people start with."""
    return tiny_model("llama", tie_word_embeddings=True)


def greedy(model: PreTrainedModel, prompt: tuple[int, ...], count: int) -> list[int]:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def logprobs(model: PreTrainedModel, prompt: tuple[int, ...], tokens: tuple[int, ...], temperature: float) -> Tensor:
    ids = torch.tensor([prompt + tokens])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


@pytest.fixture(scope="module")
def stops(policy: PreTrainedModel) -> tuple[int, int]:
    """Two stop tokens: greedy decoding of each prompt comes to one of them, at places worked out by transformers."""
    paths = [greedy(policy, prompt, 12) for prompt in PROMPTS]
    chosen = []
    for path, other in (paths, paths[::-1]):
        # A token that the other prompt does not come to, and not before the fifth place.
        chosen.append(next(t for i, t in enumerate(path) if i >= 4 and t not in path[:i] and t not in other))
    return chosen[0], chosen[1]


@pytest.fixture(scope="module")
def engine(policy: PreTrainedModel, stops: tuple[int, int], tiny_folder: Callable[..., Path]) -> Iterator[VLLMEngine]:
    """One engine for all, started as a launcher's rank would; its own weights are not yet the policy's."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM not installed")
    folder = tiny_folder("llama", seed=5, tie_word_embeddings=True)
    # Blocks of 32 tokens, so that short prompts are cached at all.
    engine = VLLMEngine(dtype="float32", cpu_kv_cache_gib=0.25, threads=1, extra={"block_size": 32})
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (LAUNCHER | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
            patch.setenv(name, value)
        before, state = dict(os.environ), torch.get_rng_state()
        engine.start(EngineModel(str(folder), stops, MAX_LENGTH))
        assert dict(os.environ) == before
        assert torch.equal(torch.get_rng_state(), state)
    yield engine
    engine.close()


@pytest.fixture
def synced(engine: VLLMEngine, policy: PreTrainedModel) -> VLLMEngine:
    engine.load_weights(policy.state_dict().items(), version=3)
    return engine


def draw(
    engine: VLLMEngine, requests: list[Request], temperature: float = 1.0, max_tokens: int = 16
) -> list[Completion]:
    return engine.generate(requests, Sampling(temperature, max_tokens))


@needs_vllm
def test_greedy_decoding_is_that_of_transformers_and_stops_at_either_token(synced, policy, stops):
    drawn = draw(synced, [Request(prompt, 0) for prompt in PROMPTS], temperature=0.0, max_tokens=12)
    for prompt, completion, stop in zip(PROMPTS, drawn, stops, strict=True):
        path = greedy(policy, prompt, 12)
        assert list(completion.token_ids) == path[: path.index(stop) + 1]
        assert completion.finish_reason == "stop"
        assert completion.logprobs == (0.0,) * len(completion.token_ids)
        assert completion.weight_version == 3


@needs_vllm
def test_a_stop_token_at_the_cap_is_a_stop_and_one_token_less_is_not(synced, policy, stops):
    length = greedy(policy, PROMPTS[0], 12).index(stops[0]) + 1
    (at_cap,) = draw(synced, [Request(PROMPTS[0], 0)], temperature=0.0, max_tokens=length)
    assert (len(at_cap.token_ids), at_cap.token_ids[-1], at_cap.finish_reason) == (length, stops[0], "stop")
    (cut,) = draw(synced, [Request(PROMPTS[0], 0)], temperature=0.0, max_tokens=length - 1)
    assert (len(cut.token_ids), cut.finish_reason) == (length - 1, "length")
    assert cut.token_ids == at_cap.token_ids[:-1]


@needs_vllm
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_logprobs_are_those_of_the_policy_at_the_temperature(synced, policy, temperature):
    """Field bug E1."""
    requests = [Request(prompt, seed) for prompt in PROMPTS for seed in range(4)]
    for request, completion in zip(requests, draw(synced, requests, temperature), strict=True):
        expected = logprobs(policy, request.prompt_ids, completion.token_ids, temperature)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-3, rtol=0)


@needs_vllm
def test_text_is_the_tokens_without_the_special_ones(synced, tiny_tokenizer):
    for completion in draw(synced, [Request(PROMPTS[0], seed) for seed in range(4)]):
        assert completion.text == tiny_tokenizer.decode(completion.token_ids, skip_special_tokens=True)


@needs_vllm
def test_a_seed_decides_whatever_the_neighbours_are(synced):
    requests = [Request(PROMPTS[0], seed) for seed in (11, 12, 13, 2**63 - 1)]
    first = draw(synced, requests)
    assert len({completion.token_ids for completion in first}) == 4  # equal prompts, different seeds
    others = [Request(PROMPTS[1], seed) for seed in range(3)]
    again = draw(synced, [*others, *reversed(requests)])[3:]
    assert [completion.token_ids for completion in reversed(again)] == [completion.token_ids for completion in first]
    # The same numbers up to the order in which other batches add them.
    for one, two in zip(first, reversed(again), strict=True):
        assert two.logprobs == pytest.approx(one.logprobs, abs=1e-4)


@needs_vllm
def test_samples_follow_the_policys_distribution(synced, policy):
    with torch.no_grad():
        expected = torch.log_softmax(policy(torch.tensor([PROMPTS[0]])).logits[0, -1] / 0.7, -1).exp()
    count = 400
    drawn = draw(synced, [Request(PROMPTS[0], seed) for seed in range(count)], temperature=0.7, max_tokens=1)
    found = torch.bincount(torch.tensor([c.token_ids[0] for c in drawn]), minlength=len(expected)) / count
    top = expected.topk(5).indices
    # A frequency's standard deviation is sqrt(p (1 - p) / n); 4 of them fail once in 16000; the seeds are fixed.
    allowed = 4 * (expected * (1 - expected) / count).sqrt()
    assert ((found - expected).abs()[top] <= allowed[top]).all()


@needs_vllm
def test_score_is_the_raw_logprob_of_each_token(synced, policy):
    text = PROMPTS[0] + PROMPTS[1]
    for _ in range(2):  # a cached prefix must not cost the second call its values
        scores = synced.score(text)
        assert len(scores) == len(text) - 1
        torch.testing.assert_close(torch.tensor(scores), logprobs(policy, text[:1], text[1:], 1.0), atol=1e-3, rtol=0)


@needs_vllm
def test_new_weights_replace_old_ones_and_what_was_cached_of_them(synced, policy, tiny_model):
    long = tuple(range(20, 120))  # three full blocks of 32 tokens go into the prefix cache
    draw(synced, [Request(long, 0)])
    changed = tiny_model("llama", seed=1, tie_word_embeddings=True)
    synced.load_weights(changed.state_dict().items(), version=4)
    assert synced.weight_version == 4
    (after,) = draw(synced, [Request(long, 0)])
    assert after.weight_version == 4
    expected = logprobs(changed, long, after.token_ids, 1.0)
    torch.testing.assert_close(torch.tensor(after.logprobs), expected, atol=1e-3, rtol=0)
    scores = torch.tensor(synced.score(long))
    torch.testing.assert_close(scores, logprobs(changed, long[:1], long[1:], 1.0), atol=1e-3, rtol=0)
    assert (scores - logprobs(policy, long[:1], long[1:], 1.0)).abs().max() > 1  # nats: the two policies do differ


@needs_vllm
@pytest.mark.parametrize("keep", [False, True])
def test_completions_go_on_across_a_sync_and_each_token_is_of_the_weights_it_names(synced, policy, tiny_model, keep):
    """With ``keep`` the later tokens are the new weights' behind keys and values of the old ones; with ``resume``
    (``recompute``) they are exactly the new policy's.
    """
    changed = tiny_model("llama", seed=1, tie_word_embeddings=True)
    requests = [Request(prompt, seed) for prompt in PROMPTS for seed in range(3)]
    # vLLM runs ahead of what this process has seen of it, though not by a hundred tokens.
    updates = ScriptedUpdates(not keep, {5: (changed.state_dict().items(), 4)})
    drawn = synced.generate_through(requests, Sampling(1.0, 120), updates)
    assert (synced.weight_version, any(updates.asked)) == (4, True)
    crossed = [(r, c) for r, c in zip(requests, drawn, strict=True) if c.versions is not None]
    assert crossed
    for request, completion in crossed:
        assert (completion.weight_version, completion.versions[-1]) == (3, 4)
        assert list(completion.versions) == sorted(completion.versions)
        first, found = completion.versions.index(4), torch.tensor(completion.logprobs)
        before, after = logprobs_across(policy, changed, request.prompt_ids, completion.token_ids, first, keep)
        torch.testing.assert_close(found[:first], before, atol=1e-3, rtol=0)
        torch.testing.assert_close(found[first:], after, atol=1e-3, rtol=0)
    (fresh,) = synced.generate([requests[0]], Sampling(1.0, 16))  # nothing that the old weights cached is found
    expected = logprobs(changed, PROMPTS[0], fresh.token_ids, 1.0)
    torch.testing.assert_close(torch.tensor(fresh.logprobs), expected, atol=1e-3, rtol=0)


@needs_vllm
def test_the_order_of_a_sync(synced, policy, monkeypatch):
    """Field bug E4: prefixes of the old weights are forgotten before anything is asked."""
    calls = []
    llm = synced._llm

    def recording(name: str) -> Callable[..., object]:
        method = getattr(llm, name)

        def record(*args: object, **kwargs: object) -> object:
            calls.append((name, synced.weight_version))
            return method(*args, **kwargs)

        return record

    names = ["start_weight_update", "update_weights", "finish_weight_update", "reset_prefix_cache"]
    for name in names:
        monkeypatch.setattr(llm, name, recording(name))
    synced.load_weights(policy.state_dict().items(), version=7)
    assert calls == [(name, None) for name in names]  # no version until all of it is done
    assert (synced.weight_version, llm.get_weight_version()) == (7, "7")


@needs_vllm
def test_weights_arrive_in_several_stages_full_too(synced, policy, monkeypatch):
    # 20 kB hold a layer's matrix of 64 x 96 float32 (25 kB) not even once: the stage grows, and is filled many times.
    monkeypatch.setattr(synced, "_stage", type(synced._stage)(torch.float32, stage_bytes=20_000))
    synced.load_weights(policy.state_dict().items(), version=8)
    scores = torch.tensor(synced.score(PROMPTS[0]))
    expected = logprobs(policy, PROMPTS[0][:1], PROMPTS[0][1:], 1.0)
    torch.testing.assert_close(scores, expected, atol=1e-3, rtol=0)


@needs_vllm
@pytest.mark.parametrize("named", [True, False])
def test_a_tied_head_may_be_named_or_not(synced, tiny_model, named):
    changed = tiny_model("llama", seed=2, tie_word_embeddings=True)
    weights = changed.state_dict()
    assert "lm_head.weight" in weights
    synced.load_weights([(n, t) for n, t in weights.items() if named or n != "lm_head.weight"], version=9)
    expected = logprobs(changed, PROMPTS[0][:1], PROMPTS[0][1:], 1.0)
    torch.testing.assert_close(torch.tensor(synced.score(PROMPTS[0])), expected, atol=1e-3, rtol=0)


@needs_vllm
def test_only_the_given_stop_tokens_stop(synced, policy):
    # With the last norm at 0 all logits are 0: every token has probability 1/260, the tokenizer's end token too, and 64
    # samples of 24 tokens have met it 5.9 times on average.
    weights = policy.state_dict() | {"model.norm.weight": torch.zeros(64)}
    synced.load_weights(weights.items(), version=10)
    drawn = draw(synced, [Request(PROMPTS[0], seed) for seed in range(64)], max_tokens=24)
    assert any(EOS in completion.token_ids[:-1] for completion in drawn)
    for completion in drawn:
        assert completion.logprobs == pytest.approx([-math.log(260)] * len(completion.token_ids), abs=1e-5)


@needs_vllm
@pytest.mark.parametrize(
    "limits", [{"top_k": 5}, {"top_k": 40, "top_p": 0.8}, {"top_k": 200, "min_p": 0.1}, {"top_k": 1}, {"top_k": 10**6}]
)
def test_with_kept_tokens_the_ratio_is_1_and_is_not_without(synced, policy, limits):
    """Field bug E2."""
    sampling = Sampling(0.9, 12, **limits)
    requests = [Request(prompt, seed) for prompt in PROMPTS for seed in range(4)]
    masses = []
    for request, completion in zip(requests, synced.generate(requests, sampling), strict=True):
        ids = torch.tensor([request.prompt_ids + completion.token_ids])
        with torch.no_grad():
            logits = policy(ids).logits[0, len(request.prompt_ids) - 1 : -1].float()
        steps = zip(logits, completion.kept.steps(), completion.token_ids, completion.logprobs, strict=True)
        for row, kept, token, logprob in steps:
            assert kept == possible(row, sampling)
            row = row / 0.9
            over_kept = float(row[token] - row[list(kept)].logsumexp(0))
            assert logprob == pytest.approx(over_kept, abs=1e-3)
            masses.append(math.exp(float(row.log_softmax(0)[token]) - logprob))
    without = sum(masses) / len(masses)
    assert without == pytest.approx(1.0, abs=1e-3) if limits["top_k"] > 260 else without < 0.95


@needs_vllm
def test_requests_without_limits_record_nothing(synced):
    requests = [Request(PROMPTS[0], seed) for seed in range(3)]
    for sampling in (Sampling(1.0, 4), Sampling(0.0, 4), Sampling(0.0, 4, top_k=5, top_p=0.5)):
        assert [completion.kept for completion in synced.generate(requests, sampling)] == [None] * 3


@needs_vllm
def test_more_equal_logits_than_are_listed_are_refused(synced, policy):
    # With the last norm at 0 all 260 logits are 0, so all equal the k-th and all are possible.
    synced.load_weights((policy.state_dict() | {"model.norm.weight": torch.zeros(64)}).items(), version=11)
    with pytest.raises(EngineError, match=r"`data\.sampling\.top_k` expected at most 37 tokens to be possible"):
        synced.generate([Request(PROMPTS[0], 0)], Sampling(1.0, 4, top_k=5))
    (whole,) = synced.generate([Request(PROMPTS[0], 0)], Sampling(1.0, 4, top_k=200))
    assert set(whole.kept.counts) == {260}


@needs_vllm
def test_a_prompt_that_leaves_no_room_is_named(synced):
    longest = MAX_LENGTH - 1
    (fits,) = draw(synced, [Request((50,) * longest, 0)])
    assert len(fits.token_ids) == 1
    with pytest.raises(EngineError, match=f"`prompt_ids` expected 1 to {longest} tokens .* but got {longest + 1}: "):
        draw(synced, [Request(PROMPTS[0], 0), Request((50,) * (longest + 1), 1)])
    with pytest.raises(EngineError, match="but got 0: "):
        draw(synced, [Request((), 0)])
    assert draw(synced, []) == []


@needs_vllm
def test_what_vllm_refuses_is_an_engine_error_with_its_cause(synced):
    with pytest.raises(EngineError, match="vLLM could not sample: ") as caught:
        synced.generate([Request((10**9,), 0)], Sampling())
    assert caught.value.__cause__ is not None
    assert len(draw(synced, [Request(PROMPTS[0], 0)])) == 1  # and it lives on


@needs_vllm
def test_what_is_missing_from_an_update_is_found():
    from grpo_lit.rollouts.vllm_worker import missing_names, tied_layers

    layer = torch.nn.ModuleDict({"qkv_proj": torch.nn.Linear(2, 2, bias=False), "norm": torch.nn.LayerNorm(2)})
    model = torch.nn.ModuleDict(
        {"layer": layer, "embed": torch.nn.Embedding(3, 2), "head": torch.nn.Linear(2, 3, False)}
    )
    model["head"].weight = model["embed"].weight
    model["head"].quant_method = "packs the weight"
    model.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    loaded = {"layer.qkv_proj.weight", "layer.norm.weight", "embed.weight"}
    # The norm's bias did not come; the fused parameter counts as loaded though k did not come.
    received = {"layer.q_proj.weight", "layer.v_proj.weight", "layer.norm.weight", "embed.weight"}
    assert missing_names(model, loaded, received) == ["layer.k_proj.weight", "layer.norm.bias"]
    # A checkpoint that has them fused already misses nothing of them.
    assert missing_names(model, loaded, {"layer.qkv_proj.weight"}) == ["layer.norm.bias"]
    # The head came through the embedding it is tied to, unless neither came.
    assert tied_layers(model, loaded) == [model["head"]]
    assert missing_names(model, loaded - {"embed.weight"}, received)[:2] == ["embed.weight", "head.weight"]


@needs_vllm
def test_workers_of_all_replicas_join_a_learners_group_each_with_a_rank_of_its_own():
    from grpo_lit.rollouts.vllm_worker import StageInitInfo, StageWeightTransfer

    listening = socket.create_server(("127.0.0.1", 0))
    meeting = Meeting("name", "127.0.0.1", listening.getsockname()[1], 5, "gloo", 20.0)
    places = [(replica, rank) for replica in range(2) for rank in range(2)]

    def worker(replica: int, rank: int) -> torch.Tensor:
        transfer = StageWeightTransfer.__new__(StageWeightTransfer)  # without a model
        transfer.device = torch.device("meta")  # which Gloo sends nothing to
        transfer.parallel_config = SimpleNamespace(data_parallel_index=replica, world_size=2, rank=rank)
        transfer.init_transfer_engine(StageInitInfo(**vars(meeting)))
        chunk = Chunk(transfer._link.address, 4, [StagedTensor("w", "float32", [1], 0)])
        ((_, received),) = transfer._read(chunk)
        transfer.shutdown()
        with pytest.raises(ValueError, match="a process group that this server is not in"):
            list(transfer._read(chunk))
        return received

    def learner() -> torch.Tensor:
        memory = torch.tensor([2.5]).view(torch.uint8)
        Link(meeting, 0, memory.device, listening).broadcast(memory)
        return memory.view(torch.float32)

    assert at_once(learner, *(partial(worker, *place) for place in places)) == [torch.tensor([2.5])] * 5


@needs_vllm
@pytest.mark.parametrize("change", ["unknown", "missing"])
def test_a_failed_sync_names_the_weight_and_closes_the_engine(engine, policy, tiny_folder, change):
    if engine._llm is None:  # the case before this one has closed it
        engine.start(EngineModel(str(tiny_folder("llama", tie_word_embeddings=True)), (EOS,), MAX_LENGTH))
    name = "model.layers.1.self_attn.k_proj.weight"
    weights = policy.state_dict()
    tensor = weights.pop(name)
    if change == "unknown":
        weights[name.replace("k_proj", "x_proj")] = tensor
    with pytest.raises(EngineError, match={"unknown": "x_proj", "missing": name}[change]):
        engine.load_weights(weights.items(), version=5)
    assert engine.weight_version is None
    with pytest.raises(EngineError, match="expected `start`"):
        draw(engine, [Request(PROMPTS[0], 0)])
    assert engine_processes() == []


def test_a_learner_that_fails_while_it_sends_closes_the_engine(monkeypatch):
    calls = []

    class LLM:  # enough of one for a sync
        class llm_engine:
            class engine_core:
                shutdown = staticmethod(lambda: calls.append("shutdown"))

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *args, **kwargs: calls.append(name)

    def weights() -> Iterator[tuple[str, Tensor]]:
        yield "first", torch.ones(2)
        raise MemoryError("the learner's own")

    engine = VLLMEngine()
    engine._llm, engine._stage = LLM(), SharedMemoryStage(torch.float32)
    with pytest.raises(MemoryError, match="own"):
        engine.load_weights(weights(), 1)
    assert calls == ["start_weight_update", "shutdown"]
    assert engine._llm is None


SCRIPT = """
import sys, psutil, torch
from transformers import AutoModelForCausalLM
from grpo_lit.rollout import Request, Sampling
from grpo_lit.rollouts.engine import EngineModel
from grpo_lit.rollouts.vllm import VLLMEngine

if __name__ == "__main__":
    engine = VLLMEngine(cpu_kv_cache_gib=0.25, threads=1)
    engine.start(EngineModel(sys.argv[1], (2, 3), 128))
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
    engine.load_weights(model.state_dict().items(), 1)
    print("pids", *[p.pid for p in psutil.Process().children(recursive=True)], flush=True)
    while True:  # until the signal comes
        engine.generate([Request((40, 41), 0)], Sampling(max_tokens=100))
"""


@needs_vllm
def test_no_process_outlives_the_learner(tiny_model_path, tmp_path):
    script = tmp_path / "learner.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(tiny_model_path)]
    learner = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    words = next((line.split() for line in iter(learner.stdout.readline, "") if line.startswith("pids")), None)
    assert words is not None, learner.communicate()[1]
    processes = [psutil.Process(int(pid)) for pid in words[1:]]
    assert any("VLLM" in process.name() for process in processes)
    learner.kill()  # nothing can catch it; Ctrl-C closes the engine as the end of a run does
    learner.communicate(timeout=60)
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert alive == []


def test_without_vllm_the_message_says_what_to_do(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"vllm-cuda.*scripts/setup.*configs/engine/transformers\.yaml"):
        VLLMEngine().start(EngineModel("nowhere", (0,), 8))


@needs_vllm
def test_weights_cannot_stay_on_a_device_that_is_not_shared(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="`weight_transfer` expected shared_memory"):
        VLLMEngine(weight_transfer="cuda_ipc").start(EngineModel("nowhere", (0,), 8))


def test_the_module_is_imported_without_vllm():
    code = "import sys; sys.modules['vllm'] = None; import grpo_lit.rollouts.vllm as m; print(m.VLLMEngine().close())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "None", done.stderr


def test_an_engine_that_is_not_started_says_so_and_closes():
    engine = VLLMEngine()
    with pytest.raises(EngineError, match="expected `start`"):
        draw(engine, [Request((1,), 0)])
    with pytest.raises(EngineError, match="expected `start`"):
        engine.load_weights([], 0)
    engine.close()
    engine.close()
