"""Tiny twins of the reference runs, all of them, under Slurm and under mpirun."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.twins import TWINS, Tiny, under_mpirun, under_slurm

pytestmark = [pytest.mark.soak, pytest.mark.cluster]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("guide", TWINS)
def test_a_twin_trains_to_its_end_under_slurm(cluster: Cluster, tmp_path: Path, tiny: Tiny, guide: str) -> None:
    under_slurm(cluster, tmp_path, tiny, guide)


@pytest.mark.parametrize("guide", TWINS)
def test_a_twin_trains_to_its_end_under_mpirun(cluster: Cluster, tmp_path: Path, tiny: Tiny, guide: str) -> None:
    under_mpirun(cluster, tmp_path, tiny, guide)
