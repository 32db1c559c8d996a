"""Whether a stage that has failed is tried again on the hosts that its job holds.

Pure: what is known of the failures of this job in, a reason to end out.  Invariants: what another attempt would not
change ends the run with the first error that says so: a setting, a mistake in the user's own code, a failure before
anything was trained that no machine can be blamed for, the same error at the same step twice; `progress.py` ends a run
that is tried again and again without a new checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hpcrl.errors import EXITED, UNEXPECTED, CodeError, DataError, HpcrlError, UsageError
from hpcrl.run.rundir import AttemptFailure

#: errors of what was given to the run
SETTINGS = (UsageError.__name__, DataError.__name__, CodeError.__name__)
#: errors that a process has made itself, and would make again in the same place
OWN = (HpcrlError.__name__, UNEXPECTED, EXITED)
#: how often what others have seen of a process's end happens alike before it is taken for no chance
OTHERS = 3
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+(\.\d+)?")


class HostFault(NamedTuple):
    """Why no attempt may follow on the hosts of the job as they are; empty where one may.

    Attributes:
        hosts: those without which one may follow.
    """

    why: str = ""
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class FailedAttempt:
    """How an attempt of this job has ended.

    Attributes:
        failure: its first error; None where none could be read.
        step: the rollout that it was at.
        trained: whether its ranks had begun to train.
    """

    failure: AttemptFailure | None
    step: int
    trained: bool

    @property
    def own(self) -> bool:
        """Whether a process ended with an error of its own, and was not killed, silent or lost."""
        return self.failure is not None and self.failure.kind in OWN

    def same(self, other: FailedAttempt) -> bool:
        """Whether both ended in the same way at the same step: their words are the same, numbers aside."""
        if self.failure is None or other.failure is None or self.step != other.step:
            return False
        ours, theirs = (_NUMBERS.sub("#", one.failure.message) for one in (self, other) if one.failure)
        return self.failure.role == other.failure.role and ours == theirs


def is_final(failed: Sequence[FailedAttempt], limit: int, fruitless: int) -> bool:
    """Whether no other attempt follows, whatever hosts there are: else what looks like an error of the run's own may be
    that of a host, and is gone with it."""
    last = failed[-1].failure
    return fruitless >= limit or (last is not None and last.kind in SETTINGS)


def reason_to_end(failed: Sequence[FailedAttempt], limit: int, fruitless: int) -> str:
    """Why no other attempt follows; "" where one does.

    Args:
        failed: the attempts of this job, in order; not empty.
        limit: --attempts.
        fruitless: how many of them, the last ones, have brought no new checkpoint.
    """
    last = failed[-1]
    if last.failure is not None and last.failure.kind in SETTINGS:
        return "another attempt would have the same settings, data and code"
    if last.own and not any(one.trained for one in failed):
        return "it had not begun to train"
    alike = sum(last.same(earlier) for earlier in failed[:-1] if earlier.own or not last.own)
    if alike >= (1 if last.own else OTHERS - 1):
        return f"it has failed so at step {last.step} before"
    if fruitless >= limit:
        return f"{fruitless} attempts without a new checkpoint (--attempts {limit})" if limit > 1 else "--attempts 1"
    return ""
