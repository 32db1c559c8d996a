"""A run's adapter in files: PEFT loads them as they are, a run begins with them, and they are merged into their base."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hpcrl.errors import DataError, UsageError
from hpcrl.models.convert.adapter import main as merge_lora
from hpcrl.models.convert.to_hf import main as to_hf
from hpcrl.models.lora.peft import check_settings
from hpcrl.models.lora.settings import LoraSettings
from tests.support.ranks import run_ranks
from tests.support.tiny import make_family, make_model
from tests.trainer.lora.test_lora_training import options
from tests.trainer.megatron import test_model_parity as parity

pytestmark = pytest.mark.process


def saved_and_exported(opts: Any, directory: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The adapter and the merged weights of a run of two steps, which has saved them."""
    from hpcrl.trainer.checkpoint.save_load import Position, save
    from tests.trainer.lora.test_lora_training import begun, trained

    policy, others, _ = begun(opts, directory)
    trained(policy, others, opts, 2)
    save(policy, policy.ranks, directory, Position(2, 2, {}), "run", others.save)
    return dict(parity.exported(policy.with_part("adapter"))), dict(parity.exported(policy.with_part("merged")))


def begun_with(opts: Any, directory: Path) -> tuple[str, dict[str, torch.Tensor]]:
    from tests.trainer.lora.test_lora_training import begun

    policy, _, said = begun(opts, directory)
    return said, dict(parity.exported(policy.with_part("adapter")))


@pytest.mark.parametrize(
    ("kind", "fields"),
    [("dense", {"lora_type": "lora"}), ("moe", {}), pytest.param("glm4", {}, marks=pytest.mark.soak)],
)
def test_an_adapter_in_files(tmp_path: Path, kind: str, fields: dict[str, Any]) -> None:
    from tests.trainer.step.test_invariance import VOCAB

    small = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 16, "vocab_size": VOCAB}
    if kind == "dense":
        model = make_model(tmp_path / "model", tied=True, **small)
    else:
        more = {"moe_intermediate_size": 16} if kind == "moe" else {}
        model = make_family(tmp_path / "model", "qwen3_moe" if kind == "moe" else kind, **small | more)
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    opts = options(model, 2, **layout, **fields)
    adapter, merged = run_ranks(2, saved_and_exported, opts, tmp_path / "saved")[0]
    files, whole = tmp_path / "files", tmp_path / "whole"
    words = ["--input-dir", str(tmp_path / "saved"), "--origin-hf-dir", str(model), "--output-dir", str(files)]
    for more in (["--chunk-size", "100"], ["-a"], ["--save-max-workers", "2"], ["--load-max-workers", "2"]):
        with pytest.raises(UsageError, match="no effect on an"):
            to_hf([*words, *more])
    to_hf(words)
    found = load_file(files / "adapter_model.safetensors")
    assert {f"base_model.model.{name}" for name in adapter} == found.keys()
    assert all(torch.equal(found[f"base_model.model.{name}"], value) for name, value in adapter.items())
    merge_lora(["--adapter-dir", str(files), "--base-dir", str(model), "--output-dir", str(whole)])
    written = load_file(whole / "model.safetensors")
    assert all(float((written[name] - value).abs().max()) < 1e-6 for name, value in merged.items())
    said, again = run_ranks(1, begun_with, options(model, lora_adapter_path=str(files), **fields), tmp_path / "new")[0]
    assert "begins with the adapter" in said
    assert all(torch.equal(again[name], value) for name, value in adapter.items())
    refused(files, model, tmp_path)


def refused(files: Path, model: Path, tmp_path: Path) -> None:
    """Another base, another rank, and what is no plain LoRA."""
    other = {name: value + 1 for name, value in load_file(model / "model.safetensors").items()}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_bytes((model / "config.json").read_bytes())
    save_file(other, tmp_path / "other" / "model.safetensors")
    words = ["--adapter-dir", str(files), "--output-dir", str(tmp_path / "no"), "--base-dir"]
    with pytest.raises(DataError, match="is not the base"):
        merge_lora([*words, str(tmp_path / "other")])
    assert not (tmp_path / "no").exists()
    config = json.loads((files / "adapter_config.json").read_text())
    odd = ({"use_dora": True}, {"rank_pattern": {"q_proj": 2}}, {"r": 0}, {"layers_to_transform": [1]}, {"new": "x"})
    for fields in odd:
        (files / "adapter_config.json").write_text(json.dumps(config | fields))
        with pytest.raises(DataError, match=next(iter(fields))):
            merge_lora([*words, str(model)])
    (files / "adapter_config.json").write_text(json.dumps(config))
    tensors = load_file(files / "adapter_model.safetensors")
    a = next(name for name in tensors if name.endswith(".lora_A.weight"))
    b = a.replace("lora_A", "lora_B")
    spoiled: list[tuple[str, dict[str, torch.Tensor]]] = [
        ("lacks", {n: t for n, t in tensors.items() if n != a}),
        ("holds", tensors | {a.replace("lora_A.weight", "lora_magnitude_vector.weight"): torch.ones(3)}),
        ("the rank is", tensors | {a: tensors[a][:2], b: tensors[b][:, :2]}),
        ("the rank is", tensors | {a: tensors[a][:2]}),
        ("holds no adapter", {}),
    ]
    for told, changed in spoiled:
        save_file({n: t.contiguous() for n, t in changed.items()}, files / "adapter_model.safetensors")
        with pytest.raises(DataError, match=told):
            merge_lora([*words, str(model)])
    assert not (tmp_path / "no").exists()


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="the package peft is not installed")
def test_peft_loads_the_files(tmp_path: Path) -> None:
    """As they are, and computes with them what the merged weights compute."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from tests.trainer.step.test_invariance import VOCAB

    small = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 16, "vocab_size": VOCAB}
    model = make_model(tmp_path / "model", tied=True, **small)
    run_ranks(1, saved_and_exported, options(model, use_rslora=True), tmp_path / "saved")
    files, whole = tmp_path / "files", tmp_path / "whole"
    to_hf(["--input-dir", str(tmp_path / "saved"), "--origin-hf-dir", str(model), "--output-dir", str(files)])
    merge_lora(["--adapter-dir", str(files), "--base-dir", str(model), "--output-dir", str(whole)])
    load = AutoModelForCausalLM.from_pretrained
    ids = torch.arange(1, 40)[None]
    with torch.no_grad():
        adapted = PeftModel.from_pretrained(load(model, dtype=torch.float32), files)(ids).logits
        merged = load(whole, dtype=torch.float32)(ids).logits
        base = load(model, dtype=torch.float32)(ids).logits
    assert float((adapted - merged).abs().max()) < 1e-5
    assert float((adapted - base).abs().max()) > 1e-3


def test_settings_that_differ_are_told_at_once(tmp_path: Path) -> None:
    """All of them in one error, with the flags to give."""
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_rslora": True}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="give --lora-rank 4 --lora-alpha 8 --use-rslora$"):
        check_settings(tmp_path, LoraSettings(8, 16.0, 0.0))
    check_settings(tmp_path, LoraSettings(4, 8.0, 0.0, rank_stabilized=True))
