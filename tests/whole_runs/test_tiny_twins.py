"""The tiny twin of GLM4-9B's 4 + 4 under mpirun: TP 2 and CP 2 on one host, an engine of TP 2 on another; `tests/soak/test_tiny_twins.py` has all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.twins import Tiny, under_mpirun


@pytest.mark.cluster
def test_glm4_under_mpirun(cluster: Cluster, tmp_path: Path) -> None:
    under_mpirun(cluster, tmp_path, Tiny(tmp_path / "tiny"), "GLM4-9B, 4 + 4")
