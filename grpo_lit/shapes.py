"""The one legend of axis letters, and the aliases made of them.

======  ==========================================================================================
letter  axis
======  ==========================================================================================
``T``   completion tokens of a batch, all sequences one after the other (flat, no padding)
``S``   sequences (completions) of a batch
``N``   groups (prompts) of a batch
``G``   completions of one group
``K``   reward components
``M``   shadow objectives
``P``   prompt tokens of a batch, all prompts one after the other
``R L`` rows and columns of a packed micro-batch, as the transformer sees it
``H``   hidden size
``V``   vocabulary
``E``   kept tokens of a batch: what was possible at each completion token, one after the other
======  ==========================================================================================

Shapes are checked by beartype in every test run and cost nothing in production.
"""

from jaxtyping import Bool, Float, Int
from torch import Tensor

TokenFloat = Float[Tensor, "T"]
TokenInt = Int[Tensor, "T"]
TokenBool = Bool[Tensor, "T"]
SequenceFloat = Float[Tensor, "S"]
SequenceInt = Int[Tensor, "S"]
SequenceBool = Bool[Tensor, "S"]
