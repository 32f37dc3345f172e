"""The command ``scripts/benchmark_learner``."""

from collections.abc import Sequence
from dataclasses import fields

from jsonargparse import ArgumentParser
from rich.console import Console

from grpo_lit.bench.options import ARMS, MEASURED, Options
from grpo_lit.command import HelpFormatter, exit_status
from grpo_lit.errors import ConfigError

DESCRIPTION = """\
Measure the learner beside others: the gradient of one optimizer step on one rollout, with SmolLM2-135M's shapes.

Arms: ours: prompts shared by their completions, packs under a token budget, the head in chunks; plain: rows of 16
sequences padded at the right, full logits; trl: TRL's GRPOTrainer with rows of 16, where it is installed; compiled:
ours with callbacks.CompileNorms. Each has a process of its own. Before anything is timed, every arm's loss and
gradient must be finite, and those of ours and plain agree: to 1e-5 in float32; in bf16 the loss to 1e-2, the gradient
to 5e-2. Rounds interleave the arms; a figure is the median of all rounds, least and greatest in brackets.

Columns: tokens/s: completion tokens over the time of the gradient, the reference's forward included where the recipe
pays a KL; x plain: in the same round, times the plain learner's; peak GiB: most memory during the step above weights,
reference and optimizer state, gradients included; matmul peak: operations that the gradient cannot do without (distinct
tokens, logits of completions only), per second, over those of a large matrix product of the same process right before
and after; update s: the optimizer's step, no part of tokens/s.

Examples:
  scripts/benchmark_learner --preset long --json long.json
  scripts/benchmark_learner --arms ours --groups 4 16 64      # is the time of a token flat, is memory?
  scripts/benchmark_learner --arms ours compiled              # does it pay to compile?
  scripts/benchmark_learner --tiny true --rounds 1            # does it work at all? Seconds
"""


def main(args: Sequence[str] | None = None) -> int:
    """Run the benchmark from the command line; return the exit status."""
    parser = ArgumentParser(prog="scripts/benchmark_learner", description=DESCRIPTION, formatter_class=HelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(MEASURED), help="What to measure.")
    parser.add_argument("--groups", nargs="+", type=int, default=[8], help="Sizes of rollouts, in prompts.")
    parser.add_class_arguments(Options)
    parsed = parser.parse_args(args)
    # What takes seconds to import is not needed to print the help.
    from grpo_lit.bench.rounds import run
    from grpo_lit.bench.settings import Settings

    def measure() -> int:
        if min(parsed.groups) < 1:
            raise ConfigError(f"`groups` expected numbers >= 1, but got {min(parsed.groups)}")
        settings = Settings(**{field.name: parsed[field.name] for field in fields(Options)})
        return run(settings, list(dict.fromkeys(parsed.arms)), list(dict.fromkeys(parsed.groups)))

    return exit_status(measure, Console(stderr=True))
