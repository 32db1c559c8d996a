"""The environment of processes that compute on GPUs: one table of what each role is given, and why.

    wishes = wanted("trainer", Where(options, interface="ib0", threads=8))
    environment = {**wishes, **os.environ}           # what the user has set wins
    for line in overruled(wishes, os.environ): ...   # and is said, with what hpcrl would have set and why

Invariants: every variable has its reason next to it; what the user has set stays; a compile cache holds code that will
be run, so it is in a directory that no other user can write to, or make first under its name.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hpcrl.config.options import Options
from hpcrl.config.recipe import Recipe
from hpcrl.errors import UsageError
from hpcrl.plan import Location, socket_names

Role = Literal["trainer", "engine"]


class Where(NamedTuple):
    """What decides a process's variables.

    Attributes:
        interface: of the plan's network, empty if not known.
        threads: CPU threads of one process, None: its library decides.
        cpu: it is an engine on CPUs.
    """

    options: Options
    interface: str = ""
    threads: int | None = None
    cpu: bool = False


@dataclass(frozen=True)
class Variable:
    """One variable.

    Attributes:
        value: None where it is left alone.
        also: other names under which a user may have set the same.
    """

    name: str
    roles: tuple[Role, ...]
    value: Callable[[Where], str | None]
    why: str
    also: tuple[str, ...] = ()


def _one_queue(w: Where) -> str | None:
    o = w.options
    return "1" if o.tensor_model_parallel_size > 1 or o.context_parallel_size > 1 else None


def _deterministic(value: str) -> Callable[[Where], str | None]:
    return lambda w: value if w.options.deterministic_mode else None


def _network(w: Where) -> dict[str, str]:
    return socket_names(Location("", (), "", w.interface))


#: torch rounds what it keeps for another use, and would give a block of pinned memory that it did not round to a larger
#: request (its pinned_max_round_threshold_mb): so larger blocks are not kept either
HOST = "pinned_max_cached_size_mb:64"
BOTH: tuple[Role, ...] = ("trainer", "engine")
TABLE: tuple[Variable, ...] = (
    # Not without tensor or context parallelism: expert parallelism and the reduction of gradients overlap GEMMs only
    # with several queues.
    Variable(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        ("trainer",),
        _one_queue,
        "one hardware queue starts the collectives of tensor and context parallelism before the GEMMs that hide them",
    ),
    # Blocks of fixed segments that fitted one micro-batch stay unused in the next; a trainer that shares its GPU gives
    # whole segments back (not with --nccl-ub, which registers memory where it is).  Not for engines: vLLM has its own
    # pools.
    Variable(
        "PYTORCH_ALLOC_CONF",
        ("trainer",),
        lambda w: HOST if w.options.megatron.get("nccl_ub") else f"expandable_segments:True,{HOST}",
        "segments that grow hold micro-batches of any length; large buffers in host memory are not rounded up",
        also=("PYTORCH_CUDA_ALLOC_CONF",),
    ),
    Variable(
        "NVTE_FP8_BLOCK_SCALING_FP32_SCALES",
        ("trainer",),
        lambda w: "1" if w.options.megatron.get("fp8_recipe") == "blockwise" else None,
        "--fp8-recipe blockwise: scales in fp32, as in FP8 checkpoints, not Transformer Engine's powers of two",
    ),
    # For both roles: they have a communicator in common, for the weights, and NCCL does not reconcile what its ranks
    # were told; they would wait for ever.
    Variable(
        "NCCL_ALGO",
        BOTH,
        _deterministic("Ring"),
        "--deterministic-mode: one algorithm, and so one order of summing, whatever the size",
    ),
    Variable(
        "CUBLAS_WORKSPACE_CONFIG", ("trainer",), _deterministic(":4096:8"), "--deterministic-mode: cuBLAS asks for it"
    ),
    Variable(
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
        ("trainer",),
        _deterministic("0"),
        "--deterministic-mode: Transformer Engine's attention",
    ),
    Variable(
        "TORCH_FORCE_WEIGHTS_ONLY_LOAD",
        ("trainer",),
        lambda w: "1",
        "torch.load reads plain values wherever it is called, also of Megatron's checkpoints and between ranks",
    ),
    Variable(
        "VLLM_BATCH_INVARIANT",
        ("engine",),
        _deterministic("1"),
        "--deterministic-mode: without it the bits of a sample depend on the other requests in vLLM's batch",
    ),
    Variable(
        "NCCL_SOCKET_IFNAME",
        BOTH,
        lambda w: _network(w).get("NCCL_SOCKET_IFNAME"),
        "NCCL's connections are made on the plan's network (--interface), not on whichever interface comes first",
    ),
    Variable(
        "GLOO_SOCKET_IFNAME",
        BOTH,
        lambda w: _network(w).get("GLOO_SOCKET_IFNAME"),
        "the same for gloo, which takes what the host's name leads to",
    ),
    Variable(
        "OMP_NUM_THREADS",
        BOTH,
        lambda w: None if w.threads is None else str(w.threads),
        "each process would take all cores of its host; it has one, or a share where Adam or the engine is on the CPU",
    ),
)


def wanted(role: Role, where: Where) -> dict[str, str]:
    """What hpcrl would set for a role."""
    skipped = {"NCCL_ALGO", "VLLM_BATCH_INVARIANT"} if where.cpu and role == "engine" else set()
    found = {v.name: v.value(where) for v in TABLE if role in v.roles and v.name not in skipped}
    return {name: value for name, value in found.items() if value is not None}


def missing(wishes: Mapping[str, str], base: Mapping[str, str]) -> dict[str, str]:
    """Those of the wishes that the environment `base` does not decide."""
    also = {v.name: v.also for v in TABLE}
    return {n: value for n, value in wishes.items() if not any(name in base for name in (n, *also.get(n, ())))}


def overruled(wishes: Mapping[str, str], base: Mapping[str, str]) -> Iterator[str]:
    """A line for each variable of the table that `base` has with another value: that one stays."""
    for variable in TABLE:
        if (wish := wishes.get(variable.name)) is None:
            continue
        for name in (variable.name, *variable.also):
            if base.get(name, wish) != wish:
                yield f"{name}={base[name]} is set and stays; hpcrl would set {variable.name}={wish}: {variable.why}"


CUDA = "/usr/local/cuda"  #: where torch and DeepGEMM look for nvcc in the end
NVCC = (12, 9)  #: the oldest with which vLLM's DeepGEMM compiles


def build_tools(base: Mapping[str, str], nvcc: bool = False) -> dict[str, str]:
    """What a process that compiles kernels as it runs finds its tools by: PATH with this interpreter's directory first,
    where ninja is though the environment is not activated, and CUDA_HOME where DeepGEMM needs `nvcc`.

    Raises:
        UsageError: if no nvcc is new enough.
    """
    found = {"PATH": os.pathsep.join((os.path.dirname(sys.executable), base.get("PATH", os.defpath)))}
    return found | ({"CUDA_HOME": _cuda_home({**base, **found})} if nvcc else {})


def _cuda_home(base: Mapping[str, str]) -> str:
    """The user's, or the first of nvcc on PATH, the usual place and what pip has installed."""
    on_path = shutil.which("nvcc", path=base["PATH"])
    places = [str(Path(on_path).resolve().parents[1])] if on_path else []
    places = [place for place in places if Path(place, "include/cuda.h").exists()]  # else it is a script's place
    places += [CUDA, *filter(os.path.isdir, (f"{part}/nvidia/cu13" for part in sys.path))]
    places = [base["CUDA_HOME"]] if base.get("CUDA_HOME") else places
    for place in places:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            said = subprocess.run([f"{place}/bin/nvcc", "--version"], capture_output=True, text=True, timeout=60).stdout
            version = re.search(r"release (\d+)\.(\d+)", said)
            if version and tuple(map(int, version.groups())) >= NVCC:
                return place
    raise UsageError(
        f"an engine with FP8 blocks compiles kernels with nvcc {NVCC[0]}.{NVCC[1]} or newer, and none is in "
        f"{', '.join(places)}",
        "load the site's CUDA module, set CUDA_HOME, or pip install nvidia-cuda-nvcc; before Hopper set "
        "VLLM_USE_DEEP_GEMM=0, with which none is needed",
    )


#: the variable that moves a cache of code -> its folder.  All have their usual place in the home directory, which on a
#: cluster is a shared file system that every process of the run would fill at once, or (torch) under a known name in
#: /tmp. HF_MODULES_CACHE has the code that a model brings along (trust_remote_code); models themselves stay where
#: HF_HOME says.
CACHES = {
    "HF_MODULES_CACHE": "hf-modules",
    "VLLM_CACHE_ROOT": "vllm",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}


def cache_directory(shape: str = "") -> Path | None:
    """The directory of compiled code of this node and user, or of a shape (hpcrl/run/compile_cache) below it; None if
    it could not be made ours alone."""
    root = Path(tempfile.gettempdir()) / f"hpcrl-cache-{os.getuid()}"
    if not private_directory(root):
        return None
    place = root / shape
    return place if not shape or private_directory(place) else None


def compile_caches(base: Mapping[str, str], spare: Path | None = None, root: Path | None = None) -> dict[str, str]:
    """CACHES that the environment `base` does not set, on this node, kept from run to run; with HF_HOME its own
    modules' as well.

    Args:
        spare: where they are instead if the directory for them is not ours alone; None: a new directory.
        root: where they are, None: in `cache_directory()`.
    """
    said = {*base} | ({"HF_MODULES_CACHE"} if "HF_HOME" in base else set())
    wanted = {name: folder for name, folder in CACHES.items() if name not in said}
    if not wanted:
        return {}
    root = root or cache_directory() or spare or Path(tempfile.mkdtemp(prefix="hpcrl-cache-"))
    return {name: str(root / folder) for name, folder in wanted.items()}


def private_directory(path: Path) -> bool:
    """Make a directory that only we can enter; whether `path` is one now, and no link."""
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


# ---- what this machine has

#: what a machine with GPUs has: NVIDIA's, AMD's, and NVIDIA's under Windows
GPUS = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg")
#: the variable that says with "1" that a run computes on CPUs, whatever GPUs its hosts have or a scheduler gives it:
#: Slurm sets CUDA_VISIBLE_DEVICES itself, in every step
ON_CPUS = "HPCRL_ON_CPUS"


def without_gpus() -> dict[str, str]:
    """What hides GPUs from a process, where the user says so."""
    return {"CUDA_VISIBLE_DEVICES": ""} if os.environ.get(ON_CPUS) == "1" else {}


def gpus_are_here() -> bool:
    """Whether this machine shows any that may be used."""
    return not without_gpus() and any(map(glob.glob, GPUS))


def for_this_machine(recipe: Recipe, overrides: dict[str, Any]) -> dict[str, Any]:
    """`overrides`, with one trainer rank, and for an evaluation one engine, where neither recipe nor flags say how many
    and this machine has no GPU.

    The default of ranks counts the GPUs of a node in a cluster; as many processes on a laptop's cores train no faster.
    """
    if gpus_are_here():
        return overrides
    said = recipe.options_set(overrides)
    chosen = {} if "actor_num_gpus_per_node" in said else {"actor_num_gpus_per_node": "trainer rank"}
    if recipe.values.get("num_rollout") == 0 and not said & {"rollout_num_gpus", "rollout_external_engine_addrs"}:
        chosen["rollout_num_gpus"] = "engine"
    if chosen:
        what = ", ".join(f"one {name} (--{option.replace('_', '-')} for more)" for option, name in chosen.items())
        print(f"hpcrl: no GPU here: {what}", file=sys.stderr)
    return {**overrides, **dict.fromkeys(chosen, 1)}
