"""Health's thresholds are keys of the configuration."""

import pytest
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback

from callbacks import Health
from grpo_lit.errors import ConfigError
from grpo_lit.health.length import Truncation


def made(**rules: object) -> Callback:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--callback", type=Callback)
    init_args = {"rules": rules} if rules else {}
    return parser.instantiate(
        parser.parse_object({"callback": {"class_path": "callbacks.Health", "init_args": init_args}})
    ).callback


def test_thresholds_are_set_in_yaml() -> None:
    more = [{"class_path": "grpo_lit.health.length.Truncation", "init_args": {"share": 0.2}}]
    rules = made(entropy_collapse={"low": 0.05}, off=["reward_noise"], more=more).rules
    assert rules.entropy_collapse.low == 0.05
    assert rules.entropy_collapse.window == 5
    assert rules.active()[-1] == Truncation(share=0.2)
    assert "reward_noise" not in [rule.name for rule in rules.active()]


def test_nothing_need_be_set() -> None:
    assert len(made().rules.active()) == 13


def test_a_rule_that_is_none_is_refused() -> None:
    with pytest.raises((ConfigError, ValueError), match="sleep"):
        made(off=["sleep"])


def test_state_is_plain_and_taken_up() -> None:
    health, other = Health(), Health()
    health._monitor.add(0, {"optimization/lr": 0.0})
    other.load_state_dict(health.state_dict())
    assert other.state_dict() == health.state_dict()
    assert other.state_dict()["history"] == {"optimization/lr": [[0], [0.0]]}
