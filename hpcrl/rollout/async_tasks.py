"""Small tools for asyncio tasks: cancelling them to the end, deadlines that can say what was missing, plain errors.

Invariant: nothing started here outlives the call that waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from hpcrl.errors import DeadlineError, HpcrlError

T = TypeVar("T")


async def cancel(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel tasks and wait until they have ended, however; what one of them has raised is looked at, and so not
    reported as lost."""
    given = [task for task in tasks if task is not None]
    for task in given:
        task.cancel()
    await asyncio.gather(*given, return_exceptions=True)


async def within(seconds: float, work: Coroutine[Any, Any, T], late: Callable[[], str]) -> T:
    """The result of `work`; after `seconds` a DeadlineError with what `late` says while the work still stands."""
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait([task], timeout=seconds)
        if not done:
            raise DeadlineError(late())
        return task.result()
    finally:
        await cancel(task)


async def in_thread(work: Callable[[], T]) -> T:
    """The result of `work`, done in a thread.  A thread cannot be stopped: a task that is cancelled here ends when the
    work has."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.gather(task, return_exceptions=True)
        raise


def as_hpcrl_error(error: BaseException) -> BaseException:
    """The error itself, or the first inside a task group's bundle; ours before others."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    inside = [as_hpcrl_error(e) for e in error.exceptions]
    return next((e for e in inside if isinstance(e, HpcrlError)), inside[0])


def text_of(error: BaseException) -> str:
    """What to tell a user of an error."""
    error = as_hpcrl_error(error)
    return str(error) if isinstance(error, HpcrlError) else f"{type(error).__name__}: {error}"
