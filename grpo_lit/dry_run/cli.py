"""The command ``scripts/dry_run``."""

import sys
from collections.abc import Sequence
from typing import Any, get_args

import torch
from jsonargparse import ActionConfigFile, Namespace
from lightning.pytorch import Trainer
from rich.console import Console
from rich.table import Table

from grpo_lit import cli as command_line
from grpo_lit.data.checks import check_counts, check_room
from grpo_lit.data.module import RolloutDataModule
from grpo_lit.dry_run.footprint import Footprint, activations, cache_bytes
from grpo_lit.dry_run.options import DESCRIPTION, OPTIONS
from grpo_lit.dry_run.plan import STRATEGIES, Copies, Plan, Sharding, plan
from grpo_lit.dry_run.room import GIB, Room, room_of_a_rank
from grpo_lit.dry_run.workload import Workload
from grpo_lit.errors import ConfigError
from grpo_lit.mistakes import PlainParser
from grpo_lit.module import GRPOModule, OldPolicy
from grpo_lit.policy.policy import can_share_prefix
from grpo_lit.policy.precision import weights_dtype
from grpo_lit.rollouts.transformers import TransformersEngine

#: What Lightning takes short names of precisions for.
_PRECISIONS = {"64": "64-true", "32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}
#: Strategies that are not compared: what is known of them.
_LIKE = {
    "fsdp": "a rank of classic FSDP holds about what one of fsdp2 does",
    "deepspeed": "a rank of it holds the parameters of ddp and the optimizer's states of fsdp2, at stage 2 its "
    "gradients too, at stage 3 about what one of fsdp2 does; compare --trainer.strategy ddp with "
    "configs/strategy/fsdp2.yaml",
}
LEGEND = (
    "* what the configuration chooses. Every prompt and answer is at its limit. Memory at most: parameters, optimizer, "
    "reference, old policy and engine stay; gradients, activations and what is in transit (gathered layers, buckets of "
    "gradients) take turns with the engine's cache of keys and values, unless rollouts are drawn ahead. In brackets: "
    "lies in the machine's memory and is not counted."
)


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


def chosen_strategy(strategy: Any, world_size: int = 1) -> str:
    """Return which of the compared strategies a configuration names, or the name of another.

    Args:
        strategy: ``trainer.strategy``.
        world_size: Its ranks: Lightning makes DDP of ``auto`` on several devices.
    """
    if isinstance(strategy, str):
        return {"auto": "ddp" if world_size > 1 else "single"}.get(strategy, strategy.split("_")[0])
    name = strategy.class_path.rsplit(".", 1)[-1].removesuffix("Strategy").lower()
    return {"singledevice": "single", "modelparallel": "fsdp2"}.get(name, name)


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


def _check(parsed: Namespace, world_size: int, chosen: str) -> None:
    """Refuse numbers that mean nothing, and strategies that are not compared."""
    data = parsed.data
    counts = {
        "world-size": world_size,
        "trainer.num_nodes": int(parsed.trainer.num_nodes),
        "data.sampling.completions": data.sampling.completions,
    }
    for name, count in counts.items():
        if count < 1:
            raise ConfigError(f"`{name}` expected to be >= 1, but got {count}")
    check_counts(data)
    if parsed.memory_gib is not None and not parsed.memory_gib > 0:
        raise ConfigError(f"`memory-gib` expected to be > 0, but got {parsed.memory_gib}")
    check_room(parsed.model.checkpoint, data.max_prompt_tokens, data.sampling.max_tokens)
    if chosen not in STRATEGIES:
        raise ConfigError(
            f"`trainer.strategy` expected one of {', '.join(STRATEGIES)}, which are compared, but got {chosen}: "
            f"{_LIKE.get(chosen, 'configs/strategy/ has those that there are')}"
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
        updates=data.num_updates,
    )


def _copies(parsed: Namespace, module: GRPOModule, footprint: Footprint) -> Copies:
    logprobs, weights, _ = get_args(OldPolicy)
    data, engine = parsed.data, parsed.data.engine
    steps = data.num_updates * data.num_epochs
    reference = module.objective.needs_reference or module.shadows.needs_reference
    scored = steps > 1 and module.old_policy_source in (logprobs, weights)
    held, rows, row = 0, 0, 0
    if engine.class_path.rsplit(".", 1)[-1] == "TransformersEngine":
        made = TransformersEngine(**dict(engine.get("init_args") or {}))
        held, rows = footprint.parameters.elements * made.weight_dtype.itemsize, made.batch_size
        tokens = data.max_prompt_tokens + data.sampling.max_tokens
        row = cache_bytes(parsed.model.checkpoint, tokens, made.weight_dtype.itemsize)
    return Copies(
        reference=int(reference),
        old_policy=int(module.old_policy_source == weights),
        scoring=int(reference) + (steps - 1) / steps * int(scored),
        engine=held,
        rows=rows,
        cache=row,
    )


def _sharding(strategy: Any, on_device: bool) -> Sharding:
    given = {} if isinstance(strategy, str) else dict(strategy.get("init_args") or {})
    offloaded = on_device and given.get("cpu_offload", False)
    return Sharding(reshard=given.get("reshard_after_forward", True), offload=offloaded)


def table(plans: dict[str, Plan], chosen: str, world_size: int, at_once: bool) -> Table:
    """Return a column for each strategy."""
    shown = Table(title=f"a rank of {world_size}; memory in GiB", caption=LEGEND, caption_justify="left")
    shown.add_column("")
    for name in plans:
        shown.add_column(f"{name} *" if name == chosen else name, justify="right")

    def row(label: str, values: list[str]) -> None:
        shown.add_row(label, *values)

    for kind in next(iter(plans.values())).memory:
        row(kind, [_gib(made.memory[kind], kind in made.elsewhere) for made in plans.values()])
    shown.add_section()
    row("memory at most", [_gib(made.total(at_once)) for made in plans.values()])
    shown.add_section()
    row("completion tokens per step", [f"{made.tokens:,}" for made in plans.values()])
    row("micro-batches per step", [f"{made.micro_batches:,}" for made in plans.values()])
    for kind in ("gradients", "weights", "to the engine"):
        row(f"collectives per step: {kind}", [f"{made.collectives.get(kind, 0):,}" for made in plans.values()])
    return shown


def _gib(size: int, elsewhere: bool = False) -> str:
    return f"({size / GIB:.3f})" if elsewhere else f"{size / GIB:.3f}"


def _configured(trainer: Namespace, world_size: int | None) -> tuple[int, str]:
    """Return the number of ranks, and the strategy that the configuration chooses."""
    if world_size is None:
        world_size = configured = ranks(trainer)
    else:  # to compare with: one device stays one
        configured = world_size if trainer.devices in ("auto", -1, "-1") else ranks(trainer)
    return world_size, chosen_strategy(trainer.strategy, configured)


def main(args: Sequence[str] | None = None) -> int:
    """Estimate from the command line; return the exit status."""
    parser = _parser()
    PlainParser.class_names = command_line.PlainParser.class_names
    parsed = parser.parse_args(list(sys.argv[1:] if args is None else args))
    errors = Console(stderr=True)
    try:
        world_size, chosen = _configured(parsed.trainer, parsed.world_size)
        _check(parsed, world_size, chosen)
        strategy = parsed.trainer.strategy
        # Nothing of the Trainer is to be made here, where there may be no such device or package.
        parsed.trainer.update(Namespace(strategy="auto", callbacks=None, logger=None, plugins=None))
        module = parser.instantiate_classes(parsed).model
        precision = _PRECISIONS.get(str(parsed.trainer.precision or 32), str(parsed.trainer.precision))
        footprint = Footprint.of(module, weights_dtype(precision))
        workload = _workload(parsed, module)
        autocast = torch.bfloat16 if precision == "bf16-mixed" else None
        kept = activations(module, workload.largest_pack(), autocast)
        together = max(world_size // int(parsed.trainer.num_nodes), 1)
        rooms = {name: room_of_a_rank(parsed.memory_gib, 1 if name == "single" else together) for name in STRATEGIES}
        copies, sharding = _copies(parsed, module, footprint), _sharding(strategy, rooms["fsdp2"].on_device)
    except ConfigError as error:
        errors.print(f"error: {error}", markup=False, soft_wrap=True)
        return 2
    at_once = parsed.data.rollout.asynchronous is not None
    plans = {name: plan(name, world_size, footprint, workload, copies, kept, sharding) for name in STRATEGIES}
    Console().print(table(plans, chosen, world_size, at_once))
    print(f"a rank may take {rooms[chosen].bytes / GIB:.2f} GiB: {rooms[chosen].said_by}")
    if kept.moved:
        print(
            f"model.activation_offload: {kept.moved / GIB:.2f} GiB of a rank's activations wait pinned in the "
            "machine's memory, beside a GPU, and are not counted"
        )
    if footprint.assumed_states:
        errors.print("the optimizer's states are taken to be two float32 numbers for each parameter")
    return tell_what_does_not_fit({name: made.total(at_once) for name, made in plans.items()}, rooms, chosen)


def tell_what_does_not_fit(totals: dict[str, int], rooms: dict[str, Room], chosen: str) -> int:
    """Warn of every strategy that takes more than it may; return the exit status, which is that of the chosen one."""
    fails = [name for name, total in totals.items() if total > rooms[name].bytes]
    for name in fails:
        sizes = f"{totals[name] / GIB:.2f} of {rooms[name].bytes / GIB:.2f} GiB"
        print(f"warning: {name} does not fit: {sizes}", file=sys.stderr)
    if fails:
        print(
            "  lower model.max_tokens_per_micro_batch, which changes no result, then model.gradient_checkpointing: "
            "true, then fsdp2 on more ranks. --memory-gib says what a rank may take on the machines of the run",
            file=sys.stderr,
        )
    return int(chosen in fails)
