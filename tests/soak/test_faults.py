"""Faults of every kind at drawn moments: no group lost or trained twice, no checkpoint damaged, nothing left behind,
and the same numbers.

SEED: which faults (1; `1,2,3` are several); N: how many a seed on this machine (30); with engines 15, under Slurm 30
and under each mpirun 10 in a hundred of that; KINDS: a regular expression for the names of those to strike with (all).
FAULTS_LOG: a file that gets a line of JSON for each fault; FAULTS_MINUTES: after which no further one is begun in a
test; FAULTS_UNTOUCHED: a directory that keeps the undisturbed runs for the next call, which must be of the same code.

    make soak SOAK="faults and slurm" N=100 SEED=7
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster
from tests.support.faults.attack_kinds import attack_kinds
from tests.support.faults.beds import Bed
from tests.support.faults.campaign import Campaign, open_log, table
from tests.support.faults.checks import Reference
from tests.support.faults.host_kinds import mpirun_kinds, slurm_kinds
from tests.support.faults.hosts import MpirunBed, SlurmBed
from tests.support.faults.kinds import HANG, Kind, engine_kinds, local_kinds
from tests.support.faults.local import LocalBed
from tests.support.runs import POLICY, SFT, Run, recipe

pytestmark = pytest.mark.soak

SEEDS = [int(seed) for seed in (os.environ.get("SEED") or "1").split(",")]
COUNT = int(os.environ.get("N") or 30)
SHAPE: dict[str, Any] = SFT | {
    "num_rollout": 40,
    "hang_timeout": HANG,
    "save_interval": 1,
}  # a stop saves after any step
#: the same numbers from two hosts
SPREAD: dict[str, Any] = SHAPE | {"actor_num_nodes": 2, "actor_num_gpus_per_node": 1}
ENGINES: dict[str, Any] = POLICY | {
    "num_rollout": 24,
    "save_interval": 1,  # as above
    "hang_timeout": HANG,
    "rollout_health_check_timeout": 8,
}
#: one rank, and two, which torchrun starts or hpcrl
SHAPES: dict[str, Mapping[str, Any]] = {
    "one": SHAPE,
    "two": SHAPE | {"actor_num_gpus_per_node": 2},
}


def untouched(name: str, folder: Path, task: Path, shape: Mapping[str, Any]) -> Reference:
    """What a run of that shape comes to if nobody disturbs it."""
    root = Path(os.environ.get("FAULTS_UNTOUCHED") or folder) / name / "run"
    if not (root / "summary.json").exists():
        root.parent.mkdir(parents=True)
        run = Run(recipe(root.parent, task, **(dict(shape) | {"run_dir": str(root)})), root=root)
        status, out = run.end(600)
        assert status == 0, out + run.logs()
    return Reference.of(root)


def strike(
    name: str,
    seed: int,
    bed: Bed,
    kinds: Sequence[Kind],
    reference: Reference,
    folder: Path,
    share: float,
    kept: bool = False,
) -> None:
    """A campaign of its share of the faults; everything of it must have been right."""
    seconds = 60 * float(os.environ.get("FAULTS_MINUTES") or 1e6)
    if not (chosen := [kind for kind in kinds if re.search(os.environ.get("KINDS") or "", kind.name)]):
        pytest.skip(f"no fault of {name} is called {os.environ['KINDS']}")
    with open_log(folder) as log:
        count = max(1, round(COUNT * share))
        records = Campaign(name, seed, bed, chosen, reference, folder / "runs", log, count, seconds, kept).run()
    print(table(records))
    assert not [record for record in records if record.wrong]


@pytest.mark.process
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_faults_on_this_machine(tmp_path: Path, task: Path, shape: str, seed: int) -> None:
    reference = untouched(shape, tmp_path, task, SHAPES[shape])
    strike(
        f"local {shape}",
        seed,
        LocalBed(task, SHAPES[shape]),
        local_kinds() + attack_kinds(),
        reference,
        tmp_path,
        1 / 3,
    )


@pytest.mark.vllm
@pytest.mark.parametrize("seed", SEEDS)
def test_faults_with_engines(tmp_path: Path, task: Path, seed: int) -> None:
    reference = untouched("engines", tmp_path, task, ENGINES)
    strike("engines", seed, LocalBed(task, ENGINES), engine_kinds() + attack_kinds(), reference, tmp_path, 0.15)


@pytest.mark.cluster
@pytest.mark.parametrize("seed", SEEDS)
def test_faults_under_slurm(cluster: Cluster, tmp_path: Path, task: Path, seed: int) -> None:
    reference = untouched("two", tmp_path, task, SHAPES["two"])  # hosts change no number
    strike("slurm", seed, SlurmBed(cluster, task, SPREAD), slurm_kinds() + attack_kinds(), reference, tmp_path, 0.3)


@pytest.mark.cluster
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["openmpi", "mpich"])
def test_faults_under_mpirun(cluster: Cluster, tmp_path: Path, task: Path, kind: str, seed: int) -> None:
    reference = untouched("two", tmp_path, task, SHAPES["two"])
    strike(
        kind, seed, MpirunBed(cluster, task, SPREAD, kind), mpirun_kinds() + attack_kinds(), reference, tmp_path, 0.1
    )
