"""Kernels of bf16 products are kept for some micro-batches, however many shapes a run has."""

import json
import os
import subprocess
import sys

import pytest
import torch

from grpo_lit.policy.kernel_caches import bound_kernel_caches

#: Prints by how much the memory in use grows from 300 shapes to 600: more than are kept, fewer than oneDNN would keep.
PROGRAM = """
import ctypes, json, os, sys
import torch
from grpo_lit.policy.kernel_caches import bound_kernel_caches

class Heap(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
                "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Heap
torch.set_num_threads(1)
before = dict(os.environ)
if sys.argv[1] == "bounded":
    bound_kernel_caches()
used, weight = [], torch.ones(64, 96, dtype=torch.bfloat16)
for shapes in range(600):
    torch.mm(torch.ones(100 + shapes, 64, dtype=torch.bfloat16), weight)
    if shapes in (299, 599):
        used.append(libc.mallinfo2().uordblks)
print(json.dumps({"grown": used[1] - used[0], "environment": dict(os.environ) == before}))
"""


def run(mode: str) -> dict:
    done = subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="a processor without bf16 kernels")
def test_memory_does_not_grow_with_the_number_of_shapes() -> None:
    bounded, free = run("bounded"), run("free")
    assert bounded["environment"]
    assert free["grown"] > 16 * 2**20
    assert bounded["grown"] < 2 * 2**20


def test_the_environment_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_lit.policy.kernel_caches._bounded", False)
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    before = dict(os.environ)
    bound_kernel_caches()
    assert dict(os.environ) == before
