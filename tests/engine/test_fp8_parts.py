"""vLLM's own FP8 layers of an engine of two workers, from whole tensors and from the parts that a worker is said to need: the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpcrl.engine.pieces.part_tensor import PartTensor, part_tensor
from hpcrl.model_files.safetensors_headers import Entry
from hpcrl.redistribution.layouts import whole
from hpcrl.weights.digest import cut
from hpcrl.weights.pieces.planning import HeldTensor, layouts_of

pytestmark = pytest.mark.vllm
BLOCK = (32, 32)
WIDE = 64


@dataclass(frozen=True)
class Matrix:
    """One of the checkpoint's: its rows, which of the layer's shards it is, and of how many workers each part is."""

    rows: int
    shard: Any
    parts: int = 2


@dataclass(frozen=True)
class Kind:
    """A layer of vLLM's: how it is made, and what the checkpoint has for it."""

    leaf: str
    make: Any
    matrices: dict[str, Matrix]
    columns: int = WIDE


def kinds(linear: Any) -> list[Kind]:
    qkv = {"q_proj": Matrix(128, "q"), "k_proj": Matrix(64, "k"), "v_proj": Matrix(64, "v")}
    repeated = {"q_proj": Matrix(128, "q"), "k_proj": Matrix(32, "k", 1), "v_proj": Matrix(32, "v", 1)}
    return [
        Kind("qkv_proj", lambda **more: linear.QKVParallelLinear(WIDE, 32, 4, 2, bias=False, **more), qkv),
        Kind("qkv_proj", lambda **more: linear.QKVParallelLinear(WIDE, 32, 4, 1, bias=False, **more), repeated),
        Kind(
            "gate_up_proj",
            lambda **more: linear.MergedColumnParallelLinear(WIDE, [128, 128], bias=False, **more),
            {"gate_proj": Matrix(128, 0), "up_proj": Matrix(128, 1)},
        ),
        Kind(
            "gate_up_proj",
            lambda **more: linear.MergedColumnParallelLinear(WIDE, [128, 128], bias=False, **more),
            {"gate_up_proj": Matrix(256, None)},
        ),
        Kind(
            "down_proj",
            lambda **more: linear.RowParallelLinear(128, 48, bias=False, **more),  # the last block of rows is half a one
            {"down_proj": Matrix(48, None)},
            128,
        ),
        Kind("gate", lambda **more: linear.ReplicatedLinear(WIDE, 48, bias=False, **more), {"gate": Matrix(48, None, 1)}),
    ]


PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


@pytest.fixture(params=[0, 1], ids=["first", "second"])
def layers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Kind, Any]]]:
    """The layers as one of two workers makes them."""
    import vllm.distributed
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor import parameter
    from vllm.model_executor.kernels import linear as kernels
    from vllm.model_executor.layers import linear
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config
    from vllm.platforms import PlatformEnum

    from tests.support.breakable.fp8_on_cpu import Widened

    before = kernels._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU]
    monkeypatch.setitem(kernels._POSSIBLE_FP8_BLOCK_KERNELS, PlatformEnum.CPU, [Widened, *before])
    for module in (vllm.distributed, linear, parameter):
        monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: request.param)
        monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: 2)
    config = VllmConfig()
    config.model_config = SimpleNamespace(dtype=torch.bfloat16)
    coded = Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=list(BLOCK))
    with set_current_vllm_config(config):
        yield [(kind, kind.make(quant_config=coded, prefix=f"m.{kind.leaf}")) for kind in kinds(linear)]


def checkpoint(kind: Kind) -> dict[str, tuple[torch.Tensor, str, Any]]:
    """Tensors of the checkpoint with the parameter and the shard that each is for."""
    found = {}
    for number, (leaf, matrix) in enumerate(kind.matrices.items()):
        chance = torch.Generator().manual_seed(number)
        codes = torch.randn(matrix.rows, kind.columns, generator=chance).to(torch.float8_e4m3fn)
        scales = torch.rand(-(-matrix.rows // BLOCK[0]), kind.columns // BLOCK[1], generator=chance)
        found[f"m.{leaf}.weight"] = codes, "weight", matrix.shard
        found[f"m.{leaf}.weight_scale_inv"] = scales, "weight_scale_inv", matrix.shard
    return found


def load(layer: Any, name: str, tensor: torch.Tensor, shard: Any) -> None:
    parameter = getattr(layer, name)
    parameter.weight_loader(parameter, tensor, *(() if shard is None else (shard,)))


def bits(layer: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone().view(torch.uint8) for name, parameter in layer.named_parameters()}


def test_vllms_loaders_ask_for_no_more_than_the_part_and_make_the_same_of_it(layers: list[tuple[Kind, Any]]) -> None:
    from hpcrl.engine.vllm_layers import coded_cuts

    for kind, layer in layers:
        tensors = checkpoint(kind)
        names = {name: entry(tensor) for name, (tensor, *_) in tensors.items()}
        fused = f"m.{kind.leaf}.weight" in names
        cuts = coded_cuts(f"m.{kind.leaf}", layer, {} if fused else PACKED, names)
        assert cuts.keys() == names.keys()
        wanted = None
        for parts in (False, True):
            for parameter in layer.parameters():
                parameter.data.view(torch.uint8).fill_(0xFF if parts else 0)
            for name, (tensor, parameter, shard) in tensors.items():
                if parts:
                    part = cut(tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor, *cuts[name]).contiguous()
                    part = part.view(tensor.dtype)
                    matrix = kind.matrices[name.split(".")[1]]
                    assert part.numel() * matrix.parts == tensor.numel()
                    tensor = part_tensor(tensor.shape, part, *cuts[name])
                    assert isinstance(tensor, PartTensor) == (matrix.parts > 1)
                load(layer, parameter, tensor, shard)
            if wanted is None:
                wanted = bits(layer)
        found = bits(layer)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted), kind


def test_what_blocks_do_not_cut_alike_comes_whole(layers: list[tuple[Kind, Any]]) -> None:
    from hpcrl.engine.vllm_layers import coded_cuts

    kind, layer = layers[2]
    names = {name: entry(tensor) for name, (tensor, *_) in checkpoint(kind).items()}
    other = names | {"m.up_proj.weight_scale_inv": Entry("float32", (8, 2), "")}
    assert coded_cuts("m.gate_up_proj", layer, PACKED, other).keys() == {"m.gate_proj.weight", "m.gate_proj.weight_scale_inv"}
    layer.quant_method.weight_block_size = [128, 32]  # a block over both workers' rows
    tall = {name: Entry(e.dtype, (1, 2) if "scale" in name else e.shape, "") for name, e in names.items()}
    assert coded_cuts("m.gate_up_proj", layer, PACKED, tall) == {}
    layer.quant_method.weight_block_size = None
    assert coded_cuts("m.gate_up_proj", layer, PACKED, names) == {}


def entry(tensor: torch.Tensor) -> Entry:
    return Entry(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), "")


def test_the_plan_brings_a_worker_the_part_that_it_tells_of() -> None:
    held = {"a": HeldTensor((8, 4), (whole((8, 4), (0,)),))}
    unseen = {"a": {"shape": (8, 4), "dtype": "float8_e4m3fn"}}
    workers = [
        {"rank": rank, "where": "e", "tensors": {}, "opaque": ["a"], "unseen": unseen, "cuts": cuts}
        for rank, cuts in enumerate(({"a": {"rows": [[0, 8]], "columns": [0, 2]}}, {}))
    ]
    layouts = layouts_of(held, [workers])
    needed = {part.who: (part.rows, part.columns) for part in layouts.patterns[layouts.needed[0]]}
    assert needed == {(0,): ((0, 8), (0, 2)), (1,): ((0, 8), (0, 4))}
