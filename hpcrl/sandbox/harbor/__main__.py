"""Whether tasks can be learned from, before a run: `python -m hpcrl.sandbox.harbor DIR`.

Each task's verifier is run for an untouched environment, which must earn less than what solution/solve.sh leaves
behind, if there is one.

Invariant: the same box and the same verifier as in a run; every task is reported, also one that cannot be read; the
exit status is 0 only if all of them can be learned from.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from hpcrl.config.prompt_words import read_word
from hpcrl.errors import DataError, HpcrlError
from hpcrl.sandbox.harbor.rows import task_folders
from hpcrl.sandbox.harbor.task import read_images, read_task, solution
from hpcrl.sandbox.harbor.verdict import check_verifier
from hpcrl.sandbox.pool import default_pool

_AT_ONCE = 4  #: tasks whose verifiers run at a time
_SAID = 200  #: characters of what a verifier printed that are shown
GOOD, UNSOLVED, BAD = "ok", "?", "FAIL"  #: of a task; UNSOLVED: it has no solution that could show it


async def check(folder: Path, images: dict[str, str]) -> tuple[str, str]:
    """(whether a task can be learned from, a text of what was found)."""
    try:
        task = read_task(folder, images)
        untouched = (await check_verifier(task)).reward
        files = solution(task)
        if not files:
            return UNSOLVED, f"untouched {untouched:g}, no solution/solve.sh"
        solved = await check_verifier(task, files, "bash /solution/solve.sh")
    except HpcrlError as error:
        return BAD, str(error)
    said = f"untouched {untouched:g}, solved {solved.reward:g}"
    if solved.reward > untouched:
        return GOOD, said
    return BAD, f"{said}; the verifier's last words: {solved.said.strip()[-_SAID:] or 'none'}"


async def check_all(folders: list[Path], images: dict[str, str]) -> list[str]:
    """Print a line for each task; the state of each."""
    places = asyncio.Semaphore(_AT_ONCE)

    async def one(folder: Path) -> str:
        async with places:
            state, said = await check(folder, images)
        print(f"{state:4}  {folder.name}: {said}", flush=True)
        return state

    try:
        return await asyncio.gather(*map(one, folders))
    finally:
        await default_pool().close()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m hpcrl.sandbox.harbor",
        description="Run the verifiers of task folders in Harbor's form: untouched, and with solution/solve.sh. "
        "ok: the solution earns more; ?: no solution; FAIL: the solution earns no more, or the task cannot be run.",
    )
    parser.add_argument("folder", help="a folder of task folders, as --prompt-data has it: DIR, or DIR/@[:10]")
    try:
        given = read_word(parser.parse_args().folder, "DIR")
        folder = Path(given.path)
        if not folder.is_dir():
            raise DataError(f"{folder} is no directory", "name a folder of task folders")
        states = asyncio.run(check_all(task_folders(folder)[given.rows], read_images(folder)))
    except HpcrlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    unknown = f", {states.count(UNSOLVED)} have no solution that would show it" * (UNSOLVED in states)
    print(f"{states.count(GOOD)} of {len(states)} tasks can be learned from{unknown}")
    return 1 if BAD in states else 0


if __name__ == "__main__":
    sys.exit(main())
