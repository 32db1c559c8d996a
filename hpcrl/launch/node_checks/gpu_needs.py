"""What a run on GPUs needs of a host besides GPUs, tried as the run will use it; every finding has its fix.

Invariants: what may hang, crash or take GPU memory is done in a process with a deadline; where no GPU may be used only
the modules that are needed are imported.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hpcrl.config.megatron_flags import settings_with_parts
from hpcrl.config.options import Options
from hpcrl.engine.server_settings import fp8_blocks
from hpcrl.errors import DataError, UsageError
from hpcrl.models.files.config_json import read_config
from hpcrl.plan import NO_GPUS
from hpcrl.run.gpu_counters import read_counters
from hpcrl.run.gpu_environment import build_tools, gpus_are_here
from hpcrl.run.process import run_command
from hpcrl.utils.check_results import Finding

SECONDS = 300.0  #: for an import from a slow file system
ENGINE = "transformer_engine.pytorch"
MODULES = {"Transformer Engine": ENGINE, "DeepEP": "deep_ep"}  #: of the parts that settings name
#: what is imported wherever it is installed; cuda.core is two packages' that may overwrite each other's files
TRIED = ("vllm", *MODULES.values(), "cuda.core")
_IMPORT = "import importlib, sys; importlib.import_module(sys.argv[1])"
_CUDA = """import torch
torch.cuda.init()  # raises with the reason for which is_available() is False
print("CUDA on", int(sum(torch.ones(1, device=i).item() for i in range(torch.cuda.device_count()))), "GPUs")"""
_FLASHINFER = """import sys
from vllm.utils.flashinfer import has_flashinfer
print("flashinfer-python is not installed")  # vLLM itself says what else is missing
sys.exit(not has_flashinfer())"""
INSTALL = "see docs/install.md, and the site's modules"


def needs(stages: Sequence[Options], role: str = "") -> list[str]:
    """The modules that a run imports on a role's hosts ("": on those of trainer and engines), and "nvcc"."""
    found: set[str] = set()
    for options in stages:
        if role in ("", "trainer"):
            found |= {MODULES[part] for _, _, part in settings_with_parts(options.megatron) if part in MODULES}
        if role in ("", "engine") and options.rollout_num_gpus:
            found |= {"vllm", *(["deep_ep"] if "deepep" in str(options.vllm.get("all2all_backend")) else [])}
            with contextlib.suppress(DataError):  # another check reports it
                found |= {"nvcc"} if fp8_blocks(read_config(options.hf_checkpoint or "")) else set()
    return sorted(found)


def check_gpu_needs(needed: Collection[str], gpus: bool = True, seconds: float = SECONDS) -> Iterator[Finding]:
    """Findings about this host.

    Args:
        needed: as `needs` has it.
        gpus: whether the run uses GPUs that are here.
    """
    here = gpus and gpus_are_here() and os.environ.get("CUDA_VISIBLE_DEVICES", "0") not in NO_GPUS
    env = {**os.environ, **build_tools(os.environ), "VLLM_CONFIGURE_LOGGING": "0"}
    fine: list[str] = []
    if here:
        nvcc = "nvcc" in needed and env.get("VLLM_USE_DEEP_GEMM") != "0"
        try:
            home = build_tools(os.environ, nvcc=True)["CUDA_HOME"]
            env |= {"CUDA_HOME": home} if nvcc else {}
            fine.append(f"{home}/bin/nvcc ({run_command([f'{home}/bin/nvcc', '--version'], seconds).last_output})")
        except UsageError as error:
            fine.append("no nvcc for FP8 blocks")
            if nvcc:
                yield Finding("fail", "", error.what, error.hint)
        yield from _tools(env)
        yield from _counters(fine)
    programs = {"CUDA": _CUDA, "FlashInfer": _FLASHINFER}
    names = sorted({*needed, *((*TRIED, *programs) if here else ())} - {"nvcc"})
    ask = lambda name: run_command([sys.executable, "-c", programs.get(name, _IMPORT), name], seconds, env=env)  # noqa: E731
    with ThreadPoolExecutor(len(TRIED) + len(programs)) as pool:
        answers = dict(zip(names, pool.map(ask, names), strict=True))
    for name, answer in answers.items():
        why, top = answer.last_output, name.partition(".")[0]
        absent = why.endswith((f"No module named '{top}'", f"No module named '{name}'"))
        if answer.code == 0:
            fine.append(answer.out.strip() if name == "CUDA" else name)
        elif name == "CUDA":
            hint = "see nvidia-smi, and its driver's version in docs/install.md; HPCRL_ON_CPUS=1 runs on the CPU"
            yield Finding("fail", "", f"torch cannot use the GPUs: {why}", hint)
        elif name == "FlashInfer":
            if answers["vllm"].code == 0:
                hint = "pip install flashinfer-cubin of its version, or put ninja and nvcc on PATH"
                yield Finding("warn", "", f"vLLM turns FlashInfer off, and is slower: {why}", hint)
        elif name in needed or not absent:
            yield Finding("fail", "", f"{name} does not import: {why}", INSTALL)
        elif name == ENGINE:
            what = f"{top} is absent: the trainer's layers are Megatron's own, which are slower"
            yield Finding("warn", "", what, "see Transformer Engine in docs/install.md")
    unseen = "no GPU here: CUDA, compilers and FlashInfer were not looked at"
    yield Finding("ok", "", f"these work: {', '.join(fine)}" if here else unseen)


def _tools(env: dict[str, str]) -> Iterator[Finding]:
    """What compiles kernels as a run starts: Triton's and FlashInfer's, and those of nvcc."""
    names = [env["CC"].split()[0]] if env.get("CC") else ["gcc", "clang"]
    if not any(shutil.which(name, path=env["PATH"]) for name in names):
        hint = "load or install gcc, or set CC: Triton compiles with it"
        yield Finding("fail", "", f"no C compiler: {' or '.join(names)} is not on PATH", hint)
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        yield Finding("fail", "", f"{header} is absent", "install this Python's headers (python3-dev, python3-devel)")
    if not shutil.which("ninja", path=env["PATH"]):
        yield Finding("warn", "", "ninja is not on PATH", "pip install ninja")


def _counters(fine: list[str]) -> Iterator[Finding]:
    """The driver's version into `fine`, and errors that GPUs and their links have counted since it was loaded."""
    drivers = run_command(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], 20.0).out.split()
    fine += [f"driver {driver}" for driver in dict.fromkeys(drivers)]
    for name, count in read_counters().items():
        if count:
            hint = "leave the node out (exclude of the site), and ask the site to look at it"
            yield Finding("warn", "", f"{name}: {count}", hint)
