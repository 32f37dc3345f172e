"""The command ``scripts/export``."""

import argparse
from pathlib import Path

from grpo_lit.errors import ConfigError

DESCRIPTION = "Turn a training checkpoint into a Hugging Face folder that transformers and vLLM load."
DTYPES = ("bfloat16", "float16", "float32")


def main() -> None:
    """Command line of ``scripts/export``."""
    parser = argparse.ArgumentParser(prog="scripts/export", description=DESCRIPTION)
    parser.add_argument(
        "checkpoint", type=Path, help="a checkpoint of a run, e.g. runs/NAME/version_0/checkpoints/last.ckpt"
    )
    parser.add_argument("target", type=Path, help="the folder to write")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the written weights")
    parser.add_argument("--adapter", action="store_true", help="the adapter alone, for peft, instead of merged weights")
    arguments = parser.parse_args()
    # What takes seconds to import is not needed to print the help.
    import torch

    from grpo_lit.export import export
    from grpo_lit.quiet import quieten

    quieten()
    try:
        print(export(arguments.checkpoint, arguments.target, getattr(torch, arguments.dtype), arguments.adapter))
    except ConfigError as error:
        parser.exit(2, f"error: {error}\n")
