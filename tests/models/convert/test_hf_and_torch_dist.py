"""Hugging Face -> torch_dist -> Hugging Face gives back every bit, from any layout; what does not fit is named."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hpcrl.errors import DataError, HpcrlError, UsageError
from hpcrl.models.files.fp8 import Scheme
from hpcrl.models.files.hf_writer import TensorHeader, directory, save_shards, split
from tests.support.fp8 import dequantize
from tests.support.mtp_models import MAKERS
from tests.support.ranks import run_ranks
from tests.support.tiny import FAMILIES, make_family, make_model, with_images

ROOT = Path(__file__).parents[3]
#: ranks, flags, and which models
LAYOUTS: dict[str, tuple[int, list[str], list[str]]] = {
    "one rank": (1, [], [*FAMILIES, "odd"]),
    "tp2": (2, ["--tensor-model-parallel-size", "2"], ["odd", "glm4", "glm4_moe"]),
    "pp2": (2, [], ["odd", "qwen2", "qwen3_moe"]),  # slime's rule: without a layout each rank is a pipeline stage
    "ep2": (2, ["--expert-model-parallel-size", "2"], ["qwen3_moe", "glm4_moe"]),
}


def read(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a directory's safetensors."""
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def same(one: Path, other: Path) -> bool:
    """Whether two directories hold the same tensors, bit for bit (also where they are not numbers)."""
    a, b = read(one), read(other)
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and torch.equal(a[n].view(torch.uint8), b[n].view(torch.uint8)) for n in a
    )


def recast(path: Path, dtype: torch.dtype) -> Path:
    """Store the matrices of a model as `dtype`; what is fp32 for a reason, such as a router's bias, stays."""
    tensors = {n: t.to(dtype) if "bias" not in n else t for n, t in load_file(path / "model.safetensors").items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


# ---- on the ranks


def common_on_rank(path: str) -> dict[str, Any]:
    """What Megatron-core, of whatever release, finds in a checkpoint beside the tensors."""
    from megatron.core.dist_checkpointing import load_common_state_dict

    return {
        name: value
        for name, value in load_common_state_dict(path).items()
        if name in ("args", "checkpoint_version", "iteration")
    }


def convert_on_rank(every: list[list[str]]) -> list[str]:
    """Run several conversions in the groups of one layout; the paths, or errors, on this rank."""
    from hpcrl.trainer import parallel_state
    from hpcrl.trainer.checkpoint.to_torch_dist import convert, read_options

    world = int(os.environ["WORLD_SIZE"])
    ranks = None
    found = []
    for argv in every:
        try:
            options = read_options(argv, world)
            ranks = ranks or parallel_state.initialize(options)
            found.append(str(convert(options, ranks)))
        except HpcrlError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def to_torch_dist(n: int, *every: tuple[Path, Path], flags: list[str] = ()) -> list[list[str]]:  # type: ignore[assignment]
    """What each rank said of converting (model, directory) pairs."""
    argv = [["--hf-checkpoint", str(model), "--save", str(save), *flags] for model, save in every]
    return run_ranks(n, convert_on_rank, argv)


def to_hf(source: Path, output: Path, origin: Path, **more: Any) -> Path:
    from hpcrl.models.convert.to_hf import convert

    convert(source, output, origin, **more)
    return output


# ---- there and back


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of each family, untied, bf16, of three layers (a dense one first in GLM-4.5); and odd ones."""
    root = tmp_path_factory.mktemp("models")
    found = {name: recast(make_family(root / name, name, num_hidden_layers=3), torch.bfloat16) for name in FAMILIES}
    found["odd"] = make_model(root / "odd", tied=True, vocab_size=131, hidden_size=60, num_hidden_layers=3)
    return found


@pytest.mark.process
@pytest.mark.parametrize("layout", LAYOUTS)
def test_there_and_back_is_bit_for_bit(tmp_path: Path, models: dict[str, Path], layout: str) -> None:
    n, flags, names = LAYOUTS[layout]
    chosen = {name: models[name] for name in names}
    pairs = [(path, tmp_path / name) for name, path in chosen.items()]
    answers = to_torch_dist(n, *pairs, flags=flags)
    assert answers[0] == [str(save / "release") for _, save in pairs]
    for name, path in chosen.items():
        assert (tmp_path / name / "latest_checkpointed_iteration.txt").read_text() == "release"
        back = to_hf(tmp_path / name, tmp_path / f"{name}-back", path, chunk_size=200_000)
        assert same(path, back), name
        index = json.loads((back / "model.safetensors.index.json").read_text())
        assert len(set(index["weight_map"].values())) > 1, "several files"
        assert index["weight_map"].keys() == read(path).keys()
        assert (back / "config.json").read_text() == (path / "config.json").read_text()
        assert (back / "tokenizer.json").is_file()


@pytest.mark.process
def test_text_part_of_published_models(tmp_path: Path) -> None:
    """Experts of a layer in one tensor, both ways; what is not trained comes from the origin."""
    kinds = ("qwen3_5", "qwen3_5_moe")
    texts = [recast(make_family(tmp_path / "text" / kind, f"{kind}_text"), torch.bfloat16) for kind in kinds]
    dense, sparse = (with_images(text, tmp_path / text.name) for text in texts)
    assert any(name.endswith("experts.gate_up_proj") for name in read(sparse))
    to_torch_dist(1, (dense, tmp_path / "dense"))
    to_torch_dist(2, (sparse, tmp_path / "sparse"), flags=["--expert-model-parallel-size", "2"])
    for path, name in ((dense, "dense"), (sparse, "sparse")):
        assert same(path, to_hf(tmp_path / name, tmp_path / f"{name}-back", path, add_missing=True)), name


@pytest.mark.process
def test_fp8_files_are_read_for_what_they_stand_for(tmp_path: Path) -> None:
    """Blocks whose edges are in the middle of a matrix, on two ranks; a matrix without its scales is named."""
    from hpcrl.models.convert.to_fp8 import convert

    wide = recast(make_family(tmp_path / "wide", "deepseek_v3"), torch.bfloat16)
    convert(wide, tmp_path / "fp8", Scheme("block", (48, 40)))
    to_torch_dist(2, (tmp_path / "fp8", tmp_path / "td"), flags=["--expert-model-parallel-size", "2"])
    coded, back = read(tmp_path / "fp8"), read(to_hf(tmp_path / "td", tmp_path / "back", wide))
    scaled = {name for name in back if f"{name}_scale_inv" in coded}
    assert len(scaled) > 30 and not scaled & {"model.embed_tokens.weight", "model.norm.weight"}
    for name, tensor in back.items():
        wanted = coded[name]
        if name in scaled:
            wanted = dequantize(wanted, coded[f"{name}_scale_inv"], (48, 40)).bfloat16()
        assert tensor.dtype == wanted.dtype and torch.equal(tensor, wanted), name
    lost = "model.layers.1.self_attn.o_proj.weight"
    del coded[f"{lost}_scale_inv"]
    for file in (tmp_path / "fp8").glob("*.safetensors*"):
        file.unlink()
    save_file(coded, tmp_path / "fp8" / "model.safetensors")
    ((message,),) = to_torch_dist(1, (tmp_path / "fp8", tmp_path / "none"))
    assert message.startswith("DataError") and f"{lost}_scale_inv" in message


@pytest.mark.process
def test_layers_that_predict_further_tokens(tmp_path: Path) -> None:
    """Both ways bit for bit where they are asked for, in halves over TP too; else not lost where the origin has them."""
    models = {name: make(tmp_path / name, num_hidden_layers=2) for name, make in MAKERS.items()}
    mimo = models["mimo"]
    pairs = [(path, tmp_path / f"{path.name}-td") for path in models.values()]
    to_torch_dist(2, *pairs, flags=["--tensor-model-parallel-size", "2", "--mtp-num-layers", "1"])
    for path, saved in pairs:
        assert same(path, to_hf(saved, tmp_path / f"{path.name}-back", path)), path.name
    to_torch_dist(1, (mimo, tmp_path / "without"))
    left = read(mimo).keys() - read(to_hf(tmp_path / "without", tmp_path / "a", mimo)).keys()
    assert len(left) == 16 and all(name.startswith("model.mtp_layers.0.") for name in left)
    assert same(mimo, to_hf(tmp_path / "without", tmp_path / "b", mimo, add_missing=True))


@pytest.mark.process
def test_workers_make_no_difference(tmp_path: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading and writing in several workers gives the same files."""
    from hpcrl.models.files.torch_dist import TorchDist

    read_one = TorchDist.read
    count = threading.Lock()
    now = 0
    most = 0

    def counted(self: TorchDist, *args: Any) -> torch.Tensor:
        nonlocal now, most
        with count:
            now, most = now + 1, max(most, now + 1)
        time.sleep(0.005)
        tensor = read_one(self, *args)
        with count:
            now -= 1
        return tensor

    monkeypatch.setattr(TorchDist, "read", counted)
    to_torch_dist(1, (models["qwen3_moe"], tmp_path / "td"))
    for workers in (1, 3):
        most, out = 0, tmp_path / str(workers)
        to_hf(tmp_path / "td", out, models["qwen3_moe"], chunk_size=100_000, workers=workers)
        assert same(models["qwen3_moe"], out) and most == workers


@pytest.mark.process
def test_other_readers_find_what_they_look_for(tmp_path: Path, models: dict[str, Path]) -> None:
    """What slime's and Megatron-LM's loaders read beside the tensors; and transformers reads the way back."""
    to_torch_dist(1, (models["glm4_moe"], tmp_path / "td"))
    common = run_ranks(1, common_on_rank, str(tmp_path / "td" / "release"))[0]
    args = common["args"]
    assert common["checkpoint_version"] == 3.0 and "iteration" in common
    assert (args.num_layers, args.hidden_size, args.num_attention_heads, args.num_query_groups) == (3, 64, 4, 2)
    assert (args.kv_channels, args.num_experts, args.padded_vocab_size) == (32, 8, 128)
    assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.add_position_embedding) == (
        1,
        1,
        False,
    )
    from transformers import AutoModelForCausalLM

    back = to_hf(tmp_path / "td" / "release", tmp_path / "back", models["glm4_moe"])
    ids = torch.arange(1, 20)[None]
    logits = [
        AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32)(ids).logits for p in (models["glm4_moe"], back)
    ]
    assert torch.equal(*logits)


@pytest.mark.process
def test_the_tools_under_slimes_names(tmp_path: Path, models: dict[str, Path]) -> None:
    tools = ROOT / "tools"

    def tool(name: str, *args: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(tools / name), *map(str, args)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, env=dict(os.environ))

    flags = ("--num-layers", 3, "--hidden-size", 64, "--padded-vocab-size", 256)
    model = models["qwen3"]
    done = tool("convert_hf_to_torch_dist.py", "--hf-checkpoint", model, "--save", tmp_path / "td", *flags)
    assert done.returncode == 0, done.stderr
    assert "wrote" in done.stdout and "27 of 27 tensors" in done.stderr and "warn" not in done.stderr.lower(), (
        done.stderr
    )
    again = ("--input-dir", tmp_path / "td", "--output-dir", tmp_path / "back", "--origin-hf-dir", model)
    workers = ("--load-max-workers", 2, "--save-max-workers", 16)
    done = tool("convert_torch_dist_to_hf.py", *again, "--vocab-size", 128, "--model-name", "qwen3", *workers)
    assert done.returncode == 0, done.stderr
    assert re.search(r"(\d+) of \1 kB", done.stderr) and "warn" not in done.stderr.lower(), done.stderr
    assert same(model, tmp_path / "back")


@pytest.mark.process
def test_missing_tensors_come_from_origin(tmp_path: Path, models: dict[str, Path]) -> None:
    """Layers that predict further tokens are not trained; without the flag they are left out."""
    origin = shutil.copytree(models["glm4_moe"], tmp_path / "origin")
    config = json.loads((origin / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (origin / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    extra = {"model.layers.3.eh_proj.weight": torch.randn(4, 6), "model.norm.weight_scale_inv": torch.ones(1)}
    save_file(load_file(origin / "model.safetensors") | extra, origin / "model.safetensors")
    to_torch_dist(1, (models["glm4_moe"], tmp_path / "td"))
    without = to_hf(tmp_path / "td", tmp_path / "without", origin)
    assert same(without, models["glm4_moe"])
    assert "quantization_config" not in json.loads((without / "config.json").read_text()), "these weights are no FP8"
    held = read(to_hf(tmp_path / "td", tmp_path / "with", origin, add_missing=True))
    assert torch.equal(held["model.layers.3.eh_proj.weight"], extra["model.layers.3.eh_proj.weight"])
    assert held.keys() - read(without).keys() == {"model.layers.3.eh_proj.weight"}, (
        "no scale of a weight that is no FP8"
    )


# ---- what does not fit


@pytest.mark.process
def test_bad_input_to_torch_dist(tmp_path: Path, models: dict[str, Path]) -> None:
    """Bad input to torch_dist is named on every rank."""
    wrong = shutil.copytree(models["qwen3"], tmp_path / "wrong")
    tensors = load_file(wrong / "model.safetensors")
    save_file(tensors | {"model.norm.weight": torch.ones(7)}, wrong / "model.safetensors")
    lacks = shutil.copytree(models["qwen3"], tmp_path / "lacks")
    save_file(
        {n: t for n, t in tensors.items() if n != "model.layers.2.mlp.up_proj.weight"}, lacks / "model.safetensors"
    )
    cut = shutil.copytree(models["qwen3"], tmp_path / "cut")
    data = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(data[: len(data) // 2])
    ints = shutil.copytree(models["qwen3"], tmp_path / "ints")
    save_file(tensors | {"model.norm.weight": torch.ones(64, dtype=torch.int8)}, ints / "model.safetensors")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "latest_checkpointed_iteration.txt").write_text("7")
    answers = to_torch_dist(
        2,
        (wrong, tmp_path / "a"),
        (lacks, tmp_path / "b"),
        (cut, tmp_path / "c"),
        (ints, tmp_path / "d"),
        (models["qwen3"], tmp_path / "full"),
        flags=["--tensor-model-parallel-size", "2"],
    )
    assert answers[0] == answers[1], "one error, the same on all ranks"
    shape, missing, truncated, kind, held = answers[0]
    assert "model.norm.weight is [7], config.json asks for [64]" in shape
    assert "lacks model.layers.2.mlp.up_proj.weight" in missing
    assert f"{cut}/model.safetensors cannot be read" in truncated
    assert "holds I8" in kind
    assert f"--save {tmp_path}/full holds a checkpoint already" in held
    assert not list(tmp_path.glob("[abcd]/latest*")) and not list(tmp_path.glob("[abcd]/release"))


@pytest.mark.process
def test_bad_input_to_hf(tmp_path: Path, models: dict[str, Path]) -> None:
    """Bad input to hf is named before anything is written."""
    to_torch_dist(1, (models["qwen3"], tmp_path / "td"), (models["qwen3_moe"], tmp_path / "moe"))
    more, fewer, wide = (shutil.copytree(models["qwen3"], tmp_path / n) for n in ("more", "fewer", "wide"))
    for path, change in (
        (more, {"num_hidden_layers": 4}),
        (fewer, {"num_hidden_layers": 2}),
        (wide, {"vocab_size": 500}),
    ):
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, **change, "layer_types": None}))
    for origin, words in (
        (more, ["decoder.layers", "3 layers", "4"]),
        (fewer, ["decoder.layers", "3 layers", "2"]),
        (wide, ["128 rows", "500"]),
        (models["qwen3_moe"], ["has no", "experts"]),
    ):
        with pytest.raises(DataError) as caught:
            to_hf(tmp_path / "td", tmp_path / "out", origin)
        assert all(word in str(caught.value) for word in words), caught.value
    with pytest.raises(DataError, match="holds .*experts.* which qwen3 has not|has no"):
        to_hf(tmp_path / "moe", tmp_path / "out", models["qwen3"])
    shard = next((tmp_path / "td" / "release").glob("*.distcp"))
    data = shard.read_bytes()
    shard.write_bytes(data[:-10])
    with pytest.raises(DataError, match=rf"{shard.name} is truncated: {len(data) - 10} bytes, {len(data)} are needed"):
        to_hf(tmp_path / "td", tmp_path / "out", models["qwen3"])
    shard.unlink()
    with pytest.raises(DataError, match=rf"{shard.name} is missing"):
        to_hf(tmp_path / "td", tmp_path / "out", models["qwen3"])
    with pytest.raises(DataError, match="--input-dir .*/nowhere is not a directory"):
        to_hf(tmp_path / "nowhere", tmp_path / "out", models["qwen3"])
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".partial*"))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["to-hf", "--input-dir", "a", "--output-dir", "b"], "--origin-hf-dir is not given"),
        (
            ["to-hf", "--input-dir", "a", "--output-dir", "b", "--origin-hf-dir", "{m}", "--save-max-workers", "0"],
            "--save-max-workers 0",
        ),
        (
            ["to-hf", "--input-dir", "a", "--output-dir", "b", "--origin-hf-dir", "{m}", "--load-max-workers", "0"],
            "--load-max-workers 0",
        ),
        (
            ["to-hf", "--input-dir", "a", "--output-dir", "b", "--origin-hf-dir", "{m}", "--vocab-size", "5"],
            "config.json says 131",
        ),
        (
            ["to-hf", "--input-dir", "a", "--output-dir", "b", "--origin-hf-dir", "{m}", "--model-name", "glm4"],
            "says 'qwen3'|says qwen3",
        ),
        (["to-torch-dist", "--save", "b"], "--hf-checkpoint is not given"),
        (
            ["to-torch-dist", "--hf-checkpoint", "{m}", "--save", "b", "--padded-vocab-size", "8"],
            "less than config.json's vocab_size 131",
        ),
        (
            ["to-torch-dist", "--hf-checkpoint", "{m}", "--save", "b", "--tensor-model-paralel-size", "8"],
            "did you mean",
        ),
        (["to-fp4"], "no such conversion"),
    ],
)
def test_wrong_usage(tmp_path: Path, models: dict[str, Path], argv: list[str], words: str) -> None:
    from hpcrl.cli.main import command

    with pytest.raises(UsageError, match=words):
        command(["convert", *(word.format(m=models["odd"]) for word in argv)])


def test_every_rank_a_stage_is_slimes_rule() -> None:
    from hpcrl.trainer.checkpoint.to_torch_dist import stages_for

    assert stages_for(36, 4) == (4, None)
    assert stages_for(46, 8) == (8, 4)
    assert stages_for(9, 8) == (4, None) or stages_for(9, 8) == (2, 4)
    with pytest.raises(UsageError, match="9 ranks for 4 layers"):
        stages_for(4, 9)


# ---- the writer


def test_files_are_filled_in_order(tmp_path: Path) -> None:
    small = TensorHeader("a", torch.bfloat16, (3,))
    wide = TensorHeader("b", torch.float32, (2, 2))
    pair = [TensorHeader("c", torch.bfloat16, (5,)), TensorHeader("d", torch.bfloat16, ())]
    plan = split([[small], [wide], pair], chunk_size=22)
    assert [[t.name for t in file] for file in plan] == [["a", "b"], ["c", "d"]], "a pair stays together"
    values = {t.name: torch.randn(t.shape).to(t.dtype) for t in (small, wide, *pair)}
    with directory(tmp_path / "out", False) as beside:
        save_shards(beside, plan, lambda file: ((t.name, values[t.name]) for t in file))
    assert same_tensors(read(tmp_path / "out"), values)
    with pytest.raises(UsageError, match="exists already"), directory(tmp_path / "out", False):
        pass
    with pytest.raises(KeyError), directory(tmp_path / "out", True) as beside:
        save_shards(beside, plan, lambda file: ((t.name, {}[t.name]) for t in file))
    assert same_tensors(read(tmp_path / "out"), values), "a conversion that fails leaves what was there"
    with directory(tmp_path / "out", True) as beside:
        (beside / "x").touch()
    assert [p.name for p in tmp_path.iterdir()] == ["out"] and [p.name for p in (tmp_path / "out").iterdir()] == ["x"]


def same_tensors(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
