"""What the layers share: one tiny task for all real runs of a session."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.batch import queue  # noqa: F401
from tests.support.cluster import cluster, cluster_left_clean  # noqa: F401


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and prompt files (tests/support/runs.py)."""
    from tests.support.runs import make_task

    return make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="session", autouse=True)
def registry_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What the tests start is not remembered among the user's runs."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
