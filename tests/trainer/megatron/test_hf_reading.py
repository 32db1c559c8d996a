"""The files of a model are read once by all ranks together, whatever the layout, and every rank has its own part."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcrl.config.options import Options
from hpcrl.errors import DataError, HpcrlError
from hpcrl.models.files.safetensors_files import SafetensorsDirectory
from hpcrl.trainer.megatron.hf_reading import Parameter, divide, rounds
from tests.support.ranks import run_ranks
from tests.support.tiny import make_family


def parameter(name: str, *copies: tuple[int, ...]) -> Parameter:
    return Parameter((name,), copies, lambda tensors, number: tensors[0], None)


def test_every_tensor_has_one_reader_and_all_read() -> None:
    """Of those that hold a part, the one that has read least; a tied embedding's two parameters are one reading."""
    given = [parameter("embedding", (0, 1)), *(parameter(f"l{i}", (0, 1)) for i in range(3)), parameter("head", (2, 3))]
    given += [parameter("embedding", (2, 3))]
    found = divide(given, {"embedding": 100, "l0": 40, "l1": 40, "l2": 40, "head": 10})
    assert [(reading.names[0], reading.reader) for reading in found] == [
        ("embedding", 0), ("l0", 1), ("l1", 1), ("l2", 1), ("head", 2),
    ]  # fmt: skip
    assert [len(reading.parameters) for reading in found] == [2, 1, 1, 1, 1]
    split = rounds(found, 90)
    assert [[reading.names[0] for reading in some] for some in split] == [["embedding", "l0", "l1"], ["l2", "head"]]
    assert rounds([], 90) == []


def side(options: Options, breaks: int | None, memory: bool = False) -> dict[str, Any]:
    """On a rank: what it has read, by itself and by the kernel's account, and whether it has what a reading of its own
    part alone would have given it.

    Args:
        breaks: the rank that cannot read.
        memory: for want of memory, in the middle of a round.
    """
    from hpcrl.models.files import safetensors_files
    from hpcrl.models.slicing import CUTS
    from hpcrl.trainer.megatron import hf_reading, hf_weights, model, parameter_shards
    from hpcrl.trainer.parallel_state import initialize

    directory = Path(str(options.hf_checkpoint))
    hf_reading.LIMIT = hf_weights.LIMIT = 100_000  # several rounds
    policy = model.build(options, initialize(options))
    for _, parameter in parameter_shards.own_parameters(policy).values():
        parameter.data.fill_(7)
    if policy.ranks.rank == breaks and memory:
        parts = hf_reading._parts

        def short(readings: Any) -> Any:
            yield next(rest := parts(readings))
            raise MemoryError(f"cannot allocate for {next(rest)[0].names}")

        hf_reading._parts = short
    elif policy.ranks.rank == breaks:

        def broken(*_: Any) -> Any:
            raise DataError("model.safetensors cannot be read", "copy it again")

        safetensors_files.SafetensorsDirectory.tensor = broken  # this process is of this test alone
    before = counted()
    try:
        read = hf_weights.load_hf(policy, directory)
    except HpcrlError as error:
        return {"error": str(error)}
    found = {"read": read, "kernel": counted() - before, "different": []}
    with contextlib.ExitStack() as stack:
        files = SafetensorsDirectory(directory, stack)
        for name, (rule, parameter) in parameter_shards.own_parameters(policy).items():
            sources = [files.slice(one) for one in rule.hf]
            rank = policy.ranks.tp_rank if rule.expert is None else policy.ranks.etp_rank
            shapes = parameter_shards.shapes_of(policy, rule)
            mine = CUTS[rule.kind].part(sources, rank, tuple(parameter.shape), shapes).to(parameter.dtype)
            if not torch.equal(mine, parameter):
                found["different"].append(name)
    return found


def counted() -> int:
    """Bytes that this process has read by calls, as the kernel counts them: of files, since sockets are written and read
    otherwise."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("rchar")))


LAYOUTS = {
    "copies": ("qwen3", False, {"tensor_model_parallel_size": 2, "context_parallel_size": 2}, False),
    "stages": ("qwen3", True, {"pipeline_model_parallel_size": 2}, True),
    "experts": (
        "glm4_moe",
        False,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 2},
        False,
    ),
}


def given(tmp_path: Path, layout: str) -> tuple[Options, int]:
    """The options of four ranks, and the bytes of the model's tensors."""
    name, tied, values, bf16 = LAYOUTS[layout]
    directory = make_family(tmp_path / "model", name, tied)
    options = Options(hf_checkpoint=str(directory), bf16=bf16, actor_num_gpus_per_node=4, **values)
    sizes = 0
    for file in directory.glob("*.safetensors"):
        sizes += file.stat().st_size - 8 - int.from_bytes(file.read_bytes()[:8], "little")
    return options, sizes


@pytest.mark.process
@pytest.mark.parametrize("layout", LAYOUTS)
def test_four_ranks_read_a_model_once(layout: str, tmp_path: Path) -> None:
    """By their own count all ranks together read each byte of the model's tensors once, no rank much more than its
    share; by the kernel's no more than 5 % beyond, headers included; and each rank has bit for bit its own part."""
    options, sizes = given(tmp_path, layout)
    found = run_ranks(4, side, options, None, timeout=120)
    assert all(not one["different"] for one in found), found
    assert sum(one["read"] for one in found) == sizes
    assert max(one["read"] for one in found) <= 0.45 * sizes, found
    kernel = sum(one["kernel"] for one in found)
    assert sizes <= kernel <= 1.05 * sizes, (kernel, sizes)


@pytest.mark.process
@pytest.mark.parametrize("memory", [False, True], ids=["files", "memory"])
def test_one_rank_that_cannot_read_ends_all(memory: bool, tmp_path: Path) -> None:
    """With its own error, at once: no other rank is left waiting for what it would have sent."""
    options, _ = given(tmp_path, "copies")
    found = run_ranks(4, side, options, 2, memory, timeout=120)
    said = "cannot allocate" if memory else "model.safetensors"
    assert {one.get("error") for one in found} == {found[2]["error"]} and said in found[2]["error"]
