"""Rules over a run's own metrics that name what is wrong, why, and what to do."""

from grpo_lit.health.history import History
from grpo_lit.health.monitor import Monitor, diagnose
from grpo_lit.health.rule import Event, Finding, Rule
from grpo_lit.health.rules import Rules

__all__ = ["Event", "Finding", "History", "Monitor", "Rule", "Rules", "diagnose"]
