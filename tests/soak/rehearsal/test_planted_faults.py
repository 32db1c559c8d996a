"""Planted faults of layout, flags, engines, memory and order are found before anything is submitted, by `hpcrl plan`
where it can see them, and else by `hpcrl rehearse`.

    make soak SOAK=planted_faults       # a quarter of an hour of an idle machine

`make test-all` has three of them (tests/planning/rehearsal/test_planted_faults.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.cli.main import main
from tests.support.planted_faults import BY_PLAN, BY_REHEARSAL, only_in_rehearsal, words

pytestmark = pytest.mark.soak


@pytest.mark.parametrize("case", BY_PLAN)
def test_plan_finds_it(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    fault = BY_PLAN[case]
    assert main(["plan", *words(fault, tmp_path)]) != 0
    assert fault.said in capsys.readouterr().err


@pytest.mark.parametrize("case", BY_REHEARSAL)
def test_only_the_rehearsal_finds_it(tmp_path: Path, case: str) -> None:
    """`hpcrl plan` finds nothing wrong, `hpcrl rehearse` names what is."""
    told = only_in_rehearsal(BY_REHEARSAL[case], tmp_path)
    print(told)
    assert BY_REHEARSAL[case].said in told


def test_as_many_as_are_claimed() -> None:
    """30 in all, of which a dozen and more need the rehearsal."""
    assert len(BY_PLAN) + len(BY_REHEARSAL) >= 30
    assert len(BY_REHEARSAL) >= 12
