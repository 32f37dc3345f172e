"""A colocated engine sleeps while the learner works: what is asked of vLLM, in which order, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bare import RecordingEngine, bare_data, one_of
from toys import Letters

from grpo_lit.data.checks import check_engine
from grpo_lit.data.options import RolloutOptions
from grpo_lit.errors import ConfigError, EngineError
from grpo_lit.rollout import Request, Sampling
from grpo_lit.rollouts.asynchronous import Asynchronous
from grpo_lit.rollouts.engine import EngineModel
from grpo_lit.rollouts.staging import SharedMemoryStage
from grpo_lit.rollouts.vllm import VLLMEngine

WEIGHTS = [("w", torch.ones(2, 2))]
SYNC = ["start_weight_update", "update_weights", "finish_weight_update"]


class RecordingLLM:
    """Writes down what it is asked, and is asleep for as long as vLLM would be."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.has = {"weights", "kv_cache"}
        core = SimpleNamespace(shutdown=lambda: self.calls.append("shutdown"))
        self.llm_engine = SimpleNamespace(engine_core=core)

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")
        self.has = set()

    def wake_up(self, tags: list[str]) -> None:
        assert not self.has & set(tags), "woken twice"
        self.calls.append(f"wake {' '.join(tags)}")
        self.has |= set(tags)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def record(*_: Any, **__: Any) -> Any:
            assert "weights" in self.has
            self.calls.append(name)
            return [] if name == "generate" else name == "reset_prefix_cache"  # vLLM says whether it did

        return record


@pytest.fixture
def engine_of() -> Callable[..., tuple[VLLMEngine, RecordingLLM]]:
    """An engine that sleeps, as it is behind ``start``."""

    def make(sleep: Any) -> tuple[VLLMEngine, RecordingLLM]:
        engine, llm = VLLMEngine(sleep=sleep), RecordingLLM()
        engine._llm, engine._stage = llm, SharedMemoryStage(torch.float32)
        engine._model = EngineModel("nowhere", (2,), 32)
        engine.load_weights(WEIGHTS, 1)
        llm.calls.clear()
        return engine, llm

    return make


@pytest.mark.parametrize("level", [1, 2])
def test_weights_are_woken_alone_and_replaced_before_the_cache_has_memory(engine_of: Callable, level: int) -> None:
    engine, llm = engine_of(f"level{level}")
    engine.rest()
    assert engine.weight_version == (1 if level == 1 else None)  # dropped ones must come again, whatever their step
    engine.rest()  # twice is once
    engine.load_weights(WEIGHTS, 2)
    assert llm.calls == [f"sleep {level}", "wake weights", *SYNC, "wake kv_cache", "reset_prefix_cache"]
    assert engine.weight_version == 2
    llm.calls.clear()
    engine.load_weights(WEIGHTS, 3)  # awake: nothing to wake
    assert llm.calls == [*SYNC, "reset_prefix_cache"]


def test_an_engine_that_has_its_weights_wakes_when_it_is_asked(engine_of: Callable, monkeypatch: Any) -> None:
    for level, calls in (("level1", ["sleep 1", "wake weights", "wake kv_cache"]), ("none", [])):
        engine, llm = engine_of(level)
        engine.rest()
        asked: list[str] = []
        monkeypatch.setattr(engine, "_inputs", lambda prompts, asked=asked, llm=llm: asked.extend(llm.calls) or [])
        assert engine._run([(1, 2)], []) == []
        assert asked == calls
        assert llm.calls == [*calls, "generate"]


def test_an_engine_without_weights_is_not_asked(engine_of: Callable, monkeypatch: Any) -> None:
    engine, llm = engine_of("level2")
    engine.rest()
    monkeypatch.setattr(engine, "_inputs", lambda prompts: [])
    with pytest.raises(EngineError, match="expected `load_weights` before it is asked"):
        engine._run([(1, 2)], [])
    assert llm.calls == ["sleep 2"]


def test_a_failure_while_it_wakes_closes_the_engine(engine_of: Callable, monkeypatch: Any) -> None:
    engine, llm = engine_of("level1")
    engine.rest()

    def fail(tags: list[str]) -> None:
        raise RuntimeError("no memory is left on the device")

    monkeypatch.setattr(llm, "wake_up", fail)
    with pytest.raises(EngineError, match="vLLM could not wake its weights: no memory is left"):
        engine.load_weights(WEIGHTS, 2)
    assert llm.calls[-1] == "shutdown"
    assert engine.weight_version is None


def test_without_cuda_it_is_refused_before_vllm_starts(monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("grpo_lit.rollouts.vllm.check_installed", lambda name: None)
    with pytest.raises(ConfigError, match="`sleep` expected none without a CUDA device, but got level2"):
        VLLMEngine(sleep="level2").start(EngineModel("nowhere", (0,), 8))


def test_an_engine_that_draws_ahead_never_sleeps() -> None:
    options = RolloutOptions(asynchronous=Asynchronous(1))
    with pytest.raises(ConfigError, match=r"`data\.engine\.sleep` .* `data\.rollout\.asynchronous`"):
        check_engine(VLLMEngine(sleep="level1"), Sampling(), options)
    check_engine(VLLMEngine(), Sampling(), options)
    check_engine(VLLMEngine(sleep="level1"), Sampling(), RolloutOptions())


@pytest.mark.cuda
@pytest.mark.vllm
@pytest.mark.parametrize("level", ["level1", "level2"])
def test_memory_is_free_while_it_sleeps_and_the_new_weights_are_there_when_it_wakes(
    level: Any, tiny_model: Callable[..., Any], tiny_folder: Callable[..., Path]
) -> None:
    """Field bug E4: gibberish after sleep. Written for CUDA, and not run on one yet."""
    old, new = (tiny_model("llama", seed=seed).to("cuda") for seed in (0, 1))
    engine = VLLMEngine(dtype="float32", gpu_memory_utilization=0.3, sleep=level)
    engine.start(EngineModel(str(tiny_folder("llama")), (2, 3), 64))
    try:
        engine.load_weights(old.state_dict().items(), 1)
        awake, total = torch.cuda.mem_get_info()
        engine.rest()
        assert torch.cuda.mem_get_info()[0] - awake > 0.2 * total
        engine.load_weights(new.state_dict().items(), 2)
        prompt = tuple(range(40, 60))
        (drawn,) = engine.generate([Request(prompt, 0)], Sampling(1.0, 12))
        with torch.no_grad():
            ids = torch.tensor([prompt + drawn.token_ids], device="cuda")
            said = (
                new(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1).gather(1, ids[0, len(prompt) :, None])
            )
        torch.testing.assert_close(torch.tensor(drawn.logprobs), said[:, 0].cpu(), atol=1e-2, rtol=0)
    finally:
        engine.close()


class Sleepy(RecordingEngine):
    """Sleeps without its weights."""

    rests = True

    def rest(self) -> None:
        self.calls.append("rest")
        self.weight_version = None


def test_the_engine_rests_whenever_the_learner_gets_a_minibatch(tiny_model_path: Path) -> None:
    data = bare_data(tiny_model_path, one_of(0, 1), engine=Sleepy(), num_updates=2, val={"held": Letters(3, True)})
    for step in range(3):
        data.trainer.lightning_module.global_step = step
        data.draw()
        if step == 0:  # on Lightning's schedule, in the middle of a rollout
            data.trainer.lightning_module.global_step = 1
            list(data.val_dataloader()[0])
    assert [call for call in data.engine.calls if call != "score"] == [
        *["start", "load 0", "generate 10 with 0", "rest"],
        *["load 1", "generate 3 with 1", "rest"],  # evaluation wakes it, the second half of the rollout needs nothing
        *["load 2", "generate 10 with 2", "rest"],
    ]
