"""Whether tasks can be learned from, before a run: `python -m hpcrl.harbor DIR`.

Each task's verifier is run for an untouched environment, which must earn less than what solution/solve.sh leaves
behind, if there is one.

Invariant: the same boxes and the same verifier as in a run; nothing of the task folders is written to.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from hpcrl.errors import DataError, HpcrlError
from hpcrl.harbor.images import read_images
from hpcrl.harbor.rows import TaskRows
from hpcrl.harbor.task import HarborTask, read_task, solution
from hpcrl.harbor.verdict import check_verifier
from hpcrl.sandbox.pool import default_pool

_AT_ONCE = 4  #: tasks whose verifiers run at a time


async def check(task: HarborTask) -> tuple[bool, str]:
    """(whether it can be learned from, what was found, in words).

    Raises:
        SandboxLost, Unconfined: as `sandbox`.
    """
    try:
        untouched = (await check_verifier(task)).reward
        files = solution(task)
        if not files:
            return True, f"untouched {untouched:g}, no solution/solve.sh"
        solved = await check_verifier(task, files, "bash /solution/solve.sh")
    except HpcrlError as error:
        return False, str(error)
    said = f"untouched {untouched:g}, solved {solved.reward:g}"
    return (True, said) if solved.reward > untouched else (False, f"{said}: {solved.said.strip()[-200:]}")


async def check_all(tasks: list[HarborTask]) -> int:
    """Print a line for each task; how many cannot be learned from."""
    places = asyncio.Semaphore(_AT_ONCE)

    async def one(task: HarborTask) -> bool:
        async with places:
            good, said = await check(task)
        print(f"{'ok  ' if good else 'FAIL'}  {task.name}: {said}", flush=True)
        return good

    try:
        return sum(not good for good in await asyncio.gather(*map(one, tasks)))
    finally:
        await default_pool().close()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m hpcrl.harbor",
        description="Run the verifiers of task folders in Harbor's form: untouched, and with solution/solve.sh.",
    )
    parser.add_argument("folder", type=Path, help="a folder of task folders, as --prompt-data has it")
    parser.add_argument("--most", type=int, default=0, help="tasks that are run, the first ones; all without it")
    given = parser.parse_args()
    try:
        if not given.folder.is_dir():
            raise DataError(f"{given.folder} is no directory", "name a folder of task folders")
        rows = TaskRows(given.folder, slice(given.most or None))
        images = read_images(given.folder)
        failed = asyncio.run(check_all([read_task(Path(rows.where(i)), images) for i in range(len(rows))]))
    except HpcrlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{len(rows) - failed} of {len(rows)} tasks can be learned from")
    return 1 if failed else 0
