"""The box of a task: the policy works in it, and once it has ended, its verdict is made there.

Processes that the policy has left are killed, then the tests are copied in and run.  What it has left is what they see:
programs and settings that it has replaced too, so it can deceive them (docs/security.md).

Invariant: a reward is what tests/test.sh wrote; or 0 where it wrote nothing for what the policy has left, and has then
written one for a box that the policy never saw.  All else is an error: a lost sandbox, a verifier that cannot run.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcrl.errors import HpcrlError
from hpcrl.sandbox import Box, BoxResult, sandbox
from hpcrl.sandbox.harbor.task import BoxFile, HarborTask
from hpcrl.utils.untrusted_files import Damaged, parse_json

LOGS = "/logs/verifier"
_LONGEST = 1 << 20  #: bytes of a reward file
_SAID = 2000  #: characters of what the verifier printed that are kept


@dataclass(frozen=True)
class TaskVerdict:
    """What a verifier said.

    Attributes:
        reward: "reward" of reward.json, or its only number; the number of reward.txt.
        parts: the other numbers of reward.json; "no_verdict": 1.0 where the policy's work kept it from a verdict.
        said: the end of what it printed.
    """

    reward: float
    parts: dict[str, float] = field(default_factory=dict)
    said: str = ""


@contextlib.asynccontextmanager
async def task_box(task: HarborTask) -> AsyncIterator[Box]:
    """A box with the task's environment, and nothing of its tests.

    Raises:
        HpcrlError: if the environment cannot be put into a box of its image.
        SandboxLost, Unconfined: as `sandbox`.
    """
    async with sandbox(task.image, task.config.limits) as box:
        await _furnish(box, task)
        yield box


async def run_in(box: Box, task: HarborTask, command: str, seconds: float) -> BoxResult:
    """A command of the policy's, in the working directory and with the environment's variables."""
    return await box.run(command, seconds, env=task.config.environment.env, cwd=task.workdir)


async def verdict(task: HarborTask, box: Box) -> TaskVerdict:
    """The verdict of what the policy has left in its box, which is of no use to it afterwards.

    Raises:
        HpcrlError: if the verifier writes none for an untouched box either.
        SandboxLost: if the box is lost, which says nothing of the policy's work.
    """
    found, said = await _judged(task, box)
    if found:
        return found
    await box.reset()  # and no second box: all that a pool may have could be policies'
    await _furnish(box, task)
    await _of_untouched(task, box)
    return TaskVerdict(0.0, {"no_verdict": 1.0}, said)


async def check_verifier(task: HarborTask, more: Sequence[BoxFile] = (), command: str = "true") -> TaskVerdict:
    """The verdict of a box in which no policy was.

    Args:
        more: files that are put into it, and
        command: what is run there before.

    Raises:
        HpcrlError: if there is none.
    """
    async with task_box(task) as box:
        await _put(box, more)
        await run_in(box, task, command, task.config.verifier.timeout_sec)
        return await _of_untouched(task, box)


async def _furnish(box: Box, task: HarborTask) -> None:
    """Put the environment into a new box."""
    made = await box.run(["mkdir", "-p", task.workdir, "/logs/agent", "/logs/artifacts", LOGS], cwd="/")
    try:
        if not made.ok:
            raise OSError(made.stderr.strip())
        await _put(box, task.files)
    except OSError as error:
        more = "" if box.layered else "this kernel cannot lay files over an image (Linux 5.11 can)"
        raise HpcrlError(
            f"{task.folder}: the environment cannot be put into a box of the image {task.image}: {error}", more
        ) from error


async def _of_untouched(task: HarborTask, box: Box) -> TaskVerdict:
    found, said = await _judged(task, box)
    if found is None:
        raise HpcrlError(
            f"{task.folder / 'tests' / 'test.sh'} gives no verdict for an unchanged environment: {said}",
            f"it has to write {LOGS}/reward.txt or reward.json within [verifier] timeout_sec, without a network",
        )
    return found


async def _judged(task: HarborTask, box: Box) -> tuple[TaskVerdict | None, str]:
    """(the verdict, None if there is none, the end of what was printed or what is wrong)."""
    seconds = task.config.verifier.timeout_sec
    await box.run(f"kill -9 -1; rm -rf /tests {LOGS}; mkdir -p /tests {LOGS}", cwd="/")
    try:
        if kept := await box.listing(LOGS):
            raise OSError(f"{LOGS}/{kept[0].name} cannot be removed")
        await _put(box, task.tests)
    except OSError as error:
        return None, f"the tests cannot be put into the box: {error}"
    env = {**task.config.environment.env, **task.config.verifier.env}
    done = await box.run("chmod +x /tests/test.sh; /tests/test.sh", seconds, env=env, cwd=task.workdir)
    ended = f"it took more than {seconds:g} s" if done.timed_out else done.limit
    ended = ended or (f"a signal has ended it: {done.code}" if done.code < 0 or done.code > 128 else "")
    said = f"{done.stdout}{done.stderr}{ended and f'[{ended}]'}"[-_SAID:]
    if ended:  # what has ended it may have written a verdict too
        return None, said
    try:
        scores = await _scores(box)
    except (OSError, ValueError) as error:
        return None, f"{said}[{error}]"
    reward = scores.pop("reward") if "reward" in scores else scores.popitem()[1]
    return TaskVerdict(reward, scores, said), said


async def _scores(box: Box) -> dict[str, float]:
    """The numbers of reward.json, which counts if it is there, or of reward.txt.

    Raises:
        OSError: if there is neither.
        ValueError: if what is there is no number, or several without "reward" among them.
    """
    try:
        text = await box.read(f"{LOGS}/reward.json", _LONGEST)
    except FileNotFoundError:
        return {"reward": _number((await box.read(f"{LOGS}/reward.txt", _LONGEST)).decode())}
    try:
        found = parse_json(text)
    except Damaged as error:
        raise ValueError(f"reward.json is no JSON: {error}") from error
    scores = (
        {str(name): _number(value) for name, value in found.items()}
        if isinstance(found, dict)
        else {"reward": _number(found)}
    )
    if "reward" not in scores and len(scores) != 1:
        raise ValueError(f'reward.json has no "reward", it has {sorted(scores)}')
    return scores


def _number(value: Any) -> float:
    number = float(value) if isinstance(value, str | int | float) else math.nan
    if not math.isfinite(number):
        raise ValueError(f"the reward is {value!r}, no finite number")
    return number


async def _put(box: Box, files: Sequence[BoxFile]) -> None:
    for file in files:
        await box.write(file.path, file.data, file.mode)
