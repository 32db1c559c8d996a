"""What vLLM chooses for the 355B recipe's engines on H100s, and that a rehearsal finds the fixes of hpcrl's that are
taken away: each engine is rehearsed with the fix and without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.options import Options
from hpcrl.config.recipe import load_recipe, resolve_stages
from hpcrl.config.slime.conditional_readers import deepep_kind
from hpcrl.launch.model_directory import with_shipped_config
from hpcrl.models.family import find_family
from hpcrl.models.files.config_json import read_config
from hpcrl.planning.formulas.engine_memory import engine_terms, workspace_bytes
from hpcrl.planning.rehearsal.engine_section import as_chosen, choice_lines, of_cache, of_choices
from hpcrl.planning.rehearsal.reports import EngineChoices, EngineReport
from tests.support.rehearsed_engines import rehearse_engines

pytestmark = pytest.mark.process

GPU = 80 * 2**30
RECIPE = Path("examples/glm-4.5-355b-64gpu.toml")


def recipe(**vllm: Any) -> Options:
    """The shipped one, but for settings of vLLM's; None takes one away."""
    (options,) = resolve_stages(load_recipe(RECIPE), {}, {"run": "{run}", "prepared": "{run}/prepared"})
    kept = {name: value for name, value in (options.vllm | vllm).items() if value is not None}
    return with_shipped_config(options.model_copy(update={"vllm": kept}))


ENGINES = {
    "shipped": recipe(),
    "default": recipe(max_num_batched_tokens=None),
    "default-batch": recipe(max_num_batched_tokens=None),
    "deep-gemm": recipe(moe_backend="deep_gemm", max_num_batched_tokens=2048),
    "shipped-tools": recipe(),
    "shipped-drawn": recipe(),
    "deepep": recipe(all2all_backend=deepep_kind({"sglang-deepep-mode": ["auto"]})),
    "deepep-throughput": recipe(all2all_backend=deepep_kind({"sglang-deepep-mode": ["normal"]})),
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EngineReport]:
    return rehearse_engines(tmp_path_factory.mktemp("engines"), ENGINES)


def said(reports: dict[str, EngineReport], name: str) -> tuple[str, str]:
    """(what is printed of an engine, its faults)"""
    options, report = ENGINES[name], reports[name]
    config = read_config(options.hf_checkpoint or "")
    terms = engine_terms(as_chosen(options, report), find_family(config, "here"), config, GPU)
    assert not report.error and not report.unshown, report
    faults = of_choices(report) + of_cache(options, terms, report)
    return "\n".join(choice_lines(options, terms, report)), "\n".join(f"{found.what}; {found.hint}" for found in faults)


def chosen(reports: dict[str, EngineReport], name: str) -> EngineChoices:
    found = reports[name].choices
    assert found is not None, reports[name]
    return found


def test_what_vllm_chooses(reports: dict[str, EngineReport]) -> None:
    """Backends, graphs, batch sizes and cache are vLLM's; nothing is wrong with the recipe as it is shipped."""
    found = chosen(reports, "shipped")
    assert (found.attention, found.experts) == ("FLASH_ATTN", "FLASHINFER_CUTLASS")
    assert found.exchange == "allgather_reducescatter (AgRsAll2AllManager)"
    assert (found.graphs, max(found.captured)) == ("FULL_AND_PIECEWISE", 512)
    assert (found.batched, found.sequences) == (512, 512)
    assert found.token_bytes == 2 * 92 * 8 * 128 * 2
    lines, faults = said(reports, "shipped")
    assert all(name in lines for name in ("FLASH_ATTN", "FLASHINFER_CUTLASS", "AgRsAll2AllManager"))
    assert "warn" not in lines and not faults


def test_workspaces_of_experts(reports: dict[str, EngineReport]) -> None:
    """DeepGEMM's is vLLM's own shapes, and what is planned for it, the rows that are gathered apart."""
    found = chosen(reports, "deep-gemm")
    assert found.experts == "DEEPGEMM"
    options = ENGINES["deep-gemm"]
    config = read_config(options.hf_checkpoint or "")
    planned = workspace_bytes(options, find_family(config, "here"), config)["DeepGEMM"]
    gathered = 5 * 5120 * 32 * 2048
    assert found.workspace == pytest.approx(planned - gathered, rel=0.02)


def test_a_workspace_too_large_for_the_gpu(reports: dict[str, EngineReport]) -> None:
    """N1: with vLLM's own number of tokens; not with hpcrl's default."""
    assert chosen(reports, "default").batched == 512
    assert not said(reports, "default")[1]
    assert chosen(reports, "default-batch").batched == 8192
    fault = said(reports, "default-batch")[1]
    assert "takes 49" in fault and "--vllm-max-num-batched-tokens" in fault


def test_an_environment_without_nvcc(reports: dict[str, EngineReport]) -> None:
    """N2: one that does not lead to the nvcc that pip has installed."""
    assert "nvcc" not in said(reports, "shipped")[0]
    lines, _ = said(reports, "shipped-tools")
    assert "nvcc 12.9" in lines and "CUDA_HOME" in lines


def test_an_environment_without_ninja(reports: dict[str, EngineReport]) -> None:
    """N6: one that does not lead to the interpreter's folder, where ninja is; vLLM then does without FlashInfer."""
    lines, _ = said(reports, "shipped-tools")
    assert "FlashInfer is off" in lines and "nvcc and ninja" in lines
    assert chosen(reports, "shipped-tools").experts == "DEEPGEMM"
    assert chosen(reports, "shipped").experts == "FLASHINFER_CUTLASS"


def test_an_empty_start_to_few_experts(reports: dict[str, EngineReport]) -> None:
    """N4: weights of noughts alone."""
    assert chosen(reports, "shipped").reached > 80
    assert chosen(reports, "shipped-drawn").reached == 8
    fault = said(reports, "shipped-drawn")[1]
    assert "8 of 160" in fault and "--vllm-load-format auto" in fault


def test_decoding_without_graphs(reports: dict[str, EngineReport]) -> None:
    """N5: the throughput kernels, which an import made of deepep_mode auto."""
    assert "warn" not in said(reports, "deepep")[0]
    assert "graphs FULL" in said(reports, "deepep")[0]
    lines, _ = said(reports, "deepep-throughput")
    assert "without CUDA graphs" in lines and "--vllm-all2all-backend deepep_low_latency" in lines
