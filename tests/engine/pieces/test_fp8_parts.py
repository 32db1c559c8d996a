"""vLLM's own FP8 layers of an engine of two workers, from whole tensors and from the parts that a worker is said to
need: the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpcrl.engine.pieces.part_tensor import PartTensor, part_tensor
from hpcrl.models.files.safetensors_files import Entry
from hpcrl.weights.comparison import cut
from hpcrl.weights.pieces.planning import HeldTensor, layouts_of, sent_whole
from hpcrl.weights.redistribution.layouts import whole

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
            lambda **more: linear.RowParallelLinear(
                128, 48, bias=False, **more
            ),  # the last block of rows is half a one
            {"down_proj": Matrix(48, None)},
            128,
        ),
        Kind(
            "gate", lambda **more: linear.ReplicatedLinear(WIDE, 48, bias=False, **more), {"gate": Matrix(48, None, 1)}
        ),
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


def test_loaders_read_only_the_part(layers: list[tuple[Kind, Any]]) -> None:
    """vLLM's loaders read no more than the part, and the result is the same."""
    from hpcrl.engine.params.layers import coded_cuts

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
                    part = cut(
                        tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor, *cuts[name]
                    ).contiguous()
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
    from hpcrl.engine.params.layers import coded_cuts

    kind, layer = layers[2]
    names = {name: entry(tensor) for name, (tensor, *_) in checkpoint(kind).items()}
    other = names | {"m.up_proj.weight_scale_inv": Entry("float32", (8, 2), "")}
    assert coded_cuts("m.gate_up_proj", layer, PACKED, other).keys() == {
        "m.gate_proj.weight",
        "m.gate_proj.weight_scale_inv",
    }
    layer.quant_method.weight_block_size = [128, 32]  # a block over both workers' rows
    tall = {name: Entry(e.dtype, (1, 2) if "scale" in name else e.shape, "") for name, e in names.items()}
    assert coded_cuts("m.gate_up_proj", layer, PACKED, tall) == {}
    layer.quant_method.weight_block_size = None
    assert coded_cuts("m.gate_up_proj", layer, PACKED, names) == {}


EXPERTS = 4
HIDDEN = 64
INNER = 128


def stacked(rank: int, spread: bool) -> Any:
    """vLLM's own holder of experts, without its kernels, as one of two workers has it: half of each, or each second
    one."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod

    layer = object.__new__(RoutedExperts)
    method = object.__new__(Fp8MoEMethod)
    torch.nn.Module.__init__(layer)
    method.weight_block_size = list(BLOCK)
    method.weight_scale_refine = None
    parts, place = (1, 0) if spread else (2, rank)
    places = (
        [number // 2 if number % 2 == rank else -1 for number in range(EXPERTS)] if spread else list(range(EXPERTS))
    )
    width, count = INNER // parts, max(places) + 1
    parallel = SimpleNamespace(tp_size=parts, tp_rank=place, enable_eplb=False)
    values: dict[str, Any] = {
        "quant_method": method,
        "quant_config": None,
        "_fused_shared_expert_quantizer": None,
        "global_num_experts": EXPERTS,
        "expert_map_manager": SimpleNamespace(
            map_global_to_local=places.__getitem__,
            num_fused_shared_experts=0,
            expert_map=torch.tensor(places) if spread else None,
        ),
        "moe_config": SimpleNamespace(
            moe_parallel_config=parallel, tp_rank=place, tp_shard_with_padding=False, is_act_and_mul=True
        ),
    }
    for name, value in values.items():
        object.__setattr__(layer, name, value)
    shapes = {"w13_weight": (2 * width, HIDDEN), "w2_weight": (HIDDEN, width)}
    for name, (rows, columns) in shapes.items():
        codes = torch.empty(count, rows, columns, dtype=torch.float8_e4m3fn)
        scales = torch.empty(count, rows // BLOCK[0], columns // BLOCK[1])
        scales.quant_method = "block"
        layer.register_parameter(name, torch.nn.Parameter(codes, requires_grad=False))
        layer.register_parameter(f"{name}_scale_inv", torch.nn.Parameter(scales, requires_grad=False))
        getattr(layer, f"{name}_scale_inv").quant_method = "block"
    return layer


def of_experts() -> Iterator[tuple[str, torch.Tensor, str, str, int]]:
    """(name, tensor, parameter, shard, expert) of the checkpoint."""
    for number in range(EXPERTS):
        for at, (leaf, shard) in enumerate((("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))):
            chance = torch.Generator().manual_seed(10 * number + at)
            rows, columns = (HIDDEN, INNER) if shard == "w2" else (INNER, HIDDEN)
            parameter = "w2_weight" if shard == "w2" else "w13_weight"
            codes = torch.randn(rows, columns, generator=chance).to(torch.float8_e4m3fn)
            scales = torch.rand(rows // BLOCK[0], columns // BLOCK[1], generator=chance)
            yield f"m.experts.{number}.{leaf}.weight", codes, parameter, shard, number
            yield f"m.experts.{number}.{leaf}.weight_scale_inv", scales, f"{parameter}_scale_inv", shard, number


@pytest.mark.parametrize("spread", [False, True], ids=["halves", "experts apart"])
@pytest.mark.parametrize("rank", [0, 1])
def test_expert_loader_reads_only_the_part(rank: int, spread: bool) -> None:
    """vLLM's loader of experts reads no more than the part."""
    from hpcrl.engine.params.experts import coded_expert_cuts

    layer = stacked(rank, spread)
    cuts = coded_expert_cuts(
        "m.experts.routed_experts", layer, {name: entry(tensor) for name, tensor, *_ in of_experts()}
    )
    made = []
    for parts in (False, True):
        taken = 0
        for parameter in layer.parameters():
            parameter.data.view(torch.uint8).fill_(0x7F if parts else 0)
        for name, tensor, parameter, shard, number in of_experts():
            if parts and name in cuts:
                part = cut(tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor, *cuts[name]).contiguous()
                taken += part.numel() * (2 if not spread else 1)
                if not part.numel():
                    continue  # as of an update, which never brings it
                tensor = part_tensor(tensor.shape, part.view(tensor.dtype), *cuts[name])
                assert isinstance(tensor, PartTensor)
            elif parts:
                assert spread and number % 2 == rank
            layer.weight_loader(getattr(layer, parameter), tensor, name, shard, number, return_success=True)
        made.append(bits(layer))
    assert taken == (0 if spread else sum(tensor.numel() for _, tensor, *_ in of_experts()))
    assert len(cuts) == (12 if spread else 24)
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])


def test_unevenly_cut_experts_come_whole() -> None:
    """Experts whose blocks are not cut alike come whole."""
    from hpcrl.engine.params.experts import coded_expert_cuts

    names = {name: entry(tensor) for name, tensor, *_ in of_experts()}
    for change in (
        lambda layer: setattr(layer.quant_method, "weight_block_size", [128, 128]),
        lambda layer: setattr(layer.quant_method, "weight_scale_refine", (2, 1)),
        lambda layer: setattr(layer.moe_config, "tp_shard_with_padding", True),
        lambda layer: setattr(layer.moe_config.moe_parallel_config, "enable_eplb", True),
    ):
        layer = stacked(1, spread=False)
        change(layer)
        assert coded_expert_cuts("m.experts.routed_experts", layer, names) == {}


def entry(tensor: torch.Tensor) -> Entry:
    return Entry(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), "")


def test_plan_brings_the_announced_part() -> None:
    """The plan brings a worker the part that it announced."""
    held = {"a": HeldTensor((8, 4), (whole((8, 4), (0,)),))}
    unseen = {"a": {"shape": (8, 4), "dtype": "float8_e4m3fn"}}
    workers = [
        {"worker": f"0.{rank}", "where": "e", "tensors": {}, "opaque": ["a"], "unseen": unseen, "cuts": cuts}
        for rank, cuts in enumerate(({"a": {"rows": [[0, 8]], "columns": [0, 2]}}, {}))
    ]
    layouts = layouts_of(held, [workers])
    needed = {part.who: (part.rows, part.columns) for part in layouts.patterns[layouts.needed[0]]}
    assert needed == {(0,): ((0, 8), (0, 2)), (1,): ((0, 8), (0, 4))}
    assert sent_whole([workers]) == [] and sent_whole([workers[1:]]) == ["a"]


def test_queries_keys_and_values_are_one_matrix() -> None:
    """Qwen3.5's delta nets: two matrices of the checkpoint in four that vLLM fuses, as the second of two workers has
    them."""
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear

    from hpcrl.engine.params.layers import matrices_of

    layer = object.__new__(MergedColumnParallelLinear)
    torch.nn.Module.__init__(layer)
    layer.tp_size, layer.tp_rank, layer.input_size, layer.output_partition_sizes = 2, 1, 8, [4, 4, 6, 6]
    packed = {"in_proj_qkvz": ["in_proj_qkv", "in_proj_z"]}
    mixed, gate = matrices_of("m.in_proj_qkvz", layer, packed)
    assert (mixed.name, mixed.shape, mixed.begin, mixed.end) == ("m.in_proj_qkv", (28, 8), 0, 14)
    assert mixed.cut == (((4, 4), (12, 4), (22, 6)), None)
    assert (gate.name, gate.shape, gate.begin, gate.end) == ("m.in_proj_z", (12, 8), 14, 20)
    assert gate.cut == (((6, 6),), None)
    (fused,) = matrices_of("m.in_proj_qkvz", layer, {})
    assert fused.name == "m.in_proj_qkvz" and fused.end == 20
