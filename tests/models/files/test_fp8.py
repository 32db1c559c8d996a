"""FP8 weights: the error of the numbers, the checkpoint that is made of them, and the same on the fly."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from hpcrl.cli.main import main
from hpcrl.errors import DataError, UsageError
from hpcrl.models.convert.to_fp8 import convert
from hpcrl.models.files import fp8
from hpcrl.models.files.fp8 import (
    FP8,
    Scheme,
    quantize_block,
    quantize_channel,
    quantize_tensor,
    quantized,
    scheme_of,
)
from hpcrl.models.files.safetensors_files import listing
from tests.support.fp8 import dequantize
from tests.support.published_models import MODELS
from tests.support.tiny import make_family

BLOCK = (32, 48)  # divides none of the sizes of the tiny models in both directions


# ---- numbers


def pairs(
    weight: torch.Tensor, block: tuple[int, int], power: bool
) -> dict[str, tuple[torch.Tensor, torch.Tensor, Any]]:
    return {
        "block": (*quantize_block(weight, block, power), block),
        "channel": (*quantize_channel(weight, power), None),
        "tensor": (*quantize_tensor(weight, power), None),
    }


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 24), st.integers(1, 24)),
    block=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    low=st.integers(-44, 30),
    spread=st.integers(0, 30),
    power=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 99),
)
def test_the_error_is_that_of_the_format(
    shape: tuple[int, int], block: tuple[int, int], low: int, spread: int, power: bool, dtype: torch.dtype, seed: int
) -> None:
    """Three bits of mantissa: at most 1/16 of the value; below 2^-6 of a scale: at most half a step, 2^-10 of it."""
    chance = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** (low + spread * torch.rand(shape, generator=chance).double())
    weight = (torch.randn(shape, generator=chance).double() * sizes).clamp(-3e38, 3e38).float()
    weight = weight.clamp(-60000, 60000).half() if dtype == torch.float16 else weight.to(dtype)
    weight[torch.rand(shape, generator=chance) < 0.2] = 0
    for strategy, (codes, scale, of) in pairs(weight, block, power).items():
        assert codes.dtype == FP8 and scale.dtype == torch.float32
        assert codes.shape == weight.shape
        assert tuple(scale.shape) == Scheme(strategy, block).scale_shape(shape)  # type: ignore[arg-type]
        exact = weight.double()
        found = dequantize(codes, scale, of).double()
        each = dequantize(torch.ones(shape).to(FP8), scale, of).double()
        assert found.isfinite().all()
        assert (found[exact == 0] == 0).all()
        bound = torch.maximum(exact.abs() / 16, each * 2.0**-10) * (1 + 1e-6)
        assert ((found - exact).abs() <= bound).all(), strategy
        assert (codes.float().abs() <= 448).all()


def test_values_near_the_ends_of_fp32() -> None:
    """The smallest would have a scale of zero, the largest must not become infinite."""
    weight = torch.tensor([[1e-45, -1e-44, 0.0], [3.4e38, -3.4e38, 1e38], [1e-37, 1e-38, 1e-30]])
    for strategy, (codes, scale, block) in pairs(weight, (1, 3), False).items():
        found = dequantize(codes, scale, block)
        assert found.isfinite().all(), strategy
        assert (scale > 0).all()
        assert (found - weight).abs().max() <= 3.4e38 / 16
    assert dequantize(*quantize_channel(weight))[2, 2] == pytest.approx(1e-30, rel=1e-6)


def test_largest_value_keeps_its_range() -> None:
    """The largest value of each block uses the whole range."""
    weight = torch.randn(70, 130)
    codes, scale = quantize_block(weight, (64, 64))
    assert scale.shape == (2, 3)
    assert codes[:64, :64].float().abs().max() == codes[64:, 128:].float().abs().max() == 448
    assert torch.equal(scale[1, 2], weight[64:, 128:].abs().max() / 448)


def test_scales_of_ue8m0_are_the_next_powers_of_two() -> None:
    weight = torch.randn(64, 64) * torch.logspace(-20, 20, 64)[:, None]
    weight[5, :8] = 448.0 * 2**7  # a scale that is a power of two already
    plain = quantize_block(weight, (1, 8))[1]
    power = quantize_block(weight, (1, 8), power_of_two=True)[1]
    assert (torch.frexp(power).mantissa == 0.5).all()
    assert ((power >= plain) & (power < 2 * plain)).all()
    assert power[5, 0] == plain[5, 0] == 2**7


def test_blocks_are_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks do not affect each other, and bands leave no trace."""
    weight = torch.randn(200, 90)
    codes, scale = quantize_block(weight, (16, 16))
    other = weight.clone()
    other[20, 20] = 1e6
    changed = quantize_block(other, (16, 16))[0].float() != codes.float()
    changed[16:32, 16:32] = False
    assert not changed.any()
    everything = pairs(weight, (16, 16), True)
    monkeypatch.setattr(fp8, "BAND", 1)
    for strategy, (a, b, _) in pairs(weight, (16, 16), True).items():
        assert torch.equal(a.view(torch.uint8), everything[strategy][0].view(torch.uint8))
        assert torch.equal(b, everything[strategy][1])
    assert torch.equal(quantize_block(weight, (16, 16))[1], scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_bits_are_those_of_compressed_tensors(dtype: torch.dtype) -> None:
    """The package of that format, where it has fp32 to work on (in bf16 its scales would be bf16 too) and no -0.0 (it
    adds 0)."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    weight = (torch.randn(96, 128) * torch.logspace(-5, 1, 96)[:, None]).to(dtype) + 0.0
    wide = weight.float()
    ranges = {
        "tensor": wide.view(1, -1),
        "channel": wide,
        "block": wide.view(3, 32, 2, 64).transpose(1, 2).reshape(3, 2, -1),
    }
    for strategy, (codes, scale, _) in pairs(weight, (32, 64), False).items():
        block = {"block_structure": [32, 64]} if strategy == "block" else {}
        args = QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy=strategy, **block)
        values = ranges[strategy]
        shape = {"tensor": (1,), "channel": (96, 1), "block": (3, 2)}[strategy]
        its, zero = calculate_qparams(values.amin(-1).view(shape), values.amax(-1).view(shape), args)
        assert torch.equal(its, scale), strategy
        assert torch.equal(quantize(wide, its, zero, args, dtype=FP8).view(torch.uint8), codes.view(torch.uint8)), (
            strategy
        )


@pytest.mark.parametrize(
    ("weight", "text"),
    [
        (torch.tensor([[1.0, float("nan")]]), "infinite or undefined"),
        (torch.tensor([[1.0, -float("inf")]]), "infinite or undefined"),
        (torch.ones(3), r"float32\[3\] is not a matrix"),
        (torch.ones(2, 2, 2), r"float32\[2, 2, 2\] is not a matrix"),
        (torch.ones(2, 2, dtype=torch.int32), r"int32\[2, 2\] is not a matrix"),
        (torch.ones(2, 2).to(FP8), r"float8_e4m3fn\[2, 2\] is not a matrix"),
        (torch.ones(0, 4), "empty"),
    ],
)
def test_what_is_no_matrix_of_numbers_is_refused(weight: torch.Tensor, text: str) -> None:
    for quantize in (quantize_block, quantize_channel, quantize_tensor):
        with pytest.raises(ValueError, match=text):
            quantize(weight)


# ---- checkpoints


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A sparse model in one file, a dense one in several; latent attention, and experts of Mixtral's names."""
    root = tmp_path_factory.mktemp("fp8")
    found = {
        "glm4_moe": make_family(root / "glm4_moe", "glm4_moe", intermediate_size=72),
        "qwen3": make_family(root / "qwen3", "qwen3", tied=True, num_hidden_layers=3),
        **{name: make_family(root / name, name) for name in ("deepseek_v3", "minimax_m2")},
    }
    shard(found["qwen3"], 3)
    return found


def shard(directory: Path, count: int) -> None:
    """Spread the one file of a model over several."""
    tensors = load_file(directory / "model.safetensors")
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    where = {name: names[i % count] for i, name in enumerate(tensors)}
    for file in names:
        save_file({n: t for n, t in tensors.items() if where[n] == file}, directory / file, metadata={"format": "pt"})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (directory / "model.safetensors").unlink()


def load(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }


SCHEMES = {
    "block": Scheme("block", BLOCK),
    "ue8m0": Scheme("block", BLOCK, power_of_two=True),
    "channel": Scheme("channel"),
    "tensor": Scheme("tensor"),
}
CASES = [(model, scheme) for model in ("glm4_moe", "qwen3") for scheme in SCHEMES]
CASES += [("deepseek_v3", "block"), ("minimax_m2", "block")]
#: matrices of linear layers
TAKEN = r"\.((q|k|v|o|gate|up|down|q_a|q_b|kv_b)_proj|kv_a_proj_with_mqa|experts\.\d+\.w[123])\.weight$"


@pytest.fixture(scope="module")
def converted(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    root = tmp_path_factory.mktemp("converted")
    found = {}
    for model, source in models.items():
        for name, scheme in SCHEMES.items():
            if (model, name) not in CASES:
                continue
            convert(source, root / f"{model}-{name}", scheme)
            found[model, name] = root / f"{model}-{name}"
    return found


@pytest.mark.parametrize(("model", "name"), CASES)
def test_only_linear_layers_are_quantised(
    models: dict[str, Path], converted: dict[tuple[str, str], Path], model: str, name: str
) -> None:
    """The matrices of linear layers, and no others, are quantised."""
    before = load(models[model])
    after = load(converted[model, name])
    scheme = SCHEMES[name]
    taken = {n for n in before if re.search(TAKEN, n)}
    assert after.keys() == before.keys() | {scheme.scale_name(n) for n in taken}
    for n, tensor in before.items():
        if n not in taken:
            assert torch.equal(after[n], tensor), n
            continue
        codes, scale = after[n], after[scheme.scale_name(n)]
        assert (codes.dtype, codes.shape) == (FP8, tensor.shape)
        assert (scale.dtype, tuple(scale.shape)) == (torch.float32, scheme.scale_shape(tuple(tensor.shape)))
        found = dequantize(codes, scale, scheme.block if scheme.strategy == "block" else None)
        assert (found - tensor).norm() < 0.04 * tensor.norm(), n
    stayed = {n.removesuffix(".weight") for n in before if n not in taken and before[n].dim() == 2}
    config = json.loads((converted[model, name] / "config.json").read_text())["quantization_config"]
    assert set(config.get("modules_to_not_convert", config.get("ignore"))) == stayed | {"lm_head"}
    listed = listing(converted[model, name])
    assert {n: (e.dtype, e.shape) for n, e in listed.items()} == {
        n: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in after.items()
    }
    assert (converted[model, name] / "tokenizer.json").read_bytes() == (models[model] / "tokenizer.json").read_bytes()


def test_the_config_is_that_of_published_checkpoints(converted: dict[tuple[str, str], Path]) -> None:
    def config(name: str) -> dict[str, Any]:
        return json.loads((converted["qwen3", name] / "config.json").read_text())["quantization_config"]

    plain = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": list(BLOCK)}
    plain["modules_to_not_convert"] = ["lm_head", "model.embed_tokens"]
    assert config("block") == plain
    assert config("ue8m0") == plain | {"scale_fmt": "ue8m0"}
    for name, activations in (("channel", "token"), ("tensor", "tensor")):
        found = config(name)
        group = found["config_groups"]["group_0"]
        assert (found["quant_method"], found["format"]) == ("compressed-tensors", "float-quantized")
        assert (group["weights"]["strategy"], group["input_activations"]["strategy"]) == (name, activations)
        assert group["targets"] == ["Linear"]


@pytest.mark.parametrize(("model", "name"), CASES)
def test_on_the_fly_the_same_bits_come_out(
    models: dict[str, Path], converted: dict[tuple[str, str], Path], model: str, name: str
) -> None:
    """A model that is not quantised passes as it is."""
    made = load(converted[model, name])
    scheme = scheme_of(converted[model, name])
    assert scheme is not None
    assert replace(scheme, chosen=None) == replace(SCHEMES[name], block=scheme.block)
    found = dict(quantized(iter(load(models[model]).items()), scheme))
    assert {tensor.dtype for tensor in found.values()} <= {torch.float8_e4m3fn, torch.float32}
    assert found.keys() == made.keys()
    for n, tensor in made.items():
        assert (found[n].dtype, found[n].shape) == (tensor.dtype, tensor.shape), n
        assert torch.equal(found[n].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), n
    assert scheme_of(models[model]) is None
    assert dict(quantized(iter(found.items()), None)) is not None


def test_checkpoint_decides_what_is_quantised() -> None:
    """What a checkpoint has quantised counts, not the names."""
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [4, 4]}
    scheme = fp8.read_scheme(config, "here", frozenset({"a.weight"}))
    pairs = [("a.weight", torch.ones(4, 8)), ("b.up_proj.weight", torch.ones(4, 4))]
    assert [(n, tuple(t.shape), t.dtype) for n, t in quantized(iter(pairs), scheme)] == [
        ("a.weight", (4, 8), FP8),
        ("a.weight_scale_inv", (1, 2), torch.float32),
        ("b.up_proj.weight", (4, 4), torch.float32),
    ]


def test_published_minimax(tmp_path: Path) -> None:
    """Its name of the format is taken; modules_to_not_convert has bare names there: a gate, e_score_correction_bias and
    lm_head, which have no scales."""
    config = MODELS["MiniMax-M2"][1]
    (tmp_path / "config.json").write_text(json.dumps(config))
    left = ["lm_head.weight", "model.layers.0.block_sparse_moe.gate.weight"]
    left.append("model.layers.0.block_sparse_moe.e_score_correction_bias")
    taken = ["model.layers.0.block_sparse_moe.experts.0.w1.weight", "model.layers.0.self_attn.q_proj.weight"]
    tensors = {name: torch.ones(4, 4) for name in left} | {name: torch.ones(4, 4).to(FP8) for name in taken}
    save_file(tensors | {f"{name}_scale_inv": torch.ones(1, 1) for name in taken}, tmp_path / "model.safetensors")
    scheme = scheme_of(tmp_path)
    assert scheme == Scheme("block", (128, 128), chosen=frozenset(taken))
    by_name = replace(scheme, chosen=None)
    assert [name for name in tensors if by_name.takes(name, (4, 4))] == taken


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "fp8", "activation_scheme": "static"},
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e5m2"},
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}},
    ],
)
def test_other_ways_of_quantising_are_refused_by_name(config: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=f"here has a quantization_config .{config['quant_method']}. that hpcrl cannot"):
        fp8.read_scheme(config, "here")


def test_workers_make_no_difference(
    models: dict[str, Path], converted: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command = ["convert", "to-fp8", "--model-dir", str(models["qwen3"]), "--save-dir", str(out), "--strategy", "block"]
    assert main([*command, "--block-size", *map(str, BLOCK), "--max-workers", "3"]) == 0
    other = converted["qwen3", "ue8m0"]
    assert sorted(p.name for p in out.iterdir()) == sorted(p.name for p in other.iterdir())
    for path in out.iterdir():
        assert path.read_bytes() == (other / path.name).read_bytes(), path.name
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in load(out).values())
    with pytest.raises(UsageError, match="exists already"):
        convert(models["qwen3"], out, SCHEMES["block"])
    convert(models["qwen3"], out, SCHEMES["block"], force=True)
    assert load(out).keys() == load(converted["qwen3", "block"]).keys()


def test_tensors_lie_where_readers_can_map_them(tmp_path: Path) -> None:
    """Sizes that are odd in every way, and dtypes of three widths."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "x"}')
    names = ["a.up_proj.weight", "b.down_proj.weight", "c.norm.weight", "d.gate.bias", "e.up_proj.weight"]
    tensors = {n: torch.randn(3, 5 + i, dtype=torch.bfloat16) for i, n in enumerate(names) if "proj" in n}
    tensors |= {"c.norm.weight": torch.ones(3).bfloat16(), "d.gate.bias": torch.ones(7), "f.empty": torch.zeros(0, 4)}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    convert(source, tmp_path / "out", Scheme("block", (2, 2)))
    made = load(tmp_path / "out")
    data = (tmp_path / "out" / "model.safetensors").read_bytes()
    head = 8 + int.from_bytes(data[:8], "little")
    places = {n: head + held["data_offsets"][0] for n, held in json.loads(data[8:head]).items() if n != "__metadata__"}
    assert places.keys() == made.keys() and not [n for n, at in places.items() if at % made[n].element_size()]
    assert {n for n in made if made[n].dtype == FP8} == {n for n in names if "proj" in n}
    assert all(torch.equal(made[n], t) for n, t in tensors.items() if "proj" not in n)
    for n in (n for n in names if "proj" in n):
        codes, scale = quantize_block(tensors[n], (2, 2))
        assert torch.equal(made[n].view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(made[f"{n}_scale_inv"], scale)


def spoiled(source: Path, target: Path, change: Any) -> Path:
    shutil.copytree(source, target)
    file = sorted(target.glob("*.safetensors"))[0]
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return target


def undefined(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.mlp.experts.3.up_proj.weight"][2, 5] = float("nan")


def stacked(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.mlp.experts.gate_up_proj"] = torch.ones(8, 4, 4)


def already(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.ones(4, 4).to(FP8)


def only_norms(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if "norm" not in name]:
        del tensors[name]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (undefined, "model.layers.1.mlp.experts.3.up_proj.weight cannot be quantised:"),
        (stacked, "model.layers.1.mlp.experts.gate_up_proj holds all experts"),
        (already, "model.layers.0.mlp.up_proj.weight is float8_e4m3fn already"),
        (only_norms, "matrix of a linear"),
    ],
)
def test_tensors_that_cannot_be_quantised_are_named(
    models: dict[str, Path], tmp_path: Path, change: Any, text: str
) -> None:
    source = spoiled(models["glm4_moe"], tmp_path / "source", change)
    with pytest.raises(DataError, match=text):
        convert(source, tmp_path / "out", SCHEMES["block"])
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_damaged_directories_are_refused(
    models: dict[str, Path], converted: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    """Damaged directories are refused before any work."""

    def refused(source: Path, text: str) -> None:
        with pytest.raises(DataError, match=text):
            convert(source, tmp_path / "out", SCHEMES["block"])
        assert not list(tmp_path.glob("*out*"))

    refused(converted["qwen3", "channel"], "is quantised already .compressed-tensors.")
    refused(tmp_path / "nowhere", "no config.json there")
    for number, spoil in enumerate((truncate, drop_file, lie_in_index, no_header)):
        source = shutil.copytree(models["qwen3"], tmp_path / f"source{number}")
        refused(source, spoil(source))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    refused(tmp_path / "empty", "has no model.safetensors")


def truncate(source: Path) -> str:
    file = sorted(source.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-10])
    return f"{file.name} cannot be read: incomplete metadata, file not fully covered; it is damaged or not complete"


def drop_file(source: Path) -> str:
    file = sorted(source.glob("*.safetensors"))[1]
    file.unlink()
    return f"{file.name} does not exist"


def lie_in_index(source: Path) -> str:
    path = source / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.extra.weight"] = index["weight_map"]["model.norm.weight"]
    path.write_text(json.dumps(index))
    return "names model.extra.weight, which .* does not hold"


def no_header(source: Path) -> str:
    file = sorted(source.glob("*.safetensors"))[0]
    file.write_bytes(b"\x05\0\0\0\0\0\0\0hello" + b"\0" * 50)
    return f"{file.name} cannot be read: invalid JSON in header"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--block-size", "0", "128"], "--block-size 0 128"),
        (["--max-workers", "0"], "--max-workers 0"),
        (["--strategy", "channel", "--scale-fmt", "ue8m0"], "--scale-fmt ue8m0 with --strategy channel"),
    ],
)
def test_flags_that_make_no_sense(
    models: dict[str, Path], tmp_path: Path, flags: list[str], text: str, capsys: Any
) -> None:
    base = ["convert", "to-fp8", "--model-dir", str(models["qwen3"]), "--save-dir"]
    assert main([*base, str(tmp_path / "out"), *flags]) == 2
    assert text in capsys.readouterr().err
    assert main([*base, str(models["qwen3"])]) == 2


# ---- other readers


@pytest.mark.parametrize(
    ("model", "scheme"),
    [
        ("glm4_moe", Scheme("block", (8, 4))),  # transformers wants whole blocks
        ("qwen3", Scheme("block", (8, 8), power_of_two=True)),
        ("qwen3", Scheme("channel")),
        ("qwen3", Scheme("tensor")),
    ],
    ids=["block", "ue8m0", "channel", "tensor"],
)
def test_transformers_reads_what_we_wrote(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, scheme: Scheme
) -> None:
    """Without a GPU transformers widens the weights: they must be what we hold our codes and scales to mean."""
    from transformers import AutoModelForCausalLM
    from transformers.quantizers import quantizer_finegrained_fp8

    monkeypatch.setattr(
        quantizer_finegrained_fp8, "is_accelerate_available", lambda: True
    )  # asked for, and not used here
    convert(models[model], tmp_path / "fp8", scheme)
    tensors = load(tmp_path / "fp8")
    chosen = (scheme_of(tmp_path / "fp8") or scheme).chosen
    block = scheme.block if scheme.strategy == "block" else None
    wide = {n: t for n, t in tensors.items() if not n.endswith(scheme.suffix)}
    wide |= {n: dequantize(tensors[n], tensors[scheme.scale_name(n)], block) for n in chosen or ()}
    (tmp_path / "wide").mkdir()
    save_file(wide, tmp_path / "wide" / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(models[model] / "config.json", tmp_path / "wide")
    ids = torch.arange(20, 40)[None]
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "fp8", dtype=torch.float32)
        ours = AutoModelForCausalLM.from_pretrained(tmp_path / "wide", dtype=torch.float32)
        difference = (theirs(ids).logits - ours(ids).logits).abs().max()
    if scheme.strategy == "block":
        assert difference <= 1e-5
    else:  # this reader rounds activations to FP8 as well, as an engine does
        assert difference <= 0.15 * ours(ids).logits.abs().max()
    held = theirs.state_dict()
    for n, tensor in ours.state_dict().items():
        assert (held[n].float() - tensor).abs().max() <= 1e-6 * tensor.abs().max(), n
