"""On what a run is to run: settings of the Trainer that cannot work, refused before anything is loaded."""

import difflib
import inspect
import os
import re
from typing import Any

import torch
import yaml
from jsonargparse import Namespace
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.strategies import StrategyRegistry

from grpo_lit import strategies
from grpo_lit.errors import ConfigError

#: Strategies that a name is enough for; of Lightning's others, the classes of grpo_lit.strategies take the place.
NAMES = ("auto", "ddp", "ddp_find_unused_parameters_false", "ddp_find_unused_parameters_true", "single_device")
#: By their class names in lower case: strategies that need a class, and the overlay that names it.
_OVERLAYS = {name.lower(): f"configs/strategy/{name.lower()}.yaml" for name in strategies.__all__}


def check_processes(trainer: Namespace) -> None:
    """Refuse a strategy, an accelerator or a number of devices that there is none of.

    Args:
        trainer: Configuration of the Trainer.

    Raises:
        ConfigError: In a sentence that names the key.
    """
    if isinstance(trainer.strategy, str):
        _check_name(trainer.strategy)
    else:
        _check_class(trainer.strategy)
    if isinstance(trainer.accelerator, str):
        _check_accelerator(trainer.accelerator)
        _check_devices(trainer.devices, trainer.accelerator)
    if trainer.num_nodes < 1:
        raise ConfigError(f"`trainer.num_nodes` expected to be >= 1, but got {trainer.num_nodes}")


def refusal(error: Exception, trainer: Namespace) -> ConfigError:
    """Return what Lightning has against a Trainer's settings, with the keys that its sentence is about."""
    said = str(error)
    named = [key for key in vars(trainer) if re.search(rf"\b{key}\b", said) and getattr(trainer, key) is not None]
    keys = ", ".join(f"`trainer.{key}: {getattr(trainer, key)}`" for key in named) or "`trainer`"
    return ConfigError(f"{keys} cannot be used: {said}")


def _check_name(name: str) -> None:
    if name in NAMES:
        return
    if re.match(r"[\w.]+\.\w+$", name) or name.lstrip().startswith("{"):
        _check_written_out(name)
    family = name.split("_")[0]
    if family in _OVERLAYS:
        how = f"that is --config {_OVERLAYS[family]}, whose class an optimizer step of several micro-batches needs"
    elif name in StrategyRegistry.available_strategies() and name.startswith("ddp"):
        how = "processes of their own are started by `ddp`; an engine cannot be copied into others"
    else:
        close = difflib.get_close_matches(name.lower(), [*NAMES, *_OVERLAYS], n=2, cutoff=0.5)
        how = f"did you mean {' or '.join(close)}?" if close else "configs/strategy/ has an overlay for each"
    raise ConfigError(f"`trainer.strategy` expected {', '.join(NAMES)} or a class, but got {name!r}: {how}")


def _check_written_out(text: str) -> None:
    """Refuse a class that jsonargparse has taken for a name, for a reason that it keeps to itself."""
    given: Any = yaml.safe_load(text) if text.lstrip().startswith("{") else text
    if isinstance(given, str):
        raise ConfigError(
            f"`trainer.strategy` expected a class as '{{class_path: {given}}}' on the command line, but got {text!r}"
        )
    name = str(given.get("class_path", "")).rsplit(".", 1)[-1]
    known = getattr(strategies, name, None)
    if known is not None:
        takes = list(inspect.signature(known).parameters)
        for key in set(given.get("init_args") or {}) - set(takes):
            raise ConfigError(
                f"`trainer.strategy.init_args` of {name} expected {', '.join(takes)}, but got {key}{_parallel(key)}"
            )
    raise ConfigError(f"`trainer.strategy` expected a class that there is, and its arguments, but got {text}")


def _parallel(key: str) -> str:
    if "parallel_size" not in key:
        return ""
    return ": all ranks are in one data-parallel group, and no layer is cut over several (tensor parallelism)"


def _check_class(given: Namespace) -> None:
    """Refuse those of Lightning's classes that have a successor here."""
    name = given.class_path.rsplit(".", 1)[-1]
    options = given.get("init_args") or {}
    if name == "ModelParallelStrategy" and (size := options.get("tensor_parallel_size", "auto")) != 1:
        raise ConfigError(
            f"`trainer.strategy.init_args.tensor_parallel_size` expected 1, but got {size}: no layer is cut over "
            "several ranks. Use --config configs/strategy/fsdp2.yaml"
        )
    if given.class_path.startswith("lightning.") and (own := name.removesuffix("Strategy").lower()) in _OVERLAYS:
        raise ConfigError(
            f"`trainer.strategy` expected grpo_lit's own class, but got {given.class_path}: Lightning's takes a "
            f"training step for one forward pass. Use --config {_OVERLAYS[own]}"
        )


def _check_accelerator(name: str) -> None:
    if name in ("auto", "gpu"):
        there = name == "auto" or torch.cuda.is_available() or torch.backends.mps.is_available()
    elif name in AcceleratorRegistry:
        there = AcceleratorRegistry[name]["accelerator"].is_available()
    else:
        known = ["auto", "gpu", *sorted(AcceleratorRegistry)]
        raise ConfigError(f"`trainer.accelerator` expected one of {', '.join(known)}, but got {name!r}")
    if not there:
        raise ConfigError(f"`trainer.accelerator` expected a device of this machine, but got {name}: use cpu")


def _gpus(accelerator: str) -> tuple[str, int] | None:
    """Return what GPUs a run would take, and how many this process sees; ``None``: it would take none."""
    if accelerator in ("cuda", "gpu", "auto") and torch.cuda.is_available():
        return "CUDA", torch.cuda.device_count()
    if accelerator in ("mps", "gpu", "auto") and torch.backends.mps.is_available():
        return "MPS", 1
    return None


def _check_devices(devices: Any, accelerator: str) -> None:
    """Refuse numbers of devices that mean nothing, or more than there are."""
    gpus = _gpus(accelerator)
    if devices == "auto" or (gpus and devices in (-1, "-1")):
        return
    if isinstance(devices, str) and re.fullmatch(r"\s*\d+\s*(,\s*\d*\s*)*", devices):  # "2", or "0, 1": both of them
        devices = [int(n) for n in devices.split(",") if n.strip()] if "," in devices else int(devices)
    if isinstance(devices, list) and gpus and devices:
        wanted = max(devices) + 1
    elif isinstance(devices, int) and devices > 0:
        wanted = devices
    else:
        raise ConfigError(f"`trainer.devices` expected a number >= 1, or auto, but got {devices!r} with {accelerator}")
    if gpus is None or wanted <= gpus[1]:
        return
    kind, there = gpus
    advice = "`trainer.num_nodes` counts machines"
    if there == 1 and torch.distributed.is_available() and torch.distributed.is_torchelastic_launched():
        if os.environ.get("LOCAL_RANK") == "0":
            return  # each rank may be shown its own device alone, and all of them call it the first
        advice = "ranks that see one device each, under torchrun, need its --virtual-local-rank"
    raise ConfigError(
        f"`trainer.devices` expected at most the {there} {kind} devices of this machine, but got {devices}; {advice}"
    )
