"""The table of mutants and the planted faults: every edit still applies to its file and compiles, and its tests are
there; in a campaign, that these fail with each mutant."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import planted
from tools.mutants import CORE, REPO, BrokenTable, Mutant, Verdict, bad, main, private_copy, read_table, unedited

MOST_SURVIVORS = 5
PACKAGES = (
    "hpcrl/algorithms/",
    "hpcrl/trainer/step/",
    "hpcrl/trainer/megatron/",
    "hpcrl/rollout/batch_assembly.py",
    "hpcrl/transport/share_format.py",
    "hpcrl/rollout/ledger/",
    "hpcrl/weights/redistribution/",
    "hpcrl/models/",
    "hpcrl/rollout/prompts/",
    "hpcrl/rollout/rewards/",
    "hpcrl/rollout/answers/",
    "hpcrl/config/slime/",
    "hpcrl/config/rules/schedules.py",
    "hpcrl/microbatches.py",
)


@pytest.mark.lint
def test_every_mutant_applies_and_compiles() -> None:
    """The text that it replaces is there once, and what becomes of the file is Python."""
    _, mutants = read_table()
    for mutant in mutants:
        mutant.check()
    assert len(mutants) >= 150
    for package in PACKAGES:
        assert any(mutant.file.startswith(package) for mutant in mutants), package


@pytest.mark.lint
def test_the_tests_of_every_mutant_are_there() -> None:
    packages, mutants = read_table()
    for mutant in [*mutants, *unedited(packages, mutants)]:
        for path in mutant.tests:
            assert path.startswith("-") or (REPO / path.partition("::")[0]).exists(), (mutant.id, path)


@pytest.mark.lint
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
@pytest.mark.lint
def test_a_mutant_that_cannot_be_is_refused(old: str, new: str, said: str) -> None:
    with pytest.raises(BrokenTable, match=said):
        Mutant("m", "hpcrl/algorithms/kl/low_var_kl.py", old, new, ()).check()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[mutants]]\nid = "a"\nfile = "f"\nold = "o"\nnew = "n"\npackage = "absent"', "absent"),
        ('[[mutants]]\nid = "a"\nfile = "f"\nold = "o"\nnew = "n"\npackage = "r"\nodd = 1', "odd"),
        ("\n".join(['[[mutants]]\nid = "a"\nfile = "f"\nold = "o"\nnew = "n"\npackage = "r"'] * 2), "one id: a"),
    ],
)
@pytest.mark.lint
def test_a_table_that_cannot_be_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "mutants.toml"
    path.write_text(f'[packages]\nr = ["tests"]\n{text}\n')
    with pytest.raises(BrokenTable, match=said):
        read_table(path)


@pytest.mark.lint
def test_what_a_campaign_must_not_find() -> None:
    """A mutant that survives without a reason, and tests that fail without an edit."""
    edited = Mutant("m", "f", "old", "new", ())
    assert bad(Verdict(edited, False, "", 1.0)) and not bad(Verdict(edited, True, "a test", 1.0))
    explained = Mutant("m", "f", "old", "new", (), "equal in effect")
    assert not bad(Verdict(explained, False, "", 1.0)) and not bad(Verdict(explained, True, "a test", 1.0))
    plain = Mutant("unedited", "", "", "", ())
    assert bad(Verdict(plain, True, "a test", 1.0)) and not bad(Verdict(plain, False, "", 1.0))


@pytest.mark.lint
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


# ---- planted faults

#: what the issue of the suite asks to be noticed
FAULTS = {
    "ack-skipped",
    "evaluation-data-trained",
    "failed-grading-is-0",
    "last-of-a-group-lost",
    "loss-mask-lost",
    "q-and-k-swapped",
    "resume-one-step-late",
    "reward-of-the-neighbour",
    "sigterm-without-save",
    "stale-fp8-scale",
}


@pytest.mark.lint
def test_every_planted_fault_applies_and_compiles(tmp_path: Path) -> None:
    """Each changes files of the package, says what it does, and leaves the working tree alone."""
    faults = planted.choose(())
    assert {fault.id for fault in faults} == FAULTS
    for fault in faults:
        assert not fault.path.read_text().startswith(("diff", "---")), f"{fault.id} says nothing"
        before = {name: (REPO / name).read_bytes() for name in fault.files()}
        folder = tmp_path / fault.id
        folder.mkdir()
        root = private_copy(fault, folder)
        for name, text in before.items():
            patched = (root / name).read_bytes()
            assert patched != text == (REPO / name).read_bytes()
            compile(patched, name, "exec", dont_inherit=True)


@pytest.mark.lint
def test_nearest_tests_of_a_fault_come_first() -> None:
    """Those of the module or of its folder, then of its package, then whole runs; only core tests."""
    stages = {fault.id: list(fault.stages()) for fault in planted.choose(())}
    near = "tests/rollout/test_batch_assembly.py"
    whole = (*CORE, planted.WHOLE_RUNS)
    assert stages["last-of-a-group-lost"] == [(*CORE, near), (*CORE, "tests/rollout", f"--ignore={near}"), whole]
    shares = "tests/transport/test_share_format.py"
    assert stages["reward-of-the-neighbour"] == [
        (*CORE, shares),
        (*CORE, "tests/transport", f"--ignore={shares}"),
        whole,
    ]
    assert stages["resume-one-step-late"][0] == (*CORE, "tests/trainer/checkpoint")


@pytest.mark.lint
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nothing\n", "nothing"),
        ("--- a/tests/test_plan.py\n+++ b/tests/test_plan.py\n@@ -1 +1 @@\n-x\n+y\n", "test_plan.py"),
        ("--- a/hpcrl/plan.py\n+++ b/hpcrl/plan.py\n@@ -1 +1 @@\n-nowhere\n+y\n", "does not apply"),
    ],
)
def test_a_patch_that_cannot_be_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.patch").write_text(text)
    with pytest.raises(BrokenTable, match=said):
        private_copy(planted.PlantedFault(tmp_path / "a.patch"), tmp_path)


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
