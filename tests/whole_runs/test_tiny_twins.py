"""The most telling tiny twin of the reference runs; `tests/soak/test_tiny_twins.py` has all of them.

GLM-4.5-355B's under Slurm: TP 2, PP 2 and EP 2 of a mixture of experts over four nodes, which trainer and an engine over
two of them take turns on.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.twins import Tiny, under_slurm

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("tiny"))


def test_glm4_5_under_slurm(cluster: Cluster, tmp_path: Path, tiny: Tiny) -> None:
    under_slurm(cluster, tmp_path, tiny, "GLM-4.5-355B, BF16 rollouts")
