"""What the layers share: one tiny task for all real runs of a session."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and prompt files (tests/runs.py)."""
    from tests.runs import make_task

    return make_task(tmp_path_factory.mktemp("task"))
