"""Whatever a model writes, TensorBoard shows it as it was written."""

from html.parser import HTMLParser

import pytest
from tensorboard.plugin_util import markdown_to_safe_html

from callbacks.tensorboard import cell, table


class Cells(HTMLParser):
    """Collects the text of every table cell, with a line break as one."""

    def __init__(self) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.add(tag)
        if tag in ("td", "th"):
            self.cells.append("")
        elif tag == "br":
            self.cells[-1] += "\n"

    def handle_data(self, data: str) -> None:
        if self.cells and data.strip("\n"):
            self.cells[-1] += data


@pytest.mark.parametrize(
    "text",
    [
        "a | b || c",
        "two\nlines\n\nand\na third",
        "# no title",
        "* no\n* list",
        "1. none either",
        "**bold** _it_ `code` ```\nfence\n```",
        "[link](http://x.y) ![image](http://x.y/z.png)",
        "<script>alert(1)</script> <b>bold</b> <br>",
        "&amp; &#124; &lt;",
        "\\boxed{\\frac{1}{2}} $x_1^2$ \\| \\\\",
        "---\n| --- |\n> quote",
        "größer 大きい ≤ 🙂",
        "trailing pipe |",
        "",
    ],
)
def test_a_cell_shows_the_text_itself(text: str) -> None:
    parser = Cells()
    parser.feed(markdown_to_safe_html(table(["one", "two"], [[cell(text), "next"]])))
    assert parser.cells == ["one", "two", text.strip(), "next"]
    assert parser.tags <= {"table", "thead", "tbody", "tr", "th", "td", "br"}


def test_what_cannot_be_shown_is_marked():
    assert cell("a\x00b\x1b\r\nc\td") == "a�b��<br>c\td"
