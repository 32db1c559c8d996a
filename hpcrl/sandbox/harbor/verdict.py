"""The boxes of a task: one in which the policy works, and another in which the verdict is made.

What the policy has left behind is hostile: programs that run on, programs and settings that it has replaced, a verdict
that it has written itself.  So its box is not judged in.  A new one of the same image gets the environment's files,
then what the policy has left in its working directory and in the task's artifacts, then the tests, and no process runs
there but the verifier's.

Invariant: a reward is what tests/test.sh wrote; or 0 where it wrote nothing for what the policy has left, twice, and
has just written one for a box that the policy never saw.  All else is an error: a lost sandbox, a verifier that cannot
run.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcrl.errors import HpcrlError
from hpcrl.sandbox import Box, BoxResult, sandbox
from hpcrl.sandbox.harbor.leftovers import NothingLeft, pack, unpack
from hpcrl.sandbox.harbor.task import BoxFile, HarborTask
from hpcrl.utils.untrusted_files import Damaged, parse_json

LOGS = "/logs/verifier"
_TRIES = 2  #: times that a verifier is run that wrote nothing
_LONGEST = 1 << 20  #: bytes of a reward file
_SAID = 2000  #: characters of what the verifier printed that are kept
#: not the working directory's, whatever the image says: what Python and shells read at home is none of the policy's
_HOME = {"HOME": "/tmp"}


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
        yield box


async def run_in(box: Box, task: HarborTask, command: str, seconds: float) -> BoxResult:
    """A command of the policy's, in the working directory and with the environment's variables."""
    return await box.run(command, seconds, env=task.env, cwd=task.workdir)


@dataclass(frozen=True)
class Leftovers:
    """What the policy has left.

    Attributes:
        archive: of `pack`, None where there is none.
        why: there is none.
    """

    archive: bytes | None
    why: str = ""


async def collect(task: HarborTask, box: Box) -> Leftovers:
    """What the policy has left in its box, to be judged once the box is given back.

    Raises:
        SandboxLost: if the box has ended.
    """
    try:
        return Leftovers(await pack(box, task.carried))
    except NothingLeft as error:
        return Leftovers(None, str(error))


async def verdict(task: HarborTask, left: Leftovers) -> TaskVerdict:
    """The verdict of what the policy has left.

    It takes a box of its own: asked for while the policy's is held, a pool whose boxes are all policies' has none left.

    Raises:
        HpcrlError: if the verifier writes none for an untouched box either.
        SandboxLost: if a box is lost, which says nothing of the policy's work.
    """
    said = left.why
    for _ in range(_TRIES if left.archive is not None else 0):
        found, said = await _judged(task, left.archive or b"")
        if found:
            return found
    await check_verifier(task)
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
        await run_in(box, task, command, task.config.verdict_seconds)
        left = await collect(task, box)
    if left.archive is None:
        raise HpcrlError(f"{task.folder}: {left.why}", f"the image {task.image} needs sh and tar")
    found, said = await _judged(task, left.archive)
    if found is None:
        raise HpcrlError(
            f"{task.folder / 'tests' / 'test.sh'} makes no verdict for an untouched environment: {said}",
            f"it has to write {LOGS}/reward.txt or reward.json within [verifier] timeout_sec, with no network",
        )
    return found


async def _judged(task: HarborTask, left: bytes) -> tuple[TaskVerdict | None, str]:
    """(the verdict in a new box, None if there is none, the end of what was printed or what is wrong)."""
    async with task_box(task) as judge:
        try:
            if left:
                await unpack(judge, left, task.carried)
            await _put(judge, task.tests)
        except OSError as error:
            return None, f"what it has left cannot be carried over: {error}"
        done = await judge.run(
            "chmod +x /tests/test.sh; /tests/test.sh",
            task.config.verdict_seconds,
            env={**task.env, **_HOME, **task.config.verdict_env},
            cwd=task.workdir,
        )
        ended = f"it took more than {task.config.verdict_seconds:g} s" if done.timed_out else done.limit
        ended = ended or (f"a signal has ended it: {done.code}" if done.code < 0 or done.code > 128 else "")
        said = f"{done.stdout}{done.stderr}{ended and f'[{ended}]'}"[-_SAID:]
        if ended:  # what has ended it may have written a verdict too
            return None, said
        try:
            scores = await _scores(judge)
        except (OSError, ValueError) as error:
            return None, f"{said}[{error}]"
    reward = scores.pop("reward") if "reward" in scores else scores.popitem()[1]
    return TaskVerdict(reward, scores, said), said


async def _scores(judge: Box) -> dict[str, float]:
    """The numbers of reward.json, which counts if it is there, or of reward.txt.

    Raises:
        OSError: if there is neither.
        ValueError: if what is there is no number, or several of which none is "reward".
    """
    try:
        text = await judge.read(f"{LOGS}/reward.json", _LONGEST)
    except FileNotFoundError:
        return {"reward": _number((await judge.read(f"{LOGS}/reward.txt", _LONGEST)).decode())}
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
