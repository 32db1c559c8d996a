"""Whether tasks can be learned from, before a run: `python -m hpcrl.sandbox.harbor DIR`.

Each task's verifier is run for an untouched environment, which must earn less than what solution/solve.sh leaves
behind, if there is one.

Invariant: the same boxes and the same verifier as in a run; nothing of the task folders is written to.  Every task is
reported, also one that cannot be read.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from enum import Enum
from pathlib import Path

from hpcrl.config.prompt_words import read_word
from hpcrl.errors import DataError, HpcrlError, UsageError
from hpcrl.sandbox.harbor.images import read_images
from hpcrl.sandbox.harbor.rows import task_folders
from hpcrl.sandbox.harbor.task import HarborTask, read_task, solution
from hpcrl.sandbox.harbor.verdict import check_verifier
from hpcrl.sandbox.pool import default_pool

_AT_ONCE = 4  #: tasks whose verifiers run at a time
_SAID = 200  #: characters of what a verifier printed that are shown


class TaskState(Enum):
    """What is known of a task: its line begins with it."""

    GOOD = "ok"
    UNSOLVED = "?"  #: it has no solution that could show it
    BAD = "FAIL"


async def check(task: HarborTask) -> tuple[TaskState, str]:
    """(whether it can be learned from, what was found, in words).

    Raises:
        SandboxLost, Unconfined: as `sandbox`.
    """
    try:
        untouched = (await check_verifier(task)).reward
        files = solution(task)
        if not files:
            return TaskState.UNSOLVED, f"untouched {untouched:g}, no solution/solve.sh"
        solved = await check_verifier(task, files, "bash /solution/solve.sh")
    except HpcrlError as error:
        return TaskState.BAD, str(error)
    said = f"untouched {untouched:g}, solved {solved.reward:g}"
    if solved.reward > untouched:
        return TaskState.GOOD, said
    return TaskState.BAD, f"{said}; the verifier's last words: {solved.said.strip()[-_SAID:] or 'none'}"


async def check_all(folders: Sequence[Path], images: dict[str, str]) -> Counter[TaskState]:
    """Print a line for each task; how many are in which state."""
    places = asyncio.Semaphore(_AT_ONCE)

    async def one(folder: Path) -> TaskState:
        async with places:
            try:
                task = read_task(folder, images)
                state, said = await check(task)
            except (DataError, UsageError) as error:
                state, said = TaskState.BAD, str(error)
        print(f"{state.value:4}  {folder.name}: {said}", flush=True)
        return state

    try:
        return Counter(await asyncio.gather(*map(one, folders)))
    finally:
        await default_pool().close()


def _chosen(word: str) -> tuple[Path, list[Path]]:
    """(the folder, the tasks in it that are looked at).

    Raises:
        UsageError, DataError: for a slice that is none, and where there are no tasks.
    """
    given = read_word(word, "DIR")
    folder = Path(given.path)
    if not folder.is_dir():
        raise DataError(f"{folder} is no directory", "name a folder of task folders")
    return folder, task_folders(folder)[given.rows]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m hpcrl.sandbox.harbor",
        description="Run the verifiers of task folders in Harbor's form: untouched, and with solution/solve.sh. "
        "ok: the solution earns more; ?: there is none; FAIL: it does not, or the task cannot be run.",
    )
    parser.add_argument("folder", help="a folder of task folders, as --prompt-data has it: DIR, or DIR/@[:10]")
    given = parser.parse_args()
    try:
        folder, tasks = _chosen(given.folder)
        states = asyncio.run(check_all(tasks, read_images(folder)))
    except HpcrlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    unknown = f", {states[TaskState.UNSOLVED]} have no solution that would show it" * (TaskState.UNSOLVED in states)
    print(f"{states[TaskState.GOOD]} of {len(tasks)} tasks can be learned from{unknown}")
    return 1 if states[TaskState.BAD] else 0
