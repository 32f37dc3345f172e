"""Devices that there are none of, and strategies that there are none of, are refused by their keys."""

from typing import Any

import pytest
import torch
from jsonargparse import Namespace

from grpo_lit.errors import ConfigError
from grpo_lit.strategies.checks import check_processes, refusal

TP = "{class_path: grpo_lit.strategies.FSDP2, init_args: {tensor_parallel_size: 2}}"
LIGHTNINGS = "lightning.pytorch.strategies."


def trainer(**changes: Any) -> Namespace:
    return Namespace(**{"strategy": "auto", "accelerator": "cpu", "devices": 1, "num_nodes": 1, **changes})


def strategy(name: str, **options: Any) -> Namespace:
    return Namespace(class_path=name, init_args=Namespace(**options))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"strategy": "fsdp3"}, r"`trainer\.strategy`.*'fsdp3': did you mean fsdp or fsdp2\?"),
        ({"strategy": "fsdp2"}, r"`trainer\.strategy`.*--config configs/strategy/fsdp2\.yaml"),
        ({"strategy": "deepspeed_stage_2"}, r"`trainer\.strategy`.*--config configs/strategy/deepspeed\.yaml"),
        ({"strategy": "fsdp_cpu_offload"}, r"`trainer\.strategy`.*--config configs/strategy/fsdp\.yaml"),
        ({"strategy": "ddp_spawn"}, r"`trainer\.strategy`.*'ddp_spawn'.*`ddp`"),
        ({"strategy": "horovod"}, r"`trainer\.strategy`.*configs/strategy/ has"),
        (
            {"strategy": "grpo_lit.strategies.FSDP2"},
            r"`trainer\.strategy`.*\{class_path: grpo_lit\.strategies\.FSDP2\}",
        ),
        ({"strategy": TP}, r"`trainer\.strategy\.init_args`.*got tensor_parallel_size: .*no layer is cut"),
        ({"strategy": "{class_path: no.Such}"}, r"`trainer\.strategy`.*no\.Such"),
        ({"strategy": strategy(f"{LIGHTNINGS}ModelParallelStrategy", tensor_parallel_size=2)}, "expected 1, but got 2"),
        ({"strategy": strategy(f"{LIGHTNINGS}ModelParallelStrategy")}, "expected 1, but got auto"),
        ({"strategy": strategy(f"{LIGHTNINGS}FSDPStrategy")}, r"configs/strategy/fsdp\.yaml"),
        ({"strategy": strategy(f"{LIGHTNINGS}DeepSpeedStrategy")}, r"configs/strategy/deepspeed\.yaml"),
        ({"accelerator": "nonsense"}, r"`trainer\.accelerator` expected one of auto, gpu, cpu, cuda.*'nonsense'"),
        ({"accelerator": "gpu"}, r"`trainer\.accelerator` expected a device of this machine, but got gpu: use cpu"),
        ({"accelerator": "cuda", "devices": 99}, r"`trainer\.accelerator` expected a device of this machine"),
        *(
            ({"devices": count}, r"`trainer\.devices` expected a number >= 1")
            for count in (0, "0", -1, "many", [], [0])
        ),
        ({"num_nodes": 0}, r"`trainer\.num_nodes` expected to be >= 1"),
    ],
)
def test_what_cannot_work_is_refused_by_its_key(
    changes: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match=named):
        check_processes(trainer(**changes))


@pytest.mark.parametrize(
    ("devices", "most"),
    [(4, 4), ("2", 4), ("auto", 4), (-1, 4), ("-1", 4), ([0, 3], 4), ("0, 3", 4), (99, 2), ([2], 2)],
)
def test_cuda_devices_are_counted(devices: Any, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: most)
    asked = trainer(devices=devices, accelerator="cuda")
    if most == 4:
        check_processes(asked)
        return
    with pytest.raises(ConfigError, match=r"`trainer\.devices` expected at most the 2 CUDA devices"):
        check_processes(asked)


def test_ranks_of_torchrun_may_see_one_device_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """With --virtual-local-rank; without it, all but the first would take a device that they do not see."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    asked = trainer(devices=8, accelerator="cuda")
    with pytest.raises(ConfigError, match=r"at most the 1 CUDA devices.*`trainer\.num_nodes`"):
        check_processes(asked)
    monkeypatch.setattr(torch.distributed, "is_torchelastic_launched", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "0")
    check_processes(asked)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ConfigError, match=r"at most the 1 CUDA devices.*--virtual-local-rank"):
        check_processes(asked)


@pytest.mark.parametrize("accelerator", ["auto", "gpu"])
def test_the_one_device_of_mps_is_counted(accelerator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    for devices in (-1, "-1", 1, "0,", [0]):
        check_processes(trainer(devices=devices, accelerator=accelerator))
    with pytest.raises(ConfigError, match=r"`trainer\.devices` expected at most the 1 MPS devices"):
        check_processes(trainer(devices=2, accelerator=accelerator))


def test_what_works_is_let_through() -> None:
    own = [strategy(f"grpo_lit.strategies.{name}") for name in ("FSDP", "FSDP2", "DeepSpeed")]
    lightnings = [
        strategy(f"{LIGHTNINGS}DDPStrategy", static_graph=True),
        strategy(f"{LIGHTNINGS}ModelParallelStrategy", tensor_parallel_size=1),
    ]
    for given in ("auto", "ddp", "ddp_find_unused_parameters_true", *own, *lightnings):
        check_processes(trainer(strategy=given, devices="2"))
    check_processes(trainer(accelerator=Namespace(class_path="own.Accelerator"), devices="its own business"))


def test_lightnings_own_refusals_get_their_keys() -> None:
    """Such as that of a torchrun that started another number of processes than `trainer.devices`."""
    said = ValueError("You set `devices=1` in Lightning, but the number of processes configured in torchrun is 2")
    told = str(refusal(said, trainer(devices=1)))
    assert told.startswith("`trainer.devices: 1` cannot be used: You set")
    assert str(refusal(ValueError("no"), trainer())) == "`trainer` cannot be used: no"
