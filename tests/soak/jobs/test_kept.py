"""Faults of every kind inside a job that keeps its hosts: the next attempt begins there, in the same job, with the same
numbers; no group is lost or trained twice, and nothing is left behind.

SEED, N, KINDS and FAULTS_LOG as in test_faults.py: N faults a seed on this machine, as many under Slurm, a third with
an engine, with one that shares its trainers' slots, under each mpirun and in a homogeneous job, a sixth with an engine
over two hosts.

    make soak SOAK=kept N=60 SEED=1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.soak.test_faults import ENGINES, SEEDS, SHAPES, SPREAD, strike, untouched
from tests.support.cluster import Cluster
from tests.support.faults.checks import Reference
from tests.support.faults.host_kinds import mpirun_kinds, part_kinds, slurm_kinds
from tests.support.faults.hosts import MpirunBed, SlurmBed
from tests.support.faults.kinds import Kind, engine_kinds, local_kinds, of_engines, out_of_memory
from tests.support.faults.local import LocalBed
from tests.support.runs import recipe
from tests.support.slurm import submit

pytestmark = pytest.mark.soak
#: more attempts than faults; a checkpoint after every 20 steps, and a copy in memory after each, so that it repeats one
#: at most
MANY: dict[str, Any] = {"attempts": 1000, "save_interval": 20, "non_persistent_save_interval": 1}
#: whose end is the job's: the launcher, and who was asked to end it; a host that is gone
JOBS = (
    "launcher",
    "hpcrl stop",
    "hpcrl launch",
    "SIGTERM",
    "SIGINT",
    "SIGUSR1",
    "disk",
    "power",
    "for ever",
    "srun",
    "rank 0",
)
MORE = (
    "SIGSTOP of a trainer rank for ever",
    "SIGSTOP of the rollout process for ever",
    "SIGSTOP for ever of the engine's server",
    "SIGSTOP for ever of the engine's core",
    "full disk for a minute",
    "link cut for 3 s",
)
#: the engine on the slots of the trainers, whose end is the attempt's
COLOCATED = {name: value for name, value in ENGINES.items() if name != "attempts"} | {
    "colocate": True,
    "actor_num_gpus_per_node": 2,
}
#: one over two hosts, of which each part is lost with the other
PARTS = COLOCATED | {
    "colocate": False,
    "actor_num_gpus_per_node": 1,
    "rollout_num_gpus": 2,
    "rollout_num_gpus_per_engine": 2,
    "engine_start_timeout": 600,
}
#: one sample at a time: after an out-of-memory error only recomputation is left, which changes no number
ALONE: dict[str, Any] = {"use_dynamic_batch_size": False, "max_tokens_per_gpu": None, "micro_batch_size": 1}
OVER_HOSTS = ("engine.gpus_per_node=1",)


def inside(kinds: Sequence[Kind]) -> list[Kind]:
    """Those that a job is to get over on its own hosts."""
    found = [k for k in kinds if not any(word in k.name for word in (*JOBS, "scontrol", "scancel", "link", "slurmd"))]
    return found + [k for k in kinds if k.name in MORE]


@pytest.mark.process
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape", ["two", "torchrun"])
def test_job_is_kept_on_this_machine(tmp_path: Path, task: Path, shape: str, seed: int) -> None:
    reference = untouched(shape, tmp_path, task, SHAPES[shape])
    bed = LocalBed(task, {**SHAPES[shape], **MANY})
    strike(f"kept {shape}", seed, bed, inside(local_kinds()), reference, tmp_path, 0.5, kept=True)


@pytest.mark.vllm
@pytest.mark.parametrize("seed", SEEDS)
def test_job_is_kept_with_engines(tmp_path: Path, task: Path, seed: int) -> None:
    reference = untouched("engines", tmp_path, task, ENGINES)
    bed = LocalBed(task, {**ENGINES, **MANY})
    strike("kept engines", seed, bed, inside(engine_kinds()), reference, tmp_path, 0.33, kept=True)


@pytest.mark.vllm
@pytest.mark.parametrize("seed", SEEDS)
def test_job_is_kept_with_colocated_engines(tmp_path: Path, task: Path, seed: int) -> None:
    reference = untouched("colocated", tmp_path, task, COLOCATED)
    bed = LocalBed(task, {**COLOCATED, **MANY})
    kinds = of_engines(ends=True) + [replace(kind, engines_live=False) for kind in inside(local_kinds())]
    strike("kept colocated", seed, bed, kinds, reference, tmp_path, 0.33, kept=True)


@pytest.mark.cluster
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("layout", ["heterogeneous", "homogeneous"])
def test_job_is_kept_under_slurm(cluster: Cluster, tmp_path: Path, task: Path, layout: str, seed: int) -> None:
    reference = untouched("alone", tmp_path, task, SHAPES["two"] | ALONE)
    hook = {"custom_megatron_before_train_step_hook_path": "tests.support.out_of_memory.until_it_recomputes"}
    bed = SlurmBed(cluster, task, {**SPREAD, **MANY, **ALONE, **hook}, "--layout", layout)
    share = 1 if layout == "heterogeneous" else 0.33
    kinds = [*inside(slurm_kinds()), Kind("out of memory", out_of_memory, weight=3, early=False)]
    strike(f"kept {layout}", seed, bed, kinds, reference, tmp_path, share, kept=True)


@pytest.mark.vllm
@pytest.mark.cluster
@pytest.mark.parametrize("seed", SEEDS)
def test_job_is_kept_with_an_engine_over_hosts(cluster: Cluster, tmp_path: Path, task: Path, seed: int) -> None:
    job = submit(cluster, recipe(tmp_path, task, **PARTS), tmp_path / "untouched", settings=OVER_HOSTS)
    job.ends(seconds=1200)
    bed = SlurmBed(cluster, task, {**PARTS, **MANY}, settings=OVER_HOSTS)
    strike("kept parts", seed, bed, part_kinds(), Reference.of(job.root), tmp_path, 0.16, kept=True)


@pytest.mark.cluster
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["openmpi", "mpich"])
def test_job_is_kept_under_mpirun(cluster: Cluster, tmp_path: Path, task: Path, kind: str, seed: int) -> None:
    reference = untouched("two", tmp_path, task, SHAPES["two"])
    bed = MpirunBed(cluster, task, {**SPREAD, **MANY}, kind)
    strike(f"kept {kind}", seed, bed, inside(mpirun_kinds()), reference, tmp_path, 0.33, kept=True)
