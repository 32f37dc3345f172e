"""What commands have in common: their own words and those passed on, and how their work may end."""

import pytest
from rich.console import Console

from grpo_lit.command import exit_status, own_and_passed_on
from grpo_lit.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "own", "passed_on"),
    [
        (["a", "--x", "1"], ["a", "--x", "1"], []),
        (["a", "--", "--y", "2"], ["a"], ["--y", "2"]),
        (["--", "b", "--", "c"], [], ["b", "--", "c"]),
    ],
)
def test_words_behind_two_dashes_are_passed_on(given, own, passed_on, monkeypatch):
    assert own_and_passed_on(given) == (own, passed_on)
    monkeypatch.setattr("sys.argv", ["program", *given])
    assert own_and_passed_on(None) == (own, passed_on)


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [
        (None, 7, ""),
        (ConfigError("`x` expected [1]"), 2, "error: `x` expected [1]"),
        (KeyboardInterrupt(), 130, "inter"),
    ],
)
def test_every_end_has_a_status(raised, status, said, capsys):
    def work() -> int:
        if raised is not None:
            raise raised
        return 7

    assert exit_status(work, Console(stderr=True)) == status
    assert capsys.readouterr().err.startswith(said)


def test_what_is_no_users_mistake_is_not_hidden():
    with pytest.raises(ZeroDivisionError):
        exit_status(lambda: 1 // 0, Console(stderr=True))
