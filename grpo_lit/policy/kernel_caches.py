"""How many kernels of matrix products a CPU process keeps.

oneDNN compiles a bf16 product for the shape it has, and keeps the last 1,024 of them, about half a MiB each; so does
PyTorch's layer above it. Every pack has shapes of its own, some forty: memory would grow by 20 MiB with each of a
process's first micro-batches, whatever their budget is.
"""

import os

import torch

#: Kernels kept: those of some micro-batches. To compile one again takes half a millisecond.
KEPT = 256
#: What both caches ask for their size, at the first product of a process.
_SIZES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")

_bounded = False


def bound_kernel_caches() -> None:
    """Keep :data:`KEPT` kernels, or as many as the environment says; without effect after the first bf16 product.

    The first product is made here, and the environment put back: an engine that this process starts has other shapes.
    """
    global _bounded
    if _bounded:
        return
    _bounded = True
    added = {name: str(KEPT) for name in _SIZES if name not in os.environ}
    os.environ.update(added)
    one = torch.ones(64, 64, dtype=torch.bfloat16)
    torch.mm(one, one)
    for name in added:
        del os.environ[name]
