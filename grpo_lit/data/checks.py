"""Settings of a data module that cannot work, refused before anything is loaded."""

from operator import attrgetter
from typing import Any

from grpo_lit.data.options import RolloutOptions
from grpo_lit.errors import ConfigError
from grpo_lit.policy.checkpoint import context_length, steady_length
from grpo_lit.rollout import Sampling
from grpo_lit.rollouts.engine import Engine

#: By the keys of counts below ``data``: their least values.
_LEAST = {
    "prompts_per_rollout": 1,
    "num_updates": 1,
    "num_epochs": 1,
    "max_prompt_tokens": 1,
    "sampling.max_tokens": 1,
    "evaluation.prompts_per_batch": 1,
    "evaluation.completions": 0,
}


def check_sampling(sampling: Sampling, options: RolloutOptions) -> None:
    """Refuse ways of sampling under which the completions of a group are all equal, or too few to compare.

    Args:
        sampling: How completions are drawn.
        options: What a rollout is made of.

    Raises:
        ConfigError: For a group without any spread, or a probe that is the whole group.
    """
    dynamic = options.dynamic_sampling
    if dynamic is not None and (dynamic.probe or 0) >= sampling.completions:
        raise ConfigError(
            f"`data.rollout.dynamic_sampling.probe` expected fewer samples than `data.sampling.completions` "
            f"({sampling.completions}), but got {dynamic.probe}: nothing would be left to save"
        )
    greedy = {"temperature": sampling.temperature <= 0, "top_k": sampling.top_k == 1, "min_p": sampling.min_p == 1}
    for name in (name for name, is_greedy in greedy.items() if is_greedy):
        raise ConfigError(
            f"`data.sampling.{name}` expected {'to be > 0' if name == 'temperature' else 'several possible tokens'}, "
            f"but got {getattr(sampling, name)}: greedy samples of a group are all equal and teach nothing. Evaluation "
            "draws its greedy answers by itself"
        )
    if sampling.completions < 2:
        raise ConfigError(
            f"`data.sampling.completions` expected to be >= 2, but got {sampling.completions}: an advantage "
            "is a comparison within the group"
        )


def check_engine(engine: Engine, sampling: Sampling, options: RolloutOptions) -> None:
    """Refuse what this engine cannot do.

    Args:
        engine: Who draws.
        sampling: How completions are drawn.
        options: When they are drawn.

    Raises:
        ConfigError: It cannot sample so, or take weights so, or would sleep while it is to draw ahead.
    """
    engine.check_sampling(sampling)
    if options.asynchronous is None:
        return
    engine.check_in_flight(options.asynchronous.in_flight)
    if engine.rests:
        raise ConfigError(
            "`data.engine.sleep` expected none beside `data.rollout.asynchronous`, but both are set: an engine that "
            "draws ahead is never idle while the learner works. Drop one"
        )


def check_counts(data: Any) -> None:
    """Refuse counts of nothing.

    Args:
        data: A data module, or its configuration.

    Raises:
        ConfigError: For one below its least value, or more updates than prompts.
    """
    for name, least in _LEAST.items():
        if (value := attrgetter(name)(data)) < least:
            raise ConfigError(f"`data.{name}` expected to be >= {least}, but got {value}")
    if data.num_updates > data.prompts_per_rollout:
        raise ConfigError(
            f"`data.num_updates` expected at most `data.prompts_per_rollout` ({data.prompts_per_rollout}), but got "
            f"{data.num_updates}: a group is never cut"
        )


def check_room(checkpoint: str, prompt: int, completion: int) -> None:
    """Refuse lengths that the model has no room for.

    Args:
        checkpoint: The model.
        prompt: Most tokens of a prompt.
        completion: Most tokens of a completion.

    Raises:
        ConfigError: Where they exceed its context together, or the length up to which its positions mean the same.
    """
    room = context_length(checkpoint)
    if prompt + completion > room:
        raise ConfigError(
            f"`data.max_prompt_tokens` + `data.sampling.max_tokens` expected at most {room}, the model's context, "
            f"but got {prompt} + {completion}"
        )
    steady = steady_length(checkpoint)
    if prompt + completion > steady:
        raise ConfigError(
            f"`data.max_prompt_tokens` + `data.sampling.max_tokens` expected at most {steady}, but got {prompt} + "
            f"{completion}: beyond that this model rotates positions by the longest sequence of a forward pass, so "
            "that log-probs would depend on what a micro-batch holds"
        )


def check_staleness(options: RolloutOptions, steps: int) -> None:
    """Refuse what could never be trained on within the bound on staleness.

    Args:
        options: What a rollout is made of.
        steps: Optimizer steps made on one.

    Raises:
        ConfigError: The bound contradicts another setting.
    """
    settings = options.asynchronous
    if settings is None:
        return
    bound, slack = "`data.rollout.asynchronous.max_staleness`", settings.slack(steps)
    if slack < 0:
        raise ConfigError(
            f"{bound} expected at least {steps - 1}, but got {settings.max_staleness}: of the {steps} steps that "
            f"`data.num_updates` times `data.num_epochs` make on a rollout, the last is {steps - 1} later than the "
            f"first. With {2 * steps - 1} one rollout is drawn ahead"
        )
    # Each setting's value, the staleness that it brings by itself, and the most that it may be.
    brought = {
        "asynchronous.weight_sync_steps": (settings.weight_sync_steps, settings.weight_sync_steps - 1, slack + 1)
    }
    if options.replay is not None:
        brought["replay.max_age"] = (options.replay.max_age, options.replay.max_age, slack)
    if options.dynamic_sampling is not None:
        age = options.dynamic_sampling.max_age
        brought["dynamic_sampling.max_age"] = (age, age * steps, slack // steps)
    for name, (value, staleness, most) in brought.items():
        if staleness > slack:
            raise ConfigError(
                f"`data.rollout.{name}` expected at most {most} beside {bound} ({settings.max_staleness}), but got "
                f"{value}: such samples would be too stale to be trained on. Lower it, or raise the bound to "
                f"{staleness + steps - 1}"
            )
