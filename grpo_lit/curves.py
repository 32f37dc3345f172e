"""The six most telling curves of runs as a picture, over optimizer steps or over what was spent.

Several runs are overlaid with one colour each. The accuracies are printed, for several runs also at the largest x that
all of them reached. An accuracy measured at step s has cost what the steps before s had spent.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from grpo_lit.errors import ConfigError
from grpo_lit.report.axis import along
from grpo_lit.report.charts import overview_rows
from grpo_lit.report.drawing import Drawing, picture
from grpo_lit.report.events import read_scalars, run_folder
from grpo_lit.report.figures import printed
from grpo_lit.report.record import names_of

__all__ = ["main", "read_scalars"]

PICTURES = (".png", ".svg", ".pdf")


def main(args: Sequence[str] | None = None) -> None:
    """Command line of ``scripts/curves``."""
    parser = argparse.ArgumentParser(
        prog="scripts/curves", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs, e.g. runs/quickstart/version_0")
    parser.add_argument("target", type=Path, help="the picture to write: .png, .svg or .pdf")
    parser.add_argument(
        "--over", metavar="METRIC", help="x-axis: a count such as system/tokens_sampled; default: steps"
    )
    parser.add_argument("--title", default="", help="above the panels")
    arguments = parser.parse_args(args)
    try:
        if arguments.target.suffix not in PICTURES:
            raise ConfigError(f"`target` expected one of {', '.join(PICTURES)}, but got {arguments.target}")
        folders = [run_folder(run) for run in arguments.runs]
        runs = dict(zip(names_of(folders), map(read_scalars, folders), strict=True))
        drawing = Drawing({name: along(own, arguments.over) for name, own in runs.items()}, arguments.over)
        picture(drawing, overview_rows(drawing.varying()), arguments.target, arguments.title)
        print("\n".join([*printed(runs, arguments.over), f"wrote {arguments.target}"]))
    except ConfigError as error:
        parser.exit(2, f"error: {error}\n")
