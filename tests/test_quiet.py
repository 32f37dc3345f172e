"""What nobody can act on is not printed; everything else is."""

import logging

import pytest
from lightning.pytorch.utilities import rank_zero_info
from transformers.utils import logging as transformers_logging

from grpo_lit.quiet import quieten


def test_praise_and_tpus_are_not_mentioned(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    try:
        for _ in range(2):
            quieten()
        assert not transformers_logging.is_progress_bar_enabled()  # the tests' stderr is no terminal
    finally:
        transformers_logging.enable_progress_bar()
    for line in (
        "💡 Tip: try our cloud",
        "TPU available: False, using: 0 TPU cores",
        "GPU available: True, used: False",
    ):
        rank_zero_info(line)
    assert caplog.messages == ["GPU available: True, used: False"]
