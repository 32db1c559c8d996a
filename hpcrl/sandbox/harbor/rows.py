"""A folder of task folders as a prompt file: one row a task, in the order of their names.

Invariant: every task is read, and refused if it cannot be run, when the rows are opened; a row that is drawn later is
of the same task, or the folder is refused as changed.  Held is a path and a digest a task, and no file's content.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any

from hpcrl.errors import DataError
from hpcrl.sandbox.harbor.task import CONFIG, HarborTask, is_task, read_images, read_task

KEY = "harbor"  #: of a prompt's metadata: {"task": its folder, "digest": of it}
PROMPT, METADATA = "prompt", "metadata"  #: keys of a row


def task_folders(path: Path) -> list[Path]:
    """The task folders in a folder, in the order of their names.

    Raises:
        DataError: if there is none.
    """
    folders = sorted(child for child in path.absolute().iterdir() if is_task(child))
    if not folders:
        hint = "give the folder above it" if is_task(path) else f"each of its folders is to hold a {CONFIG}"
        raise DataError(f"{path} holds no tasks", hint)
    return folders


class TaskRows:
    """The tasks of a folder, or a slice of them.

    Attributes:
        size: bytes of the instructions.
        sha256: of all tasks' digests.
        longest: of the slice, the most that a task's commands and its verifier may take together, and its folder; a
            task without a limit for its commands counts by its verifier alone.
    """

    def __init__(self, path: Path, rows: slice = slice(None)) -> None:
        """Read every task once.

        Raises:
            DataError: for the first that cannot be run here, or if there is none.
        """
        self.path = path
        folders = task_folders(path)
        images = read_images(path)
        self.size, found = 0, []
        seconds: dict[Path, float] = {}
        for folder in folders:
            task = read_task(folder, images)
            self.size += len(task.instruction.encode())
            found.append((folder, task.digest))
            seconds[folder] = (task.config.agent.timeout_sec or 0.0) + task.config.verifier.timeout_sec
        named = "".join(f"{folder.name} {digest}\n" for folder, digest in found)
        self.sha256 = hashlib.sha256(named.encode()).hexdigest()
        self._tasks = found[rows]
        self.longest = max(((seconds[folder], folder) for folder, _ in self._tasks), default=(0.0, path))

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int) -> dict[str, Any]:
        folder, digest = self._tasks[index]
        task = task_of({KEY: {"task": str(folder), "digest": digest}})
        return {PROMPT: task.instruction, METADATA: {KEY: {"task": str(folder), "digest": digest}}}

    def where(self, index: int) -> str:
        return str(self._tasks[index][0])


def task_of(metadata: dict[str, Any]) -> HarborTask:
    """The task that a prompt is of.

    Raises:
        DataError: if it is of none, or its files have changed since the run has read them.
    """
    asked = metadata.get(KEY)
    if not isinstance(asked, dict) or not isinstance(asked.get("task"), str):
        raise DataError(
            f"the prompt's metadata has no {KEY!r}",
            "give a folder of task folders: --prompt-data DIR, --eval-prompt-data",
        )
    return _read(asked["task"], asked.get("digest"))


@lru_cache(maxsize=8)  # the responses to one prompt come together
def _read(folder: str, digest: str | None) -> HarborTask:
    place = Path(folder)
    task = read_task(place, read_images(place.parent))
    if digest is not None and task.digest != digest:
        raise DataError(f"{place} has changed since the run read it", "put the old files back, and resume the run")
    return task
