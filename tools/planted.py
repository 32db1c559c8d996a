"""Whether core tests notice faults that would be silent: each patch of tests/planted/ is applied to a copy of the
package, and a core test must fail with it.

    python -m tools.planted            # all
    python -m tools.planted fp8 ack    # those whose name contains one of these

The core tests run in this order until the first failure: of the file or folder that mirrors the patched one, of its
whole package, of whole runs. The test that failed is then run alone: with the patch it must fail, without it pass.

Invariant: as of tools/mutants.py, which makes the copies and runs the tests.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.mutants import CORE, PACKAGE, REPO, BrokenTable, Mutant, Outcome, outcome, preload

PATCHES = REPO / "tests" / "planted"
WHOLE_RUNS = "tests/whole_runs"
SECONDS = 900  #: that the core tests of one stage may take
TOUCHED = re.compile(r"^(?:---|\+\+\+) (?:[ab]/)?(\S+)", re.MULTILINE)


@dataclass(frozen=True)
class PlantedFault:
    """A patch, and the tests of one stage.

    Attributes:
        tests: pytest's arguments.
    """

    path: Path
    tests: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        return self.path.stem

    def apply(self, root: Path) -> None:
        """Patch a copy of the repository.

        Raises:
            BrokenTable: if it touches what is not the package, or does not apply.
        """
        self.files()
        words = ["git", "apply", "--whitespace=nowarn", str(self.path)]
        above = os.environ | {"GIT_CEILING_DIRECTORIES": str(root.parent)}  # a repository around it is not meant
        done = subprocess.run(words, cwd=root, env=above, capture_output=True, text=True, check=False, timeout=60)
        if done.returncode:
            raise BrokenTable(f"{self.path.name} does not apply: {done.stderr}")

    def files(self) -> list[str]:
        """The files that it changes.

        Raises:
            BrokenTable: if one is not of the package.
        """
        found = sorted(set(TOUCHED.findall(self.path.read_text(encoding="utf-8"))))
        if not found or not all(name.startswith(f"{PACKAGE}/") and (REPO / name).exists() for name in found):
            raise BrokenTable(f"{self.path.name} changes {found or 'nothing'}, not files of {PACKAGE}/")
        return found

    def stages(self) -> Iterator[tuple[str, ...]]:
        """Pytest's arguments of each stage, those nearest to the patch first."""
        places = [_mirror(Path(name).relative_to(PACKAGE)) for name in self.files()]
        near = sorted({str(place) for place in places})
        yield *CORE, *near
        wide = sorted({"/".join(place.parts[:2]) for place in places} - set(near))
        if wide:
            yield *CORE, *wide, *(f"--ignore={place}" for place in near)
        yield *CORE, WHOLE_RUNS


def _mirror(module: Path) -> Path:
    """Where a module's tests are: the file of its name, or the nearest folder of tests/ that mirrors its own."""
    folder = Path("tests") / module.parent
    file = folder / f"test_{module.name}"
    if (REPO / file).is_file():
        return file
    while not (REPO / folder).is_dir():
        folder = folder.parent
    return folder


def choose(names: Sequence[str]) -> list[PlantedFault]:
    """The patches with one of these in their names; () for all.

    Raises:
        BrokenTable: if there is none of a name.
    """
    every = [PlantedFault(path) for path in sorted(PATCHES.glob("*.patch"))]
    if missed := [name for name in names if not any(name in fault.id for fault in every)]:
        raise BrokenTable(f"no patch has {' or '.join(missed)} in its name")
    return [fault for fault in every if not names or any(name in fault.id for name in names)]


def caught(fault: PlantedFault) -> Outcome:
    """The first failure of a core test; not noticed if there is none, or what failed fails without the patch, too."""
    seconds = 0.0
    together: list[str] = []  # tests that fail only after others, in whose process the fault has left something
    for tests in fault.stages():
        while True:
            found = outcome(PlantedFault(fault.path, (*tests, *(f"--deselect={test}" for test in together))), SECONDS)
            seconds += found.seconds
            if not found.noticed:
                break
            if not found.test:
                return Outcome(False, found.by, seconds)
            if outcome(Mutant(f"{fault.id} unpatched", "", "", "", (found.test,)), SECONDS).noticed:
                return Outcome(False, f"{found.test} fails without the patch, too", seconds)
            if outcome(PlantedFault(fault.path, (found.test,)), SECONDS).noticed:
                return Outcome(True, found.test, seconds, found.test)
            together.append(found.test)
    return Outcome(False, f"no core test fails alone; not alone: {together}", seconds)


def main(names: Sequence[str]) -> int:
    """Print a line for each; 1 if one is not caught."""
    missed = 0
    chosen = choose(names)
    preload()
    for fault in chosen:
        found = caught(fault)
        missed += not found.noticed
        print(f"{fault.id:26} {'caught' if found.noticed else 'MISSED'} {found.seconds:6.1f} s  {found.by}", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
