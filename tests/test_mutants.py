"""The table of mutants: every edit still applies to its file and compiles, and its tests are there; in a campaign, that
these fail with each."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.mutants import REPO, BrokenTable, Mutant, Verdict, bad, main, read_table, unedited

MOST_SURVIVORS = 5
ROOMS = (
    "hpcrl/algorithms/",
    "hpcrl/trainer/step/",
    "hpcrl/trainer/megatron/",
    "hpcrl/rollout/batch_assembly.py",
    "hpcrl/queue/share_format.py",
    "hpcrl/rollout/ledger/",
    "hpcrl/redistribution/",
    "hpcrl/models/",
    "hpcrl/rollout/prompts/",
    "hpcrl/rollout/rewards/",
    "hpcrl/rollout/answers/",
    "hpcrl/slime/",
    "hpcrl/config/rules/schedules.py",
    "hpcrl/microbatches.py",
)


def test_every_mutant_applies_and_compiles() -> None:
    """The text that it replaces is there once, and what becomes of the file is Python."""
    _, mutants = read_table()
    for mutant in mutants:
        mutant.check()
    assert len(mutants) >= 150
    for room in ROOMS:
        assert any(mutant.file.startswith(room) for mutant in mutants), room


def test_the_tests_of_every_mutant_are_there() -> None:
    rooms, mutants = read_table()
    for mutant in [*mutants, *unedited(rooms, mutants)]:
        for path in mutant.tests:
            assert path.startswith("-") or (REPO / path.partition("::")[0]).exists(), (mutant.id, path)


def test_few_mutants_may_survive() -> None:
    """Five at most, and each says why."""
    _, mutants = read_table()
    explained = [mutant for mutant in mutants if mutant.survives]
    assert len(explained) <= MOST_SURVIVORS
    assert all(len(mutant.survives) >= 20 for mutant in explained)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("nowhere in it", "x", "0 times"),
        ("import", "x", "times in"),
        ("BOUND = 10.0", "BOUND = 10.0", "changes nothing"),
        ("BOUND = 10.0", "BOUND = = 10.0", "does not compile"),
    ],
)
def test_a_mutant_that_cannot_be_is_refused(old: str, new: str, said: str) -> None:
    with pytest.raises(BrokenTable, match=said):
        Mutant("m", "hpcrl/algorithms/kl/low_var_kl.py", old, new, ()).check()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[mutants]]\nid = "a"\nfile = "f"\nold = "o"\nnew = "n"\nroom = "absent"', "absent"),
        ('[[mutants]]\nid = "a"\nfile = "f"\nold = "o"\nnew = "n"\nroom = "r"\nodd = 1', "odd"),
        ("\n".join(['[[mutants]]\nid = "a"\nfile = "f"\nold = "o"\nnew = "n"\nroom = "r"'] * 2), "one id: a"),
    ],
)
def test_a_table_that_cannot_be_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "mutants.toml"
    path.write_text(f'[rooms]\nr = ["tests"]\n{text}\n')
    with pytest.raises(BrokenTable, match=said):
        read_table(path)


def test_what_a_campaign_must_not_find() -> None:
    """A mutant that survives without a reason, and tests that fail without an edit."""
    edited = Mutant("m", "f", "old", "new", ())
    assert bad(Verdict(edited, False, "", 1.0)) and not bad(Verdict(edited, True, "a test", 1.0))
    explained = Mutant("m", "f", "old", "new", (), "equal in effect")
    assert not bad(Verdict(explained, False, "", 1.0)) and not bad(Verdict(explained, True, "a test", 1.0))
    plain = Mutant("unedited", "", "", "", ())
    assert bad(Verdict(plain, True, "a test", 1.0)) and not bad(Verdict(plain, False, "", 1.0))


def test_printed_commands_choose_mutants(capsys: pytest.CaptureFixture[str]) -> None:
    """What CONTRIBUTING.md prints names mutants that there are; a name of none is an error, with nothing run."""
    printed = re.findall(r"`python -m tools\.mutants ([^`]*)`", (REPO / "CONTRIBUTING.md").read_text())
    words = [line.split() for line in printed if "ID" not in line.split()]
    assert words
    for names in words:
        assert main(["--list", *names]) == 0
        shown = capsys.readouterr().out.split("\n")[:-1]
        assert shown and all(any(name in row for row in shown) for name in names)
        with pytest.raises(BrokenTable, match="no mutant has nowhere"):
            main([*names, "nowhere"])


# ---- the campaign

SECONDS = 4 * 3600  #: a mutant takes 4 to 12 s of an idle core


@pytest.mark.soak
def test_mutants() -> None:
    """The tests of each fail with it, and pass without it; nothing survives but what the table explains."""
    done = subprocess.run(
        [sys.executable, "-m", "tools.mutants"],
        cwd=REPO,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    print(done.stdout)
    rows = done.stdout.splitlines()
    assert done.returncode == 0, [row for row in rows if " killed " not in row and " passes " not in row]
