"""What a run on GPUs needs of a host: each thing that is missing or broken is told with its fix.

Programs and modules are stand-ins: what nvidia-smi and nvcc print is as their releases 580 and 13.0 print it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.options import Options
from hpcrl.launch.node_checks import gpu_needs
from hpcrl.launch.node_checks.gpu_needs import check_gpu_needs, needs
from hpcrl.report.not_learning import notes_of
from hpcrl.run import gpu_counters, gpu_environment
from hpcrl.run.gpu_counters import counting_errors
from hpcrl.run.rundir import RunDir

NVCC = "Cuda compilation tools, release {}, V{}.88\nBuild cuda_{}.r{}/compiler.36424714_0"
ECC = "0, 0\n1, {}\n2, [N/A]"
DRIVER = "580.65.06\n580.65.06\n580.65.06"
LINKS = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-a)
\t Link 0: Replay Errors: 0
\t Link 0: Recovery Errors: 0
\t Link 0: FEC Errors - 0: 811
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-b)
\t Link 3: Replay Errors: {}
\t Link 3: CRC Errors: 0"""
TORCH = """
class cuda:
    def init(): {}
    def device_count(): return 2
class ones:
    def __init__(self, *shape, device): pass
    def item(self): return 1.0
"""
FLASHINFER = """
import os, sys
def has_flashinfer():
    {}
"""
ABSENT = "raise ModuleNotFoundError(\"No module named '{}'\")"


def program(folder: Path, name: str, body: str) -> None:
    folder.mkdir(exist_ok=True, parents=True)
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)


def nvidia_smi(folder: Path, ecc: int = 0, replays: int = 0) -> None:
    query, links = ECC.format(ecc), LINKS.format(replays)
    program(
        folder,
        "nvidia-smi",
        f"case $1 in nvlink) echo '{links}';; *driver*) echo '{DRIVER}';; *) echo '{query}';; esac",
    )


def nvcc(folder: Path, release: str) -> None:
    program(folder / "cuda" / "bin", "nvcc", f"echo '{NVCC.format(*[release] * 4)}'")


def module(folder: Path, name: str, body: str = "") -> None:
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        path = folder / "modules" / "/".join(parts[:depth]) / "__init__.py"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(body if depth == len(parts) else "")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with two GPUs, on which all is well."""
    for name in ("gcc", "ninja"):
        program(tmp_path, name, "")
    nvidia_smi(tmp_path)
    nvcc(tmp_path, "13.0")
    for name in ("vllm", "transformer_engine.pytorch", "deep_ep", "cuda.core"):
        module(tmp_path, name)
    module(tmp_path, "torch", TORCH.format("pass"))
    module(tmp_path, "vllm.utils.flashinfer", FLASHINFER.format("return True"))
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "Python.h").touch()
    monkeypatch.setattr(gpu_needs.sysconfig, "get_path", lambda _: str(tmp_path / "include"))
    monkeypatch.setattr(gpu_needs, "gpus_are_here", lambda: True)
    monkeypatch.setattr(gpu_environment, "CUDA", str(tmp_path / "cuda"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    for name in ("CC", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "VLLM_USE_DEEP_GEMM"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


ALL = ("vllm", "nvcc", "deep_ep")
pytestmark = pytest.mark.process


def bad(needed: tuple[str, ...] = ALL, **more: Any) -> list[str]:
    return [found.line() for found in check_gpu_needs(needed, **more) if found.level != "ok"]


def test_a_host_with_everything_is_well(host: Path) -> None:
    [found] = check_gpu_needs(ALL)
    assert found.level == "ok"
    for said in (f"{host}/cuda/bin/nvcc (Build cuda_13.0.r13.0", "driver 580.65.06,", "CUDA on 2 GPUs", "FlashInfer"):
        assert said in found.what
    assert "transformer_engine.pytorch" in found.what and "cuda.core" in found.what


def test_why_cuda_does_not_start(host: Path) -> None:
    module(host, "torch", TORCH.format("raise RuntimeError('driver too old (found version 12040)')"))
    [line] = bad()
    assert line.startswith("fail  torch cannot use") and "found version 12040); see nvidia-smi" in line


@pytest.mark.parametrize("release", ["12.4", None])
def test_fp8_needs_a_new_nvcc(host: Path, monkeypatch: pytest.MonkeyPatch, release: str | None) -> None:
    monkeypatch.setenv("CUDA_HOME", str(host / "cuda"))
    if release:
        nvcc(host, release)
    else:
        (host / "cuda/bin/nvcc").unlink()
    [line] = bad()
    assert line.startswith("fail  ") and "nvcc 12.9" in line and f"{host}/cuda; load" in line
    assert bad(("vllm",)) == [], "other engines compile nothing with it"
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "0")
    assert bad() == []


def test_tools_that_compile_kernels(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (host / "ninja").unlink()
    assert bad() == ["warn  ninja is not on PATH; pip install ninja"]
    (host / "gcc").unlink()
    (host / "include/Python.h").unlink()
    lines = bad()
    assert lines[0].startswith("fail  no C compiler: gcc or clang") and "set CC" in lines[0]
    assert lines[1].startswith(f"fail  {host}/include/Python.h is absent; ") and "python3-dev" in lines[1]
    program(host, "mycc", "")
    monkeypatch.setenv("CC", "mycc -m64")
    assert not any("compiler" in line for line in bad())


def test_ninja_lies_next_to_the_interpreter(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for engines: the environment need not be activated."""
    (host / "ninja").unlink()
    program(host / "env", "ninja", "")
    (host / "env" / "python").symlink_to(Path(sys.executable).resolve())
    monkeypatch.setattr(sys, "executable", str(host / "env" / "python"))
    assert bad() == []


def test_flashinfer_finds_the_engines_tools(host: Path) -> None:
    """The child has the PATH and the CUDA_HOME of an engine, and vLLM's own reason is told."""
    body = f"if os.environ.get('CUDA_HOME') == '{host}/cuda': return True\n    print('no nvcc', file=sys.stderr)"
    module(host, "vllm.utils.flashinfer", FLASHINFER.format(body))
    assert bad() == []
    [line] = bad(("vllm",))
    assert line.startswith("warn  vLLM turns FlashInfer off") and "no nvcc; " in line and "flashinfer-cubin" in line
    module(host, "vllm", "raise ImportError('libcudart.so.13')")
    [line] = bad()
    assert line.startswith("fail  vllm does not import: ImportError: libcudart.so.13; see docs/install.md")


def test_modules_are_imported_for_real(host: Path) -> None:
    """An installed module that does not import fails, one that is absent only where the run needs it."""
    for name in ("transformer_engine.pytorch", "cuda.core", "deep_ep"):
        module(host, name, "raise ImportError('undefined symbol')")
        [line] = bad(("vllm",))
        assert line.startswith(f"fail  {name} does not import: ImportError: undefined symbol; see docs/install.md")
        module(host, name)
    for name in ("deep_ep", "cuda"):
        module(host, name, ABSENT.format(name))
    assert bad(("vllm",)) == []
    [line] = bad()
    assert line.startswith("fail  deep_ep does not import: ") and "No module named" in line


def test_no_transformer_engine_is_warned_of(host: Path) -> None:
    module(host, "transformer_engine", ABSENT.format("transformer_engine"))
    [line] = bad()
    assert line.startswith("warn  transformer_engine is absent: ") and line.endswith("in docs/install.md")
    [line] = bad((*ALL, "transformer_engine.pytorch"))
    assert line.startswith("fail  transformer_engine.pytorch does not import")


def test_an_import_that_hangs_or_crashes(host: Path) -> None:
    module(host, "deep_ep", "import time; time.sleep(60)")
    module(host, "cuda.core", "import os; os.abort()")
    began = time.monotonic()
    lines = bad(seconds=10.0)
    assert time.monotonic() - began < 60
    assert "  cuda.core does" in lines[0] and ": exit code -6; " in lines[0]
    assert "  deep_ep does" in lines[1] and ": no answer within 10 s; " in lines[1]


def test_counted_errors_are_told(host: Path) -> None:
    nvidia_smi(host, ecc=4, replays=7)
    lines = bad()
    assert lines[0].startswith("warn  GPU 1: uncorrected ECC errors: 4; ") and "exclude" in lines[0]
    assert lines[1].startswith("warn  GPU 1: Replay Errors of NVLink Link 3: 7; ") and len(lines) == 2


def test_a_link_that_degrades_in_a_run_is_told(host: Path, rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The status compares the counters at the end of an attempt with those at its beginning."""
    monkeypatch.setattr(gpu_environment, "gpus_are_here", lambda: True)
    nvidia_smi(host, ecc=4, replays=7)
    with counting_errors(rundir, "node1"):
        nvidia_smi(host, ecc=4, replays=19)
    (line,) = notes_of(rundir.root, [])
    assert line.startswith("host node1, GPU 1: Replay Errors of NVLink Link 3 rose by 12: exclude")
    program(host, "nvidia-smi", "exit 9")  # the driver does not answer
    with counting_errors(rundir, "node3"):
        nvidia_smi(host, ecc=4, replays=19)
    assert notes_of(rundir.root, []) == [line], "what it had counted before is not this run's"
    monkeypatch.setattr(gpu_environment, "gpus_are_here", lambda: False)
    with counting_errors(rundir, "node2"):
        pass
    assert {file.name for file in (rundir.here / gpu_counters.FOLDER).iterdir()} == {"node1.json", "node3.json"}


@pytest.mark.parametrize("hidden", ["none", "option", "variable"])
def test_where_no_gpu_is_used(host: Path, monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    """One line says what was not looked at; what the run needs on CPUs too is imported, and nothing else."""
    if hidden == "none":
        monkeypatch.setattr(gpu_needs, "gpus_are_here", lambda: False)
    elif hidden == "variable":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    module(host, "torch", TORCH.format("raise RuntimeError('no')"))
    found = [*check_gpu_needs((), gpus=hidden != "option")]
    assert [one.level for one in found] == ["ok"] and "no GPU here" in found[0].what
    module(host, "vllm", "raise ImportError('x')")
    [line] = bad(("vllm",), gpus=hidden != "option")
    assert line.startswith("fail  vllm does not import: ImportError: x; ")


@pytest.mark.vllm
def test_vllm_says_why_flashinfer_is_off(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own function, with a FlashInfer that is installed and no nvcc."""
    monkeypatch.setenv("CUDA_HOME", str(host / "absent"))
    (host / "modules").rename(host / "unused")
    module(host, "flashinfer")
    monkeypatch.setattr(gpu_needs, "TRIED", ("vllm",))
    told = [line for line in bad(("vllm",)) if "FlashInfer" in line]
    assert told and told[0].startswith("warn  ") and "kernels are disabled" in told[0]


def test_what_a_recipe_needs(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"weight_block_size": [128, 128]}}))
    plain = Options(rollout_num_gpus=1)
    assert needs([plain]) == ["vllm"] and needs([Options()]) == needs([]) == []
    moe = Options(
        hf_checkpoint=str(tmp_path),
        rollout_num_gpus=1,
        megatron={"moe_enable_deepep": True, "moe_grouped_gemm": True, "fp8": "e4m3"},
        vllm={"all2all_backend": "deepep_low_latency"},
    )
    assert needs([plain, moe], "trainer") == ["deep_ep", "transformer_engine.pytorch"]
    assert needs([plain, moe], "engine") == ["deep_ep", "nvcc", "vllm"]
    assert needs([moe]) == ["deep_ep", "nvcc", "transformer_engine.pytorch", "vllm"]
