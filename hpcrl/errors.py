"""Errors that a user can act on.

Invariant: whatever goes wrong because of input, a machine or a peer ends as exactly one `HpcrlError` whose text names
the flag, file, host or role at fault and, where one is known, the hint.  A traceback means a defect in hpcrl itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

Subject = TypeVar("Subject")


class HpcrlError(Exception):
    """One clear message for the user.

    `what` says what is wrong and where; `hint` (optional) says what to do about it.
    """

    exit_code = 1

    def __init__(self, what: str, hint: str = "") -> None:
        self.what = what
        self.hint = hint
        super().__init__(f"{what}; {hint}" if hint else what)


class UsageError(HpcrlError):
    """The command line, a recipe or an option's value is wrong: nothing was started."""

    exit_code = 2


class UsageErrors(UsageError):
    """Several of them, one a line.

    Attributes:
        parts: each of them.
    """

    def __init__(self, parts: Sequence[UsageError]) -> None:
        self.parts = tuple(parts)
        super().__init__("\n".join([f"{len(parts)} things are wrong:", *(f"  {part}" for part in parts)]))


def parts_of(error: UsageError) -> tuple[UsageError, ...]:
    """Each thing that is wrong."""
    return error.parts if isinstance(error, UsageErrors) else (error,)


def raise_together(errors: Sequence[UsageError]) -> None:
    """Raise what was found wrong, all of it at once and each thing once; returns if nothing was."""
    parts = list({str(part): part for error in errors for part in parts_of(error)}.values())
    if parts:
        raise parts[0] if len(parts) == 1 else UsageErrors(parts)


def failures(rules: Iterable[Callable[[Subject], object]], subject: Subject) -> list[UsageError]:
    """What the rules refuse of `subject`: one error of each that raises one."""
    wrong = []
    for rule in rules:
        try:
            rule(subject)
        except UsageError as error:
            wrong.append(error)
    return wrong


class DataError(HpcrlError):
    """A prompt file, tokenizer or model directory does not hold what the options promise."""


class CodeError(HpcrlError):
    """A function of the user's has raised what it would raise again, given the same."""


#: what code raises that is wrong, and not a machine, a connection or a service that it uses
_MISTAKES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ModuleNotFoundError,
    LookupError,
    NameError,
    TypeError,
    ValueError,
)


def is_mistake(error: BaseException) -> bool:
    """Whether it would be raised again: one of Python's own errors, and none of a library, such as an HTTP client's."""
    return isinstance(error, _MISTAKES) and type(error).__module__ == "builtins"


class DeadlineError(HpcrlError):
    """A process did not answer in time; the message names role, host, what was awaited and for how long."""


class PeerError(HpcrlError):
    """A process of the run died or answered with an error."""


class Stopped(HpcrlError):
    """The run was asked to stop, saved a checkpoint and ended early: it can be resumed."""

    exit_code = 143


class Interrupted(Stopped):
    """The run was told to end at once: nothing was saved beyond the last checkpoint, from which it can be resumed."""

    exit_code = 130


#: the kinds of error that processes tell one another by name
KINDS: dict[str, type[HpcrlError]] = {
    kind.__name__: kind for kind in (HpcrlError, UsageError, DataError, CodeError, DeadlineError, PeerError, Stopped)
}


def kind_of(error: HpcrlError) -> str:
    """The nearest of KINDS that `error` is one of: what other packages raise, such as an HTTP error, counts as what it
    derives from."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind in KINDS.values())


#: how a process has failed that has said nothing of one of KINDS: with an error that no code of ours expected, or by
#: ending with an exit code
UNEXPECTED, EXITED = "Exception", "exited"


def failure_kind(error: BaseException) -> str:
    """What is written down of an error that has ended a process: one of KINDS, or UNEXPECTED."""
    return kind_of(error) if isinstance(error, HpcrlError) else UNEXPECTED
