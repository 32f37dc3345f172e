"""What goes into the stage comes out on the other side, in another process too, and nothing stays behind."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from grpo_lit.errors import EngineError
from grpo_lit.rollouts.staging import Chunk, CudaStage, SharedFileStage, SharedMemoryStage, Stage, read_stage

MATRIX = torch.arange(12.0).view(3, 4) / 3  # thirds: not exact in bfloat16
VECTOR = torch.arange(5.0) / 3
READ = """
import json, sys, torch
from grpo_lit.rollouts.staging import Chunk, read_stage
chunk = Chunk.from_dict(**json.load(sys.stdin))
print(json.dumps({name: tensor.double().sum().item() for name, tensor in read_stage(chunk, torch.device(sys.argv[1]))}))
"""


@pytest.fixture
def stage():
    stage = SharedMemoryStage(torch.float32, stage_bytes=1024)
    yield stage
    stage.close()


def received(stage: Stage, weights: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [
        {name: tensor.clone() for name, tensor in read_stage(Chunk.from_dict(**chunk.to_dict()), torch.device("cpu"))}
        for chunk in stage.chunks(weights.items())
    ]


def test_every_shape_and_dtype_arrives(stage):
    weights = {
        "matrix": MATRIX,
        "transposed": MATRIX.T,  # not contiguous
        "vector": VECTOR,
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "integers": torch.arange(3),
        "flags": torch.tensor([True, False]),
        "half": torch.ones(3, dtype=torch.float16),  # 6 bytes: what follows must be aligned
        "double": torch.tensor([1 / 3], dtype=torch.float64),
    }
    (arrived,) = received(stage, weights)
    assert list(arrived) == list(weights)
    for name, tensor in weights.items():
        assert arrived[name].dtype == tensor.dtype
        assert torch.equal(arrived[name], tensor), name


def test_matrices_are_cast_and_vectors_are_not():
    stage = SharedMemoryStage(torch.bfloat16)
    (arrived,) = received(stage, {"matrix": MATRIX, "vector": VECTOR, "integers": torch.ones(2, 2, dtype=torch.int64)})
    stage.close()
    assert torch.equal(arrived["matrix"], MATRIX.bfloat16())
    assert torch.equal(arrived["vector"], VECTOR)
    assert arrived["integers"].dtype == torch.int64


def test_a_full_stage_is_handed_over_and_filled_again(stage):
    # 1024 bytes hold two tensors of 100 float32 (400 bytes, 448 with alignment), not three.
    weights = {str(i): torch.full((10, 10), float(i)) for i in range(5)}
    arrived = received(stage, weights)
    assert [list(chunk) for chunk in arrived] == [["0", "1"], ["2", "3"], ["4"]]
    for chunk in arrived:
        for name, tensor in chunk.items():
            assert torch.equal(tensor, weights[name])


def test_a_large_tensor_makes_the_stage_grow_once(stage):
    weights = {"small": torch.ones(8, 8), "large": torch.full((40, 40), 2.0), "last": torch.full((8, 8), 3.0)}
    assert [list(chunk) for chunk in received(stage, weights)] == [["small"], ["large"], ["last"]]
    sizes = {chunk.size for chunk in stage.chunks(weights.items())}
    assert sizes == {40 * 40 * 4}


def test_one_segment_serves_every_sync(stage):
    addresses = {chunk.address for _ in range(3) for chunk in stage.chunks({"matrix": MATRIX}.items())}
    assert len(addresses) == 1


def test_tensors_are_taken_lazily(stage):
    taken = []

    def weights():
        for i in range(4):
            taken.append(i)
            yield str(i), torch.ones(16, 16)  # 1024 bytes: a stage full

    chunks = stage.chunks(weights())
    next(chunks)
    # The second is looked at to see that it does not fit; the others are still the learner's.
    assert taken == [0, 1]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_another_process_reads_it(device):
    stage = SharedMemoryStage(torch.float32) if device == "cpu" else CudaStage(torch.float32)
    weights = {"matrix": MATRIX.to(device), "vector": VECTOR.to(device)}
    (chunk,) = stage.chunks(weights.items())
    done = subprocess.run(
        [sys.executable, "-c", READ, device], input=json.dumps(chunk.to_dict()), capture_output=True, text=True
    )
    stage.close()
    # The sums are 0 + 1/3 + ... + 11/3 = 22, and 0 + 1/3 + ... + 4/3 = 10/3
    assert json.loads(done.stdout or "{}") == pytest.approx({"matrix": 22.0, "vector": 10 / 3}, abs=1e-5), done.stderr


def test_memory_is_gone_with_its_last_user():
    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("grpo_lit_weights")

    before = mappings()
    stage = SharedMemoryStage(torch.float32)
    (chunk,) = stage.chunks({"matrix": MATRIX}.items())
    arrived = dict(read_stage(chunk, torch.device("cpu")))
    stage.close()
    stage.close()
    assert not Path(chunk.address).exists()
    assert torch.equal(arrived["matrix"], MATRIX)  # the reader's own mapping
    del arrived
    assert mappings() == before


def test_weights_arrive_through_a_folder_and_only_one_file_lies_there(tmp_path):
    folder = tmp_path / "made" / "on demand"
    stage = SharedFileStage(torch.bfloat16, folder, stage_bytes=40)
    weights = {"matrix": MATRIX, "vector": VECTOR, "transposed": MATRIX.T}
    arrived, files = {}, []
    for chunk in stage.chunks(weights.items()):
        sent = Chunk.from_dict(**json.loads(json.dumps(chunk.to_dict())))
        arrived |= dict(read_stage(sent, torch.device("cpu")))
        files.append(os.listdir(folder))
    assert [len(names) for names in files] == [1] * len(files)
    assert len(files) == 3  # 24, 20 and 24 bytes
    assert all(name.endswith(".safetensors") for names in files for name in names)
    assert torch.equal(arrived["matrix"], MATRIX.to(torch.bfloat16))
    assert torch.equal(arrived["transposed"], MATRIX.T.to(torch.bfloat16))
    assert torch.equal(arrived["vector"], VECTOR)
    stage.close()
    stage.close()
    assert os.listdir(folder) == []


@pytest.mark.parametrize("call", ["fsync", "mkdir"])
def test_a_full_disk_is_named_and_keeps_no_half_file(tmp_path, monkeypatch, call):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*{"fsync": (os, "fsync"), "mkdir": (Path, "mkdir")}[call], full)
    stage = SharedFileStage(torch.float32, tmp_path)
    with pytest.raises(EngineError, match=r"`transport_folder` expected room for .* MiB .*No space left on device"):
        received(stage, {"matrix": MATRIX})
    assert os.listdir(tmp_path) == []
