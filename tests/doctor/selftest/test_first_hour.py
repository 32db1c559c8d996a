"""`hpcrl selftest --first-hour`: which checks, the runs that it would start on H100s, and what it reads in their logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcrl.cli.main import main
from hpcrl.doctor.selftest.checks import large_update, moe_fp8, qwen3_rates
from hpcrl.doctor.selftest.first_hour import GROUPS, checks_of, groups, kernel_lines
from hpcrl.doctor.selftest.registry import find_checks
from hpcrl.doctor.selftest.tiny_model import make_model, write_config
from hpcrl.doctor.selftest.whole_run import recipe_with_engines
from hpcrl.models.convert.to_fp8 import quantization_config
from hpcrl.models.files.fp8 import Scheme
from tests.support.runs import REPO


def test_groups_follow_from_the_gpus() -> None:
    assert [groups(gpus) for gpus in (0, 1, 8)] == [["one", "moe-fp8"], ["one"], ["one", "eight", "moe-fp8"]]
    assert {*checks_of(8)} == {name for names in GROUPS.values() for name in names} <= {*find_checks()}
    assert len(checks_of(8)) == len({*checks_of(8)}) and not {*GROUPS["eight"]} & {*checks_of(1)}


def recipes(folder: Path) -> dict[str, Path]:
    """Name -> recipe of each run with an engine that is started on eight GPUs; of the models only config.json is there."""
    found: dict[str, Path] = {}

    def recipe(name: str, gpus: int, config: dict[str, Any], **values: Any) -> None:
        model = {"hf_checkpoint": str(folder / f"{name}-model")}
        write_config(folder / f"{name}-model", **config)
        found[name] = recipe_with_engines(folder, name, gpus, **values | model)

    for name in qwen3_rates.RUNS:
        recipe(name, 1, qwen3_rates.sizes(name), **qwen3_rates.options(name, folder, True))
    for name, values in large_update.transports(8).items():
        recipe(name, 8, large_update.GPU, **values)
    write_config(folder / "wide", **moe_fp8.sizes(True))
    for name, power_of_two in moe_fp8.SCALES[True].items():
        blocks = quantization_config(Scheme(power_of_two=bool(power_of_two)), ["lm_head"])
        config = {**moe_fp8.sizes(True), "quantization_config": blocks}
        recipe(name, 8, config, load=str(folder / "wide"), **moe_fp8.options(8))
    return found


def test_the_runs_fit_on_h100s(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As `hpcrl plan` has it: both transports between tensor-parallel engines, FP8 and the two Qwen3."""
    found = recipes(tmp_path)
    assert {*found} == {"qwen3_0.6b", "qwen3_4b_lora", "nccl", "vllm", "ipc", "vllm-ipc", "ue8m0", "fp32"}
    hosts = ["--hostfile", str(REPO / "hostfiles/1x8.txt")]
    for name, path in found.items():
        assert main(["plan", str(path), "--gpu", "h100-sxm", *hosts]) == 0, name
        said = capsys.readouterr().out
        assert "\nfits: " in said, said
        way = {"nccl": "in pieces", "ipc": "in pieces", "qwen3_4b_lora": "the adapter alone"}.get(name, "whole tensors")
        assert f"weights of one update{': ' if way[0] != 'i' else ' '}{way}" in said, said


def test_a_model_with_experts_has_all_its_tensors(tmp_path: Path) -> None:
    """transformers finds each weight of the self-test's own, and no other."""
    from transformers import AutoModelForCausalLM

    for name, sizes in (("moe", moe_fp8.sizes(False)), ("tied", {"tie_word_embeddings": True})):
        _, told = AutoModelForCausalLM.from_pretrained(make_model(tmp_path / name, **sizes), output_loading_info=True)
        assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"], told


def test_lines_that_name_kernels(tmp_path: Path) -> None:
    """Without time and process, each once, from the logs of runs and of ranks."""
    engine = tmp_path / "work/runs/small/logs/attempt-0/engine-0.log"
    begin = "(EngineCore pid=7) INFO 11-30 06:57:43"
    lines = [
        f"{begin} [cuda.py:1] Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN'].",
        f"{begin} [gpu_worker.py:2] Available KV cache memory: 51.90 GiB",
        f"{begin} [launcher.py:3] Route: /health, Methods: GET",
        "W1130 06:57:38.945000 7 torch/_library/triton.py:53] Triton not available, find_triton_kernels = []",
        "06:57:23 runs on the CPU: layers Megatron-core's own",
    ]
    for path in (engine, engine.with_name("engine-1.log"), tmp_path / "logs/rank-alone.log"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in lines))
    first = "Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN']."
    kept = [first, "Available KV cache memory: 51.90 GiB", "runs on the CPU: layers Megatron-core's own"]
    assert kernel_lines(tmp_path) == {"small": kept, "ranks": kept}
