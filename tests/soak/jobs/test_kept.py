"""Faults of every kind inside a job that keeps its hosts: the next attempt begins there, in the same job, with the same
numbers; no group is lost or trained twice, and nothing is left behind.

SEED, N, KINDS and FAULTS_LOG as in test_faults.py: N faults a seed on this machine, as many under Slurm, a third with
an engine, a third under each mpirun.

    make soak SOAK=kept N=60 SEED=1
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.soak.test_faults import ENGINES, SEEDS, SHAPES, SPREAD, strike, untouched
from tests.support.cluster import Cluster
from tests.support.faults.host_kinds import mpirun_kinds, slurm_kinds
from tests.support.faults.hosts import MpirunBed, SlurmBed
from tests.support.faults.kinds import Kind, engine_kinds, local_kinds
from tests.support.faults.local import LocalBed

pytestmark = pytest.mark.soak
#: more attempts than faults; a checkpoint after every step, so that each brings the run on
MANY: dict[str, Any] = {"attempts": 1000}
#: whose end is the job's: the launcher, and who was asked to end it; a host that is gone
JOBS = ("launcher", "hpcrl stop", "hpcrl launch", "SIGTERM", "SIGINT", "SIGUSR1", "disk", "power", "for ever", "srun")
MORE = ("SIGSTOP of a trainer rank for ever", "SIGSTOP of the rollout process for ever")


def inside(kinds: Sequence[Kind]) -> list[Kind]:
    """Those that a job is to get over on its own hosts."""
    found = [k for k in kinds if k.name in MORE or not any(word in k.name for word in JOBS)]
    return [k for k in found if not k.name.startswith(("scontrol", "scancel", "link", "slurmd"))]


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


@pytest.mark.cluster
@pytest.mark.parametrize("seed", SEEDS)
def test_job_is_kept_under_slurm(cluster: Cluster, tmp_path: Path, task: Path, seed: int) -> None:
    reference = untouched("two", tmp_path, task, SHAPES["two"])
    bed = SlurmBed(cluster, task, {**SPREAD, **MANY})
    strike("kept slurm", seed, bed, inside(slurm_kinds()), reference, tmp_path, 1, kept=True)


@pytest.mark.cluster
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["openmpi", "mpich"])
def test_job_is_kept_under_mpirun(cluster: Cluster, tmp_path: Path, task: Path, kind: str, seed: int) -> None:
    reference = untouched("two", tmp_path, task, SHAPES["two"])
    bed = MpirunBed(cluster, task, {**SPREAD, **MANY}, kind)
    strike(f"kept {kind}", seed, bed, inside(mpirun_kinds()), reference, tmp_path, 0.33, kept=True)
