"""The campaigns that pages and docstrings name: each `SOAK=...` selects tests.

They run for hours and are in no other layer, so that a name that selects nothing, or a campaign that cannot even be
imported, would be found by its first user.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.documents.texts import REPO, printed

pytestmark = pytest.mark.lint
SOAK = re.compile(r"make\s+soak\s+(?:[A-Z]+=\S+\s+)*SOAK=(?:\"([^\"]+)\"|(\w+))|`SOAK=(\w+)`")

#: what a `make test` around this one hands to its commands
OF_MAKE = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "PYTHON", "SOAK", "SEED", "N")


def named() -> dict[str, str]:
    """What SOAK is anywhere -> a place where."""
    files = [*(REPO / "docs").glob("*.md"), *REPO.glob("*.md"), REPO / "Makefile", *(REPO / "tests").rglob("*.py")]
    found: dict[str, str] = {}
    for file in sorted(files):
        if file != Path(__file__):
            text = re.sub(r"\n#?\s*", " ", file.read_text())
            found |= {next(filter(None, names.groups())): str(file) for names in SOAK.finditer(text)}
    return found


@cache
def collected() -> list[str]:
    """The tests that `make soak` runs, with their marks' names behind them."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "soak", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:]
    marks = {path: " ".join(re.findall(r"pytest\.mark\.(\w+)", (REPO / path).read_text()))
             for path in {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}}  # fmt: skip
    return [f"{line} {marks[line.partition('::')[0]]}" for line in done.stdout.splitlines() if "::" in line]


@pytest.mark.process
def test_every_name_selects_tests() -> None:
    """By pytest's own -k: parts of names, with `and` between them."""
    names = named()
    assert len(names) > 10 and {"kept", "spares", "mutants", "planted_faults"} <= names.keys()
    for name, place in names.items():
        words = name.lower().split(" and ")
        assert any(all(word in line.lower() for word in words) for line in collected()), f"{place}: SOAK={name}"


def test_make_hands_them_on() -> None:
    """`make soak`, as each page prints it, runs pytest with the name as -k, and with SEED and N."""
    lines = [command for command in printed() if command.words[:2] == ["make", "soak"]]
    assert len(lines) >= 4
    bare = {name: value for name, value in os.environ.items() if name not in OF_MAKE}
    for line in lines:
        shown = subprocess.run(
            ["make", "-n", "-o", ".venv/.installed", *line.words[1:]],
            cwd=REPO, env=bare | {"HPCRL_VENV": ".venv"}, capture_output=True, text=True, check=True, timeout=240,
        )  # fmt: skip
        run = shlex.split(shown.stdout.splitlines()[-1])
        given = dict(word.partition("=")[::2] for word in line.words[2:])
        assert run[run.index("-m", run.index("pytest")) + 1] == "soak", run
        assert run[run.index("-k") + 1] == given["SOAK"], run
        assert f"SEED={given.get('SEED', '')}" in run and f"N={given.get('N', '')}" in run, run
