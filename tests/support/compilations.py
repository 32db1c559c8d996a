"""A C++ compiler that counts how often it has compiled something."""

from __future__ import annotations

import shutil
from pathlib import Path


class Compiler:
    """The machine's own, by a script that notes what it is asked for.

    Attributes:
        environment: of processes that are to use it.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self._asked = directory / "asked"
        script = directory / "g++"
        script.write_text(f'#!/bin/sh\necho "$@" >> {self._asked}\nexec {shutil.which("g++")} "$@"\n')
        script.chmod(0o755)
        self.environment = {"CXX": str(script)}

    def taken(self) -> int:
        """How many files it was to compile, C++ or headers, since the last call; not what it is asked of itself."""
        lines = self._asked.read_text().splitlines() if self._asked.exists() else []
        self._asked.unlink(missing_ok=True)
        return sum(any(word.endswith((".cpp", ".h", ".hpp")) for word in line.split()) for line in lines)
