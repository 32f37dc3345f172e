"""Sleep and wake of a vLLM engine that shares its CUDA device with the learner."""

from typing import TYPE_CHECKING, Any, Literal

from grpo_lit.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from vllm import LLM

SleepLevel = Literal["none", "level1", "level2"]
_LEVELS = {"none": 0, "level1": 1, "level2": 2}


class Sleep:
    """Gives the engine's device memory to the learner, and takes it back in two parts.

    Weights are woken alone and replaced; keys and values get their memory when that is done, so that what carries the
    weights and what they are read for never lie on the device together:

        sleep(level) -> learner's phase -> wake weights -> new weights -> wake kv_cache -> drop prefixes -> sample

    Args:
        level: ``none``: never. ``level1``: weights wait in host memory. ``level2``: they are dropped.
    """

    def __init__(self, level: SleepLevel) -> None:
        self.level = _LEVELS[level]
        #: Whether keys and values have no memory; weights may have theirs back already.
        self.is_asleep = False

    @property
    def drops_weights(self) -> bool:
        """Whether nothing can be sampled after it before new weights have come."""
        return self.level == 2

    def arguments(self, on_cpu: bool) -> dict[str, Any]:
        """Return what ``vllm.LLM`` must be told.

        Raises:
            ConfigError: There is no CUDA device: on CPU, vLLM says that it sleeps and keeps all its memory.
        """
        if self.level and on_cpu:
            raise ConfigError(
                f"`sleep` expected none without a CUDA device, but got level{self.level}: on CPU vLLM gives no memory "
                "back. Set data.engine.sleep to none, and bound the engine's memory with cpu_kv_cache_gib"
            )
        return {"enable_sleep_mode": True} if self.level else {}

    def rest(self, llm: "LLM") -> None:
        """Give the memory back, unless that is done or never asked for."""
        if self.level and not self.is_asleep:
            llm.sleep(level=self.level)
            self.is_asleep = True

    def wake(self, llm: "LLM") -> None:
        """Take all memory back, where the weights in it are still the ones to sample with.

        Raises:
            EngineError: They were dropped.
        """
        if self.is_asleep and self.drops_weights:
            raise EngineError("the engine expected `load_weights` before it is asked, but it sleeps without weights")
        self.wake_weights(llm)
        self.wake_cache(llm)

    def wake_weights(self, llm: "LLM") -> None:
        """Take the memory of the weights back."""
        if self.is_asleep:
            llm.wake_up(tags=["weights"])

    def wake_cache(self, llm: "LLM") -> None:
        """Take the memory of keys and values back; vLLM then samples again."""
        if self.is_asleep:
            llm.wake_up(tags=["kv_cache"])
            self.is_asleep = False
