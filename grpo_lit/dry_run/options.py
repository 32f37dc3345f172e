"""What ``scripts/dry_run`` can be asked for beside a run's configuration; light, so that its help is there at once."""

import argparse
from collections.abc import Sequence
from typing import Any

DESCRIPTION = """Say what a run would need of each rank: memory, tokens, micro-batches and collectives of an optimizer
step, for one process, DDP and FSDP2. Takes the configuration of grpo-lit fit; reads the model's config.json and
tokenizer settings, and no weights. Every prompt and answer is taken to be as long as it may be. Parameters, gradients,
optimizer states and the cache of TransformersEngine at the end of a full batch are exact; activations are those of one
micro-batch at model.max_tokens_per_micro_batch, found by adding up what autograd would keep; allocators take more, 1.4
times on a CPU. A reference counts as large as the policy however it is held; the memory of vLLM's processes is not in
the table. The exit status is 1 where the strategy of the configuration does not fit."""
#: Arguments of ``add_argument`` by the option's name.
OPTIONS: dict[str, dict[str, Any]] = {
    "--world-size": {"type": int, "help": "Ranks; default: trainer.devices times trainer.num_nodes."},
    "--memory-gib": {"type": float, "help": "Of a rank; default: a GPU's, or its share of this machine or container."},
}


def answer_help(words: Sequence[str]) -> None:
    """Print the help and end where it is asked for; of a configuration's keys it names none."""
    if not {"-h", "--help"} & set(words):
        return
    parser = argparse.ArgumentParser(
        prog="scripts/dry_run",
        usage="scripts/dry_run --config FILE [--config FILE ...] [options] [any key of grpo-lit fit]",
        description=DESCRIPTION,
        epilog="Every key of a run can be given too: grpo-lit fit --help explains them.",
    )
    parser.add_argument("--config", metavar="FILE", help="As for grpo-lit fit; later ones win.")
    for name, arguments in OPTIONS.items():
        parser.add_argument(name, **arguments)
    parser.parse_args(["--help"])
