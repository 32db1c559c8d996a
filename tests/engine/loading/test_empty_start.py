"""Engines of a run that trains read no weights: all they compute with has come from the trainers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hpcrl.config.options import Options
from hpcrl.engine.server_settings import EMPTY, Build, flags
from hpcrl.models.convert.to_fp8 import convert
from hpcrl.models.family import find_family
from hpcrl.models.files.config_json import read_config
from hpcrl.models.files.fp8 import Scheme
from hpcrl.plan import Plan, local_hosts, make_plan
from tests.support.engines import CLOSE, LONG, SMALL, Engines, Side
from tests.support.forked_engines import Nursery
from tests.support.fp8 import dequantize
from tests.support.tiny import make_family, make_model

CPU = Build("0.32.0", cpu=True)
CUDA = Build("0.32.0", cpu=False)


def chosen(model: Path, build: Build = CPU, plan: Plan | None = None, **values: Any) -> dict[str, Any]:
    """vLLM's settings of the first engine."""
    options = Options(**({"hf_checkpoint": str(model), "actor_num_gpus_per_node": 1, "rollout_num_gpus": 1} | values))
    return flags(options, plan or make_plan(options, local_hosts(options), "test"), 0, 1, build)


def test_who_starts_empty(tmp_path: Path) -> None:
    """Engines of a run that trains; not those of one that only samples, those that no run starts, those with drafts, nor
    those whose user says how the files are to be read.  NaN is put in on CPUs alone, and where updates are compared."""
    model = make_model(tmp_path / "model")
    found = chosen(model)
    assert (found["load_format"], found["model_loader_extra_config"]) == (EMPTY, {"fill": "zero"})
    checked = chosen(model, check_weight_update_equal=True)
    assert checked["model_loader_extra_config"] == {"fill": "nan"}
    assert chosen(model, CUDA, bf16=True, check_weight_update_equal=True)["model_loader_extra_config"]["fill"] == "zero"
    options = Options(hf_checkpoint=str(model), actor_num_gpus_per_node=1, rollout_num_gpus=1)
    place = make_plan(options, local_hosts(options), "t").engines[0]
    for reads in (
        chosen(model, debug_rollout_only=True),
        chosen(model, plan=Plan("external", 0, (), (place,), place, ("127.0.0.1:1",))),
        chosen(model, CUDA, bf16=True, vllm={"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}),
        chosen(model, vllm={"safetensors_load_strategy": "eager"}),
    ):
        assert "load_format" not in reads and "model_loader_extra_config" not in reads
    assert chosen(model, vllm={"load_format": "auto"})["load_format"] == "auto"


def test_what_no_update_brings_is_read(tmp_path: Path) -> None:
    """Scales of a cache are not the trainers', so they come from the files; matrices with their scales, a tied head and
    layers for further tokens are not read."""
    model = make_model(tmp_path / "model", tied=True)
    config = read_config(model)
    family = find_family(config, "here")
    names = [name for _, rule in family.tensors(config) for name in rule.hf]
    scales = [f"{name}_scale_inv" for name in names if name.endswith("proj.weight")]
    mine = "model.layers.0.self_attn.attn.k_scale"
    assert family.not_trained([*names, *scales, "lm_head.weight", mine], config) == {mine}


@pytest.mark.parametrize(("name", "experts"), [("glm4_moe", "n_routed_experts"), ("qwen3_moe", "num_experts")])
def test_first_passes_use_most_experts(tmp_path: Path, name: str, experts: str) -> None:
    """An empty engine's routers spread random tokens over more than half of the experts, the same at every start."""
    from hpcrl.engine.loading.empty_start import empty

    directory = make_family(tmp_path / "model", name, **{experts: 64, "vocab_size": 512})
    chosen = []
    for _ in range(2):
        model = AutoModelForCausalLM.from_pretrained(directory)
        empty(model, 0.0)
        (*_, router) = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
        router.register_forward_pre_hook(lambda router, given: chosen.append(given[0] @ router.weight.T))
        model(torch.randint(0, 512, (1, 256), generator=torch.Generator().manual_seed(0)))
    first, again = (logits.view(-1, 64).topk(4).indices for logits in chosen)
    assert torch.equal(first, again)
    assert len(first.unique()) > 32


def blank(model: Path) -> Path:
    """A directory like it whose tensors are all zero: who reads it has nothing."""
    other = model.with_name("blank")
    shutil.copytree(model, other)
    for file in other.glob("*.safetensors"):
        data = bytearray(file.read_bytes())
        begin = 8 + int.from_bytes(data[:8], "little")  # after the header
        data[begin:] = bytes(len(data) - begin)
        file.write_bytes(data)
    return other


@pytest.fixture
def start_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start engines as a run that trains does."""
    monkeypatch.setattr(Engines, "empty", True)


CASES = [("qwen3", True, {}), ("glm4_moe", False, {"first_k_dense_replace": 1})]


@pytest.mark.vllm
@pytest.mark.usefixtures("start_empty")
@pytest.mark.parametrize(("name", "tied", "fields"), CASES, ids=["tied", "experts"])
def test_all_weights_come_from_the_trainers(
    nursery: Nursery, tmp_path: Path, name: str, tied: bool, fields: dict[str, Any]
) -> None:
    """Every parameter is NaN until the first update, which is compared tensor by tensor; after it the engine computes
    what transformers does, though the files that it has hold nothing but zeros."""
    model = make_family(tmp_path / "model", name, tied, **fields)
    values = {"check_weight_update_equal": True, "update_weight_buffer_size": SMALL}
    engines = nursery.engines(tmp_path / "run", blank(model), **values)
    side = Side(engines, model)
    try:
        side.push(side.reference.step(11))
        assert side.distance() <= CLOSE and side.distance(LONG) <= CLOSE
        assert "starts with empty weights" in engines.log_file().read_text()
    finally:
        side.close()
        assert engines.stop() == [0]


@pytest.mark.vllm
@pytest.mark.usefixtures("start_empty")
def test_codes_and_scales_come_from_the_trainers(nursery: Nursery, tmp_path: Path) -> None:
    """An engine with FP8 weights gets codes and the scales of their blocks, of which its files have none."""
    wide = make_family(tmp_path / "wide", "qwen3")
    convert(wide, tmp_path / "fp8", Scheme("block", (16, 32)))
    engines = nursery.engines(tmp_path / "run", blank(tmp_path / "fp8"), update_weight_buffer_size=SMALL)
    side = Side(engines, wide)
    try:
        new = side.reference.step(21)
        side.push(new)
        scheme = side.sender.scheme
        assert scheme is not None and scheme.chosen is not None
        coded = {n: dequantize(*scheme.quantize(n, t), scheme.block) for n, t in new if n in scheme.chosen}
        side.reference.back_to([(n, coded.get(n, t)) for n, t in new])
        assert coded and side.distance(LONG) <= CLOSE
    finally:
        side.close()
        assert engines.stop() == [0]
