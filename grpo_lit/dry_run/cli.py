"""The command ``scripts/dry_run``."""

import sys
from collections.abc import Sequence
from typing import Any, get_args

import psutil
import torch
from jsonargparse import ActionConfigFile, Namespace
from lightning.pytorch import Trainer
from rich.console import Console
from rich.table import Table

from grpo_lit import cli as command_line
from grpo_lit.data.checks import check_room
from grpo_lit.data.module import RolloutDataModule
from grpo_lit.dry_run.footprint import Footprint, activation_bytes
from grpo_lit.dry_run.options import DESCRIPTION, OPTIONS
from grpo_lit.dry_run.plan import STRATEGIES, Copies, Plan, plan
from grpo_lit.dry_run.workload import Workload
from grpo_lit.errors import ConfigError
from grpo_lit.mistakes import PlainParser
from grpo_lit.module import GRPOModule, OldPolicy
from grpo_lit.policy.policy import can_share_prefix
from grpo_lit.policy.precision import weights_dtype

GIB = 2.0**30


def _parser() -> PlainParser:
    parser = PlainParser(prog="scripts/dry_run", description=DESCRIPTION, parser_mode="yaml")
    parser.add_argument("--config", action=ActionConfigFile, help="As for grpo-lit fit; later ones win.")
    for name, arguments in OPTIONS.items():
        parser.add_argument(name, **arguments)
    parser.add_argument("--seed_everything", type=bool | int, default=True, help="Without a meaning here.")
    parser.add_argument("--ckpt_path", type=str | None, default=None, help="Without a meaning here.")
    parser.add_class_arguments(Trainer, "trainer", instantiate=False, fail_untyped=False)
    parser.add_class_arguments(GRPOModule, "model", fail_untyped=False)
    parser.add_class_arguments(RolloutDataModule, "data", instantiate=False, fail_untyped=False)
    parser.link_arguments("model.checkpoint", "data.checkpoint")
    return parser


def chosen_strategy(strategy: Any) -> str:
    """Return which of the compared strategies a configuration names, or the name of another."""
    if isinstance(strategy, str):
        return {"auto": "single"}.get(strategy, strategy.split("_")[0])
    name = strategy.class_path.rsplit(".", 1)[-1].removesuffix("Strategy").lower()
    return {"singledevice": "single"}.get(name, name)


def ranks(trainer: Namespace) -> int:
    """Return how many processes a configuration asks for.

    Raises:
        ConfigError: It leaves that to the machine of the run.
    """
    devices = trainer.devices
    count = len(devices) if isinstance(devices, list) else devices
    if isinstance(count, str):
        count = int(count) if count.isdigit() else 0
    if count < 1:
        raise ConfigError(f"`--world-size` expected a number where `trainer.devices` is {devices!r}: how many ranks?")
    return int(count) * int(trainer.num_nodes)


def _check(parsed: Namespace, world_size: int) -> None:
    """Refuse numbers that mean nothing, and strategies that are not compared."""
    data = parsed.data
    counts = {
        "world-size": world_size,
        "trainer.num_nodes": int(parsed.trainer.num_nodes),
        "data.num_updates": data.num_updates,
        "data.num_epochs": data.num_epochs,
        "data.prompts_per_rollout": data.prompts_per_rollout,
        "data.sampling.completions": data.sampling.completions,
        "data.sampling.max_tokens": data.sampling.max_tokens,
        "data.max_prompt_tokens": data.max_prompt_tokens,
    }
    for name, count in counts.items():
        if count < 1:
            raise ConfigError(f"`{name}` expected to be >= 1, but got {count}")
    if parsed.memory_gib is not None and not parsed.memory_gib > 0:
        raise ConfigError(f"`memory-gib` expected to be > 0, but got {parsed.memory_gib}")
    check_room(parsed.model.checkpoint, data.max_prompt_tokens, data.sampling.max_tokens)
    if (chosen := chosen_strategy(parsed.trainer.strategy)) not in STRATEGIES:
        raise ConfigError(
            f"`trainer.strategy` expected one of {', '.join(STRATEGIES)}, which are compared, but got {chosen}: a rank "
            "of classic FSDP holds about what one of fsdp2 does"
        )


def _workload(parsed: Namespace, module: GRPOModule) -> Workload:
    data, able = parsed.data, can_share_prefix(module.policy.model)
    return Workload(
        prompts=max(data.prompts_per_rollout // data.num_updates, 1),
        completions=data.sampling.completions,
        prompt_tokens=data.max_prompt_tokens,
        completion_tokens=data.sampling.max_tokens,
        budget=module.max_tokens_per_micro_batch,
        share_prefix=able if module.share_prefix is None else module.share_prefix,
    )


def _copies(parsed: Namespace, module: GRPOModule, footprint: Footprint) -> Copies:
    logprobs, weights, _ = get_args(OldPolicy)
    steps = parsed.data.num_updates * parsed.data.num_epochs
    reference = module.objective.needs_reference or module.shadows.needs_reference
    scored = steps > 1 and module.old_policy_source in (logprobs, weights)
    inside = parsed.data.engine.class_path.rsplit(".", 1)[-1] == "TransformersEngine"
    return Copies(
        reference=int(reference),
        old_policy=int(module.old_policy_source == weights),
        scoring=int(reference) + (steps - 1) / steps * int(scored),
        engine=footprint.parameters.bytes() if inside else 0,
    )


def _memory(parsed: Namespace, world_size: int) -> float:
    """Return the bytes that a rank may take."""
    if parsed.memory_gib is not None:
        return float(parsed.memory_gib) * GIB
    if torch.cuda.is_available():
        return float(torch.cuda.get_device_properties(0).total_memory)
    return psutil.virtual_memory().total / max(world_size // max(int(parsed.trainer.num_nodes), 1), 1)


def table(plans: dict[str, Plan], chosen: str, world_size: int) -> Table:
    """Return a column for each strategy."""
    shown = Table(title=f"a rank of {world_size}; memory in GiB", caption="every prompt and answer at its limit")
    shown.add_column("")
    for name in plans:
        shown.add_column(f"{name} *" if name == chosen else name, justify="right")

    def row(label: str, values: list[str]) -> None:
        shown.add_row(label, *values)

    for kind in next(iter(plans.values())).memory:
        row(kind, [f"{made.memory[kind] / GIB:.3f}" for made in plans.values()])
    shown.add_section()
    row("memory in all", [f"{made.total / GIB:.3f}" for made in plans.values()])
    shown.add_section()
    row("completion tokens per step", [f"{made.tokens:,}" for made in plans.values()])
    row("micro-batches per step", [f"{made.micro_batches:,}" for made in plans.values()])
    for kind in ("gradients", "weights", "to the engine"):
        row(f"collectives per step: {kind}", [f"{made.collectives.get(kind, 0):,}" for made in plans.values()])
    return shown


def main(args: Sequence[str] | None = None) -> int:
    """Estimate from the command line; return the exit status."""
    parser = _parser()
    PlainParser.class_names = command_line.PlainParser.class_names
    parsed = parser.parse_args(list(sys.argv[1:] if args is None else args))
    errors = Console(stderr=True)
    try:
        world_size = ranks(parsed.trainer) if parsed.world_size is None else parsed.world_size
        _check(parsed, world_size)
        module = parser.instantiate_classes(parsed).model
        precision = str(parsed.trainer.precision or "32-true")
        footprint = Footprint.of(module, weights_dtype(precision))
        workload = _workload(parsed, module)
        autocast = torch.bfloat16 if precision == "bf16-mixed" else None
        activations = activation_bytes(module, workload.largest_pack(), autocast)
    except ConfigError as error:
        errors.print(f"error: {error}", markup=False, soft_wrap=True)
        return 2
    copies = _copies(parsed, module, footprint)
    plans = {name: plan(name, world_size, footprint, workload, copies, activations) for name in STRATEGIES}
    chosen, memory = chosen_strategy(parsed.trainer.strategy), _memory(parsed, world_size)
    Console().print(table(plans, chosen, world_size))
    if footprint.assumed_states:
        errors.print("the optimizer's states are taken to be two float32 numbers for each parameter")
    fails = [name for name, made in plans.items() if made.total > memory]
    for name in fails:
        print(f"warning: {name} does not fit: {plans[name].total / GIB:.2f} of {memory / GIB:.2f} GiB", file=sys.stderr)
    if fails:
        print(
            "  lower model.max_tokens_per_micro_batch, which changes no result, then model.gradient_checkpointing: "
            "true, then fsdp2 on more ranks",
            file=sys.stderr,
        )
    return int(chosen in fails)
