"""Runs of this machine, in a directory that is a small file system of its own: it can be full or broken.

Invariant: what a run leaves is seen exactly: its temporary files and its shared memory lie in directories of this bed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from tests.support.faults.beds import Bed, Process
from tests.support.faults.disk import Disk
from tests.support.runs import REPO, processes, recipe

#: what libraries keep between runs on purpose
CACHES = ("torchinductor_", "hpcrl-cache", "cache")


class LocalBed(Bed):
    """`hpcrl run` and `hpcrl run --resume`."""

    def __init__(self, task: Path, shape: Mapping[str, Any]) -> None:
        self.task = task
        self.shape = shape
        self.process: subprocess.Popen[bytes] | None = None

    def begin(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "disk" / "run"
        for name in ("disk", "tmp", "shm"):
            (folder / name).mkdir(parents=True)
        self.disk = Disk(folder / "disk")
        file = recipe(folder, self.task, **(dict(self.shape) | {"run_dir": str(self.root)}))
        self._start(str(file))

    def go_on(self) -> None:
        self._start("--resume", str(self.root))

    def _start(self, *words: str) -> None:
        command = [sys.executable, "-m", "hpcrl", "run", *words]
        if self.disk.mounted:  # with its own /dev/shm
            script = f'mount --bind "{self.folder}/shm" /dev/shm && exec "$@"'
            command = ["unshare", "--mount", "bash", "-c", script, "run", *command]
        self.output = self.folder / "said"
        environment = os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "TMPDIR": str(self.folder / "tmp")}
        with self.output.open("wb") as out:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                start_new_session=True,
            )

    def processes(self) -> list[Process]:
        found = []
        for pid in processes(self.root):
            with contextlib.suppress(psutil.Error):
                found.append(Process("here", pid, psutil.Process(pid).cmdline()))
        return found

    def at_work(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def status(self) -> int | None:
        """The exit status of `hpcrl run`."""
        return None if self.process is None else self.process.poll()

    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def left(self) -> list[str]:
        found = [
            path
            for name in ("tmp", "shm")
            for path in (self.folder / name).iterdir()
            if not path.name.startswith(CACHES)
        ]
        return [str(path.relative_to(self.folder)) for path in found]

    def close(self) -> None:
        if self.process is not None:
            if self.process.poll() is None:
                self.process.kill()
            self.process.wait(10)
            for pid in processes(self.root):
                with contextlib.suppress(psutil.Error):
                    psutil.Process(pid).kill()
        self.disk.close()
