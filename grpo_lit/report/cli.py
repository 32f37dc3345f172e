"""The command ``scripts/report``."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from grpo_lit.command import check_folder
from grpo_lit.errors import ConfigError
from grpo_lit.report.charts import panel_rows
from grpo_lit.report.drawing import Drawing, picture
from grpo_lit.report.figures import printed
from grpo_lit.report.health import episodes, marks
from grpo_lit.report.page import curves_of, page
from grpo_lit.report.record import read_runs

DESCRIPTION = """\
Write one page about a run, or about several overlaid, and a picture of its panels.

The page has held-out accuracy before and after, the five panels, health events, samples, configuration and versions. It
is one file that needs no network. Runs that are still going can be looked at too.
"""


def main(args: Sequence[str] | None = None) -> int:
    """Write a report from the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="scripts/report", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs, e.g. runs/quickstart/version_0")
    parser.add_argument("--out", type=Path, default=Path("report.html"), help="the page; the picture stands beside it")
    parser.add_argument(
        "--over", metavar="METRIC", help="x-axis: a count such as system/tokens_sampled; default: steps"
    )
    parser.add_argument("--title", help="above the page; default: the names of the runs")
    arguments = parser.parse_args(args)
    try:
        if arguments.out.suffix not in (".html", ".htm"):
            raise ConfigError(f"`out` expected a name that ends in .html, but got {arguments.out}")
        check_folder(arguments.out, "out")
        runs = read_runs(arguments.runs)
        found = episodes(runs)
        drawing = Drawing(curves_of(runs, arguments.over), arguments.over, marks(runs, found, arguments.over))
        title = arguments.title or ", ".join(run.name for run in runs)
        # Half of a pair that JSON can name alone is no character that a file can hold.
        arguments.out.write_bytes(page(runs, drawing, found, title).encode("utf-8", "replace"))
        image, rows = arguments.out.with_suffix(".png"), panel_rows(drawing.varying())
        if rows:
            picture(drawing, rows, image, title if len(runs) == 1 else "")
        print("\n".join(printed({run.name: run.scalars for run in runs}, arguments.over)))
        print(f"wrote {arguments.out}{f' and {image}' if rows else '; a picture takes two steps'}")
    except ConfigError as error:
        parser.exit(2, f"error: {error}\n")
    return 0
