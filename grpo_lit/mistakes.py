"""Answers to mistakes in a configuration: the key, what is wrong, and what may have been meant, in a few lines."""

import difflib
import re
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from lightning.pytorch.cli import LightningArgumentParser

#: What jsonargparse says of every branch of a type, when only one of them was meant.
_NOISE = re.compile(
    r"Does not validate against any|Subtypes:|Errors:|Given value|Problem with given class_path|Parser key"
    r"|Expected a <class 'NoneType'>|Expected a path but"
)
_UNKNOWN_CLASS = re.compile(r"Expected a dot import path string: (\w+)")


def condensed(message: str, class_names: Iterable[str] = ()) -> str:
    """Return jsonargparse's message as ``key: reason`` lines, without the types that were not meant.

    Args:
        message: As raised: nested over every branch of a Union.
        class_names: Names that may be written without a path, for suggestions.
    """
    key = ".".join(re.findall(r'Parser key "([^"]+)"', message))
    reasons = [line.strip(" -") for line in message.splitlines() if line.strip() and not _NOISE.search(line)]
    inline = re.findall(r'Parser key "[^"]+": (.+)', message)
    reasons = list(dict.fromkeys(inline + reasons)) or [message.strip()]
    if own := [reason for reason in reasons if reason.startswith("`")]:
        reasons = own  # what this project says of a value tells more than the types of the other branches
    for i, reason in enumerate(reasons):
        if unknown := _UNKNOWN_CLASS.search(reason):
            close = difflib.get_close_matches(unknown[1], list(class_names), n=3)
            hint = f"did you mean {' or '.join(close)}?" if close else "write the full path of your own classes"
            reasons[i] = f"there is no class {unknown[1]!r}: {hint}"
    return "\n  ".join([f"{key}:" if key else "", *reasons]).strip() if key else "\n  ".join(reasons)


class PlainParser(LightningArgumentParser):
    """Argument parser that answers a mistake in a few lines instead of the usage of every key.

    Attributes:
        class_names: Names to suggest for an unknown class.
    """

    class_names: tuple[str, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # An abbreviation would take a misspelt key for another one: --model.max_tokens for max_tokens_per_micro_batch.
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the mistake and exit with status 2; a parser inside a parser raises, as its owner expects."""
        if not self.exit_on_error:
            super().error(message, ex)
        print(f"error: {condensed(message, self.class_names)}", file=sys.stderr)
        if unknown := re.search(r"[Uu]nrecognized arguments: (--[\w.]+)", message):
            close = difflib.get_close_matches(unknown[1], list(self._option_string_actions), n=2)
            print(f"  did you mean {' or '.join(close)}?" if close else "  nothing is called so", file=sys.stderr)
        program = self.prog.replace(" [options]", "")
        print(f"  every key is explained by: {program} --help", file=sys.stderr)
        sys.exit(2)
