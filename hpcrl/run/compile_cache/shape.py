"""The shape of a role: all that decides which compiled code it can use, as a name for its archive.

What compilers' own caches look up is inside an archive: each of them names its files by a digest of source, flags and
versions, so that an archive for too many would cost time to unpack and never be wrong.  What they do not look at has to
be in the shape: for what processor `-march=native` was (code of another one dies of an illegal instruction), the C
library, the driver, which compilers the node has, and where this directory and the Python environment are, since
vLLM's and inductor's files name others by their full path. The rest keeps archives apart that have little in common:
role, versions, model, layout.

Not in it: settings of engines and trainer that change from run to run (memory, batch, learning rate): they would cost
every hit, and what they do change in the code is told apart by the caches.
Invariants: no torch is imported, no GPU is opened; the same facts give the same name in every process on every node.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcrl.config.options import Options
from hpcrl.groups import planned
from hpcrl.plan import Plan
from hpcrl.run.gpu_environment import CUDA, Role
from hpcrl.utils.installed import version
from hpcrl.utils.untrusted_files import MOST, parse_json, read_given_bytes, read_system

PACKAGES = (
    "torch",
    "triton",
    "vllm",
    "megatron-core",
    "transformer-engine",
    "flashinfer-python",
    "flash-attn",
    "deep-gemm",
    "deep-ep",
    "transformers",
)
#: of a model's config.json: what says nothing of the model
INCIDENTAL = {"_name_or_path", "transformers_version"}
#: lines of /proc/cpuinfo, of x86 and of ARM: what `-march=native` depends on
CPU = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "Features")
#: where NVIDIA's and AMD's drivers say what they drive
NVIDIA = Path("/proc/driver/nvidia")
#: variables that choose a compiler, or what it makes
CHOICES = ("CXX", "CC", "CUDA_HOME", "CUDA_PATH", "TORCH_CUDA_ARCH_LIST")
AMD = Path("/sys/class/kfd/kfd/topology/nodes")


def shape_of(facts: Mapping[str, Any]) -> str:
    """The name of a shape."""
    told = json.dumps(facts, sort_keys=True, separators=(",", ":"), default=str)
    return f"{facts['role']}-{hashlib.sha256(told.encode()).hexdigest()[:24]}"


def role_facts(role: Role, options: Options, part: Sequence[int]) -> dict[str, Any]:
    """What of a run decides what a role compiles.

    Args:
        part: which part of the role a node has: of an engine over several its number, of the trainer its pipeline
            stages, which are other layers each.

    Raises:
        OSError, Damaged: if the model's config.json cannot be read.
    """
    path = options.hf_checkpoint
    config = parse_json(read_given_bytes(Path(path, "config.json"), MOST)) if path else {}
    config = {name: value for name, value in config.items() if name not in INCIDENTAL}
    sizes: tuple[Any, ...] = (options.engine_tensor_parallel_size, options.rollout_num_gpus_per_engine)
    if role == "trainer":
        sizes = (
            options.tensor_model_parallel_size,
            options.pipeline_model_parallel_size,
            options.context_parallel_size,
            options.expert_model_parallel_size,
            options.expert_tensor_parallel_size,
        )
    return {"role": role, "part": list(part), "config": config, "sizes": sizes, "bf16": options.bf16}


def machine_facts(directory: Path, base: Mapping[str, str]) -> dict[str, Any]:
    """What of a node, and of what is installed there, decides whether compiled code can be used there.

    Args:
        directory: where the compiled code is.
        base: the role's environment.
    """
    return {
        "machine": platform.machine(),
        "cpu": _lines(Path("/proc/cpuinfo"), CPU),
        "libc": platform.libc_ver(),
        "gpus": gpu_kinds(),
        "python": sys.version,
        "prefix": sys.prefix,
        "packages": {name: found for name in PACKAGES if (found := version(name))},
        "directory": str(directory),
        "chosen": {name: base[name] for name in CHOICES if name in base},
        "compilers": compilers(base),
    }


def compilers(base: Mapping[str, str]) -> list[str]:
    """The compilers that a role with this environment would call: place, size and time of each, links followed.

    None is started to ask for its version.
    """
    homes = [base[name] for name in ("CUDA_HOME", "CUDA_PATH") if base.get(name)]
    words = [*(base.get("CXX") or "g++").split(), *(base.get("CC") or "gcc").split(), "nvcc"]
    words += [f"{home}/bin/nvcc" for home in (*homes, CUDA)]
    found = set()
    for word in words:
        with contextlib.suppress(OSError):
            if place := shutil.which(word, path=base.get("PATH")):
                path = Path(place).resolve()
                seen = path.stat()
                found.add(f"{path} {seen.st_size} {int(seen.st_mtime)}")
    return sorted(found)


def gpu_kinds(nvidia: Path = NVIDIA, amd: Path = AMD) -> list[str]:
    """The kinds of GPUs of this node, and the driver, as its files say."""
    found = {line for path in nvidia.glob("gpus/*/information") for line in _lines(path, ("Model",))}
    found |= {line for path in amd.glob("*/properties") for line in _lines(path, ("gfx_target_version",))}
    with contextlib.suppress(OSError, IndexError):
        found |= {read_system(nvidia / "version").splitlines()[0]}
    return sorted(found - {"gfx_target_version 0"})


def pipeline_stages(options: Options, plan: Plan, host: str) -> tuple[int, ...]:
    """Which pipeline stages the trainer ranks of a host hold."""
    stages = {rank: stage for group in planned(options)["pp"] for stage, rank in enumerate(group)}
    return tuple(sorted({stages[rank] for rank in plan.ranks_on(host)}))


def _lines(path: Path, names: Sequence[str]) -> list[str]:
    """The first line that begins with each of these names."""
    try:
        lines = read_system(path).splitlines()
    except OSError:
        return []
    found = {}
    for line in lines:
        name = line.split(":")[0].strip() if ":" in line else line.split(" ")[0]
        if name in names:
            found.setdefault(name, " ".join(line.split()))
    return sorted(found.values())
