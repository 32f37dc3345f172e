r"""Where in a row's answer column the ground truth stands.

===========  ==========================================  =======================================
``extract``  ground truth                                bad rows
===========  ==========================================  =======================================
``text``     all of it                                   blank
``number``   all of it                                   not exactly one number
``gsm8k``    what follows the last ``####``              no ``####``, or not exactly one number
``boxed``    the last complete ``\boxed{...}``           no such box, or an empty one
===========  ==========================================  =======================================

GSM8K's form: https://arxiv.org/abs/2110.14168. MATH's: https://arxiv.org/abs/2103.03874.
"""

from typing import Literal

from grpo_lit.data.rows import BadRow
from grpo_lit.rewards.extract import last_boxed
from grpo_lit.rewards.numeric import only_number

Extract = Literal["text", "number", "gsm8k", "boxed"]


def ground_truth(text: str, extract: Extract) -> str:
    r"""Return the ground truth that an answer field holds.

    Args:
        text: The field.
        extract: Where in it the answer stands; see this module's table.

    Raises:
        BadRow: Where the field holds none, or one that a reward could not read.
    """
    if extract == "gsm8k":
        _, mark, text = text.rpartition("####")
        if not mark:
            raise BadRow("no `#### number` in the answer")
    elif extract == "boxed":
        boxed = last_boxed(text)
        if boxed is None:
            raise BadRow(r"no complete \boxed{...} in the answer")
        text = boxed
    text = text.strip()
    if not text:
        raise BadRow("an empty answer")
    if extract in ("number", "gsm8k") and only_number(text) is None:
        raise BadRow("an answer that is not one number")
    return text
