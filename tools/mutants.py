"""Whether tests notice that the code is wrong: each mutant is one edit of one module, and its tests must fail with it.

    python -m tools.mutants                    # all of tests/mutants.toml
    python -m tools.mutants gspo share-        # those whose id contains one of these
    python -m tools.mutants --sound            # only whether every package's tests pass without an edit
    python -m tools.mutants --record           # also by which of a package's tests, into tests/baseline.toml

A mutant is an edit of a private copy of the package. Its tests run in a process that is forked from one which has
imported torch, Megatron-core and all else that is not hpcrl's; whatever they start finds the copy, too.

Invariants: no file of the working tree is written; an edit applies to exactly one place of its file, or is an error;
tests that hang end in time, and neither their processes nor their files stay.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from tools import baseline

REPO = Path(__file__).parent.parent
PACKAGE = "hpcrl"
TABLE = REPO / "tests" / "mutants.toml"
SECONDS = 300  #: that the tests of one mutant may take; one that makes them hang is noticed
TURN = 0.05  #: seconds between two looks at a child
CORE = ("-m", "core")  #: pytest's arguments: only what `make test` runs
PASSED, WRONG, EMPTY = "0", "4", "5"  #: pytest's exit statuses: all tests passed; it was called wrongly; found no test
#: what a child must not import again, as far as it is installed
FOREIGN = (
    "numpy",
    "torch",
    "torch.distributed.checkpoint",
    "torch.nn.functional",
    "torch.testing",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.distributed",
    "transformers",
    "tokenizers",
    "safetensors.torch",
    "hypothesis.strategies",
    "mpmath",
    "msgspec",
    "zmq",
    "aiohttp",
    "pyarrow.parquet",
    "jinja2",
    "pytest",
    "tracemalloc",  # pytest would import it while an object is destroyed, which fails where that import is under way
)
PR_SET_PDEATHSIG = 1


class BrokenTable(Exception):
    """The table says something that cannot be."""


class Edit(Protocol):
    """An edit of a copy of the package, and the tests that are to notice it.

    Attributes:
        tests: pytest's arguments.
    """

    @property
    def id(self) -> str: ...

    @property
    def tests(self) -> tuple[str, ...]: ...

    def apply(self, root: Path) -> None:
        """Make the edit in a copy of the repository."""


@dataclass(frozen=True)
class Mutant:
    """One edit.

    Attributes:
        file: relative to the repository.
        old, new: the text that is there once, and what takes its place; both empty: no edit.
        tests: pytest's arguments.
        survives: why no test can notice it, "" where one must.
    """

    id: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    survives: str = ""

    def text(self) -> str:
        """The edited source.

        Raises:
            BrokenTable: if the old text is not there exactly once, or the new one is the same.
        """
        source = (REPO / self.file).read_text(encoding="utf-8")
        if not self.old:
            return source
        if (found := source.count(self.old)) != 1:
            raise BrokenTable(f"mutant {self.id}: the old text is {found} times in {self.file}, not once: {self.old!r}")
        if self.old == self.new:
            raise BrokenTable(f"mutant {self.id} changes nothing")
        return source.replace(self.old, self.new)

    def apply(self, root: Path) -> None:
        """Make the edit in a copy of the repository."""
        if self.old:
            (root / self.file).write_text(self.text(), encoding="utf-8")

    def check(self) -> None:
        """Raise BrokenTable if it does not apply, or what comes of it is no Python."""
        try:
            compile(self.text(), self.file, "exec", dont_inherit=True)
        except SyntaxError as error:
            raise BrokenTable(f"mutant {self.id} does not compile: {error}") from error


@dataclass(frozen=True)
class Outcome:
    """What the tests of an edit came to.

    Attributes:
        noticed: a test failed, or did not end in time.
        by: the first test that failed.
        test: its node id, "" where the tests did not end in time or ended the process.
    """

    noticed: bool
    by: str
    seconds: float
    test: str = ""


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant; see `Outcome`."""

    mutant: Mutant
    noticed: bool
    by: str
    seconds: float


def read_table(path: Path = TABLE) -> tuple[dict[str, tuple[str, ...]], list[Mutant]]:
    """(package -> its tests, the mutants).

    Raises:
        BrokenTable: if an id is there twice, a package has no tests, or a field is unknown.
    """
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    packages = {name: tuple(tests) for name, tests in table["packages"].items()}
    mutants = []
    for row in table["mutants"]:
        try:
            tests = tuple(row.pop("tests", ())) or packages[row.pop("package")]
            row.pop("package", None)
            mutants.append(Mutant(**row, tests=tests))
        except (KeyError, TypeError) as error:
            raise BrokenTable(f"mutant {row.get('id')}: {error!r}") from error
    ids = [mutant.id for mutant in mutants]
    if twice := {name for name in ids if ids.count(name) > 1}:
        raise BrokenTable(f"two mutants have one id: {', '.join(sorted(twice))}")
    return packages, mutants


def private_copy(edit: Edit, folder: Path) -> Path:
    """A repository in `folder` with a copy of the package, edited, and with links to all else."""
    root = folder / "repo"
    root.mkdir()
    for entry in REPO.iterdir():
        if entry.name == PACKAGE:
            shutil.copytree(entry, root / PACKAGE)
        elif entry.name != ".git":
            (root / entry.name).symlink_to(entry)
    edit.apply(root)
    return root


def preload() -> None:
    """Import what every child would import."""
    if any(name == "hpcrl" or name.startswith("hpcrl.") for name in sys.modules):
        raise BrokenTable("hpcrl is imported already: a child would not find its copy")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in FOREIGN:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


def run(mutant: Mutant, seconds: float = SECONDS) -> Verdict:
    """Run its tests in a child until the first one fails; see `outcome`."""
    found = outcome(mutant, seconds)
    return Verdict(mutant, found.noticed, found.by, found.seconds)


def outcome(edit: Edit, seconds: float = SECONDS) -> Outcome:
    """Run the tests of an edit in a child until the first one fails.

    Raises:
        BrokenTable: if pytest could not run them at all. A package without core tests is no error.
    """
    folder = Path(tempfile.mkdtemp(prefix="mutant-"))
    begun = time.monotonic()
    try:
        root = private_copy(edit, folder)
        ended = _run_child(edit, root, folder, begun + seconds)
        said, status = (_read(folder / name) for name in ("said", "status"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    took = time.monotonic() - begun
    if not ended:
        return Outcome(True, f"no end within {seconds:.0f} s", took)
    if status == PASSED or (status == EMPTY and edit.tests[: len(CORE)] == CORE):
        return Outcome(False, "", took)
    if status in (WRONG, EMPTY):
        raise BrokenTable(f"mutant {edit.id}: pytest cannot run {' '.join(edit.tests)}: {said[-2000:]}")
    failed = next((line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))), "")
    by = failed.partition(" - ")[0]
    return Outcome(True, by or f"the process ended: {said[-300:]!r}", took, by.partition(" ")[2])


def _run_child(edit: Edit, root: Path, folder: Path, end: float) -> bool:
    """Whether the tests ended by themselves; nothing that they started is left."""
    parent = os.getpid()
    child = os.fork()
    if not child:
        try:
            _in_child(edit, root, folder, parent)
        finally:
            os._exit(0)
    try:
        return _wait(child, end)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)  # what its tests have left running


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _wait(child: int, end: float) -> bool:
    """Whether the child ended by itself; else it was killed."""
    while time.monotonic() < end:
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        time.sleep(TURN)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def _in_child(edit: Edit, root: Path, folder: Path, parent: int) -> None:
    """Run the tests, and leave pytest's exit status in the folder."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    out = os.open(folder / "said", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ |= {"HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "hypothesis"), "OMP_NUM_THREADS": "1"}
    os.environ["PYTHONPATH"] = str(root)
    os.chdir(root)
    sys.path[:] = [str(root), *(path for path in sys.path if Path(path or ".").resolve() != REPO)]
    import pytest
    import torch

    torch.set_num_threads(1)
    plain = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", f"--basetemp={folder / 'tests'}"]
    status = int(pytest.main([*plain, *edit.tests]))
    (folder / "status").write_text(str(status))  # else the edit has ended the process, which is no pass


def unedited(packages: dict[str, tuple[str, ...]], mutants: Sequence[Mutant]) -> list[Mutant]:
    """One run without an edit of each set of tests that the mutants have."""
    names = {tests: name for name, tests in packages.items()}
    sets = dict.fromkeys(mutant.tests for mutant in mutants)
    return [Mutant(f"unedited-{names.get(tests, ' '.join(tests))}", "", "", "", tests) for tests in sets]


def choose(names: Sequence[str]) -> list[Mutant]:
    """The mutants of the table with one of these in their ids; () for all.

    Raises:
        BrokenTable: if there is none of a name.
    """
    _, mutants = read_table()
    if missed := [name for name in names if not any(name in mutant.id for mutant in mutants)]:
        raise BrokenTable(f"no mutant has {' or '.join(missed)} in its id")
    return [mutant for mutant in mutants if not names or any(name in mutant.id for name in names)]


def campaign(names: Sequence[str] = (), sound: bool = False) -> Iterator[Verdict]:
    """The verdicts of the table, those without an edit first.

    Args:
        names: parts of ids; () for all.
        sound: only those without an edit.
    """
    packages, chosen = read_table()[0], choose(names)
    for mutant in chosen:
        mutant.check()
    preload()
    for mutant in unedited(packages, chosen):
        yield run(mutant)
    for mutant in [] if sound else chosen:
        yield run(mutant)


def bad(verdict: Verdict) -> bool:
    """Whether it is not what the table says: tests that fail without an edit, a mutant that they do not notice."""
    if not verdict.mutant.old:
        return verdict.noticed
    return not verdict.noticed and not verdict.mutant.survives


def line_of(verdict: Verdict) -> str:
    """A row of the printed table."""
    if not verdict.mutant.old:
        said = "FAILS" if verdict.noticed else "passes"
    else:
        said = "killed" if verdict.noticed else "explained" if verdict.mutant.survives else "SURVIVES"
    return f"{verdict.mutant.id:34} {said:9} {verdict.seconds:5.1f} s  {verdict.by or verdict.mutant.survives}"


def record(names: Sequence[str]) -> int:
    """Write into tests/baseline.toml which mutants are killed by the core tests of their package, and which by its
    others alone; 1 if one is killed by none, or tests fail without an edit.  What core tests kill, all of them do."""
    packages, chosen = read_table()[0], choose(names)
    preload()
    failing = [plain.id for plain in unedited(packages, chosen) if run(plain).noticed]
    tables = {name: set(ids) for name, ids in baseline.read().get("mutants", {}).items()}
    for mutant in chosen:
        mutant.check()
        by_core = run(replace(mutant, tests=(*CORE, *mutant.tests)))
        kind = "core" if by_core.noticed else "others" if run(mutant).noticed else "none"
        print(f"{mutant.id:34} {kind:6} {by_core.by}", flush=True)
        for ids in tables.values():
            ids.discard(mutant.id)
        tables.setdefault(kind, set()).add(mutant.id)
    there = {mutant.id for mutant in choose(())}
    baseline.write("mutants", {kind: sorted(tables.get(kind, set()) & there) for kind in ("core", "others", "none")})
    for name in failing:
        print(f"{name:34} FAILS")
    return int(bool(failing) or any(not mutant.survives for mutant in chosen if mutant.id in tables.get("none", ())))


def main(arguments: Sequence[str]) -> int:
    """Print the table; 1 if it holds something bad.  With --list only which mutants would run."""
    names = [name for name in arguments if name not in ("--sound", "--list", "--record")]
    if "--record" in arguments:
        return record(names)
    if "--list" in arguments:
        print(*(f"{mutant.id:34} {mutant.file}" for mutant in choose(names)), sep="\n")
        return 0
    found = 0
    for verdict in campaign(names, "--sound" in arguments):
        print(line_of(verdict), flush=True)
        found += bad(verdict)
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
