"""The files of the packages and directories that a run copies: what is in them, and what is left out.

Invariants: links are followed to files within the user's directory and to what is imported, and to nothing else; what
is imported is never left out; a package without limit is refused, not copied.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hpcrl.errors import HpcrlError
from hpcrl.launch.code.own_modules import OwnModules
from hpcrl.run.started_runs import COPY, RECIPE

LARGE = 1 << 24  #: bytes of a data file to which a link is made in place of a copy
MOST_FILES = 20_000  #: files that are copied at most, and
MOST_BYTES = 1 << 29  #: bytes
FEW = 1000  #: files, and
SMALL = 1 << 26  #: bytes, up to which a directory of data that a module names is copied
SKIPPED = ("__pycache__", "node_modules")  #: directories that hold nothing of the user's; nor do those with a dot


@dataclass
class FoundFiles:
    """What is to be copied.

    Attributes:
        run: the run directory, which is left out.
        sizes: place below RUN/code -> (file, bytes).
        outside: links that lead out of the user's directory, and are not followed.
        skipped: what is too large, cannot be recorded, or was gone when it was looked at.
        runs: directories of runs, which are left out.
    """

    own: OwnModules
    run: Path
    sizes: dict[str, tuple[Path, int]] = field(default_factory=dict)
    outside: list[Path] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    runs: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        linked = dict[str, Path]()
        for place, folder in self.own.packages.items():
            self._take_package(place, folder, linked)
        for place, folder in {**linked, **self.own.folders}.items():
            self._take_data(place, folder)
        for place, file in {**self.own.files, **self.own.visited}.items():
            self._take(place, file, needed=place in self.own.visited)

    def _take_package(self, place: str, folder: Path, linked: dict[str, Path]) -> None:
        """Take all files of a package; directories to which it has links are added to `linked`.

        Raises:
            HpcrlError: if they are too many.
        """
        count = total = 0
        for path in self._below(folder, folder.parents[place.count("/")], linked):
            size = self._take(f"{place}/{path.relative_to(folder)}", path)
            count, total = count + 1, total + (size if size <= LARGE else 0)
            if count > MOST_FILES or total > MOST_BYTES:
                raise HpcrlError(
                    f"{folder}: a package of more than {MOST_FILES:,} files or {MOST_BYTES >> 20} MiB is not copied",
                    "--live-code imports it from where it is; or move data out of it",
                )

    def _take_data(self, place: str, folder: Path) -> None:
        """Take all files of a directory of data, unless they are too many."""
        before, total = dict(self.sizes), 0
        for count, path in enumerate(self._below(folder, folder.parents[place.count("/")])):
            total += self._take(f"{place}/{path.relative_to(folder)}", path)
            if count >= FEW or total > SMALL:
                self.sizes = before
                self.skipped.append(f"{folder} has more than {FEW:,} files or {SMALL >> 20} MiB")
                return

    def _below(self, folder: Path, root: Path, linked: dict[str, Path] | None = None) -> Iterator[Path]:
        """The files below a directory; of links those that lead to files within `root`.

        Args:
            linked: gets the links to directories within `root`, which are not followed.
        """
        top = root.resolve()
        pending = [(folder, frozenset[Path]())]
        while pending:
            here, above = pending.pop()
            if (real := here.resolve()) in above:  # a link to a directory that it is in
                continue
            for path in self._entries(here):
                if os.path.isdir(path):
                    if self._is_source(path, root, linked):
                        pending.append((path, above | {real}))
                elif os.path.isfile(path) and path.suffix != ".pyc":
                    if not path.is_symlink() or path.resolve().is_relative_to(top):
                        yield path
                    elif path not in self.own.visited.values():
                        self.outside.append(path)

    def _entries(self, folder: Path) -> list[Path]:
        """What is in a directory, by name."""
        try:
            return sorted(folder.iterdir())
        except OSError as error:
            self.skipped.append(f"{folder} cannot be read ({error.strerror})")
            return []

    def _is_source(self, folder: Path, root: Path, linked: dict[str, Path] | None) -> bool:
        """Whether a directory in a package may hold what it imports or reads: no cache, environment or run."""
        if any(file.is_relative_to(folder) for file in self.own.visited.values()):
            return True
        real, hidden = folder.resolve(), folder.name in SKIPPED or folder.name.startswith(".")
        if hidden or os.path.exists(folder / "pyvenv.cfg") or real == self.run.resolve():
            return False
        if folder.is_symlink():
            within = real.is_relative_to(root.resolve()) and not folder.parent.resolve().is_relative_to(real)
            if linked is not None and within:
                linked[str(folder.relative_to(root))] = folder
            else:
                self.outside.append(folder)
            return False
        if os.path.exists(folder / RECIPE) and os.path.exists(folder / COPY):
            self.runs.append(folder)
            return False
        return True

    def _take(self, place: str, file: Path, needed: bool = False) -> int:
        """Take a file; its bytes, 0 if it is skipped.

        Raises:
            HpcrlError: for one that is needed and cannot be taken.
        """
        why = ""
        try:
            f"{place}{file}".encode()
            about = file.stat()
            if stat.S_ISREG(about.st_mode):
                self.sizes[place] = file, about.st_size
                return about.st_size
            why = "is no regular file"
        except UnicodeEncodeError:
            why = "has a name that is not UTF-8"
        except OSError as error:
            why = f"cannot be read ({error.strerror})"
        shown = os.fsencode(file).decode(errors="backslashreplace")
        if needed:
            raise HpcrlError(
                f"{shown} is imported and cannot be copied: it {why}", "with --live-code nothing is copied"
            )
        self.skipped.append(f"{shown} {why}")
        return 0
