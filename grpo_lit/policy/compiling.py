"""Norms as one kernel each."""

from torch import nn

from grpo_lit.policy.recompute import keep_norms, rms_norms


def compile_norms(model: nn.Module) -> int:
    """Run the RMS norms of a model through ``torch.compile`` from their next use on, and return how many there are.

    One pass over memory takes the place of half a dozen; results change by rounding alone, and lengths may change
    without a new compilation. Matrix products stay as they are: compiled, they would cast their weights anew for every
    micro-batch; so does ``nn.LayerNorm``, which is one kernel already. Source: J. Ansel et al., "PyTorch 2"
    (https://doi.org/10.1145/3620665.3640366).

    Args:
        model: Changed in place; the names of its weights stay.
    """
    keep_norms(model)  # what is compiled keeps its input alone
    norms = rms_norms(model)
    for norm in norms:
        norm.compile(dynamic=True)
    return len(norms)
