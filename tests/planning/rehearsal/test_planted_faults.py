"""Three faults that only a rehearsal finds; the whole table is in tests/soak/rehearsal/test_planted_faults.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.planted_faults import BY_REHEARSAL, only_in_rehearsal

pytestmark = pytest.mark.process


@pytest.mark.parametrize("case", ["without loss", "capacity with sinkhorn", "recomputed: attic"])
def test_only_a_rehearsal_finds_it(tmp_path: Path, case: str) -> None:
    """`hpcrl plan` finds nothing wrong, `hpcrl rehearse` names what is."""
    assert BY_REHEARSAL[case].said in only_in_rehearsal(BY_REHEARSAL[case], tmp_path)
