"""The environment of processes that compute on GPUs, as far as trainer and engines must have it alike.

Invariants: what the user has set stays; a compile cache holds code that will be run, so it lies in a directory that nobody
else can write to, or make first under its name.
"""

from __future__ import annotations

import glob
import os
import stat
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcrl.config.options import Options
from hpcrl.config.recipe import Recipe

#: the variable that moves a compile cache -> its folder.  All have their usual place in the home directory, which on a cluster
#: is a shared file system that every process of the run would fill at once, or (torch) under a known name in /tmp.
CACHES = {
    "VLLM_CACHE_ROOT": "vllm",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}


def deterministic_nccl(options: Options) -> dict[str, str]:
    """NCCL's part of --deterministic-mode: one algorithm, and so one order of summing, whatever the size.

    For trainer and engines alike, whatever vLLM chooses for its own communicators: they have one in common, for the weights,
    and NCCL does not reconcile what its ranks were told; they would wait for each other for ever.
    """
    return {"NCCL_ALGO": "Ring"} if options.deterministic_mode else {}


def compile_caches(base: Mapping[str, str], spare: Path | None = None) -> dict[str, str]:
    """CACHES that the environment `base` does not set, on this node, kept from run to run.

    spare: where they lie instead if the directory for them is not ours alone; None: a new directory.
    """
    wanted = {name: folder for name, folder in CACHES.items() if name not in base}
    if not wanted:
        return {}
    root = Path(tempfile.gettempdir()) / f"hpcrl-cache-{os.getuid()}"
    if not private_directory(root):
        root = spare or Path(tempfile.mkdtemp(prefix="hpcrl-cache-"))
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


def gpus_are_here() -> bool:
    """Whether this machine shows any."""
    return any(map(glob.glob, GPUS))


def for_this_machine(recipe: Recipe, overrides: dict[str, Any]) -> dict[str, Any]:
    """`overrides`, with one trainer rank where neither recipe nor flags say how many and this machine has no GPU.

    The default counts the GPUs of a node in a cluster; as many processes on a laptop's cores train no faster.
    """
    name = "actor_num_gpus_per_node"
    said = {*recipe.values, *overrides, *(key for stage in recipe.stages for key in stage.values)}
    if name in said or gpus_are_here():
        return overrides
    print("hpcrl: no GPU here: one trainer rank (--actor-num-gpus-per-node for more)", file=sys.stderr)
    return {**overrides, name: 1}
