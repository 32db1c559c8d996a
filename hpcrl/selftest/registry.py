"""What the self-test checks: a file of hpcrl/selftest/checks/ is a check, named as the file is.

Each has a `CHECK`, and what it does beside it.  Invariants: to list them imports no torch; a check says passed, failed
or skipped with the reason, and an error in it is its failure, never the end of the others.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from hpcrl.errors import HpcrlError, UsageError
from hpcrl.selftest import checks

if TYPE_CHECKING:
    import torch

Number = float | int | str | bool


class Outcome(msgspec.Struct, frozen=True):
    """What came of a check.  said: one line; numbers: what was measured, with the unit in the name; seconds: that it
    took."""

    result: Literal["passed", "failed", "skipped"]
    said: str
    numbers: dict[str, Number] = {}
    seconds: float = 0.0


class Skip(Exception):
    """The check cannot be made here; the text says why."""


@dataclass(frozen=True)
class Place:
    """Where a check runs.  device: this rank's; directory: shared by all ranks, empty at first; link: bytes a second
    that the network between the hosts can carry one way, None if its driver does not say; hosts: how many take part."""

    rank: int
    world: int
    device: torch.device
    directory: Path
    hosts: int = 1
    link: float | None = None


@dataclass(frozen=True)
class Check:
    """A check.  title: what holds if it passes; turn: its place in the order.

    runs: "ranks": `work` of a Place in one process a GPU of every host, in one group of torch.distributed; "alone": the
    same in one process with one GPU; "launcher": `work` of a directory in the command itself, which starts whole runs.
    needs: modules without which it is skipped.
    """

    title: str
    turn: int
    runs: Literal["ranks", "alone", "launcher"]
    work: Callable[[Any], Outcome]
    needs: tuple[str, ...] = ()


def find_checks() -> dict[str, Check]:
    """All of them by name, in their order."""
    names = [module.name for module in pkgutil.iter_modules(checks.__path__)]
    found = {name: importlib.import_module(f"{checks.__name__}.{name}").CHECK for name in names}
    return dict(sorted(found.items(), key=lambda item: item[1].turn))


def choose_checks(only: Sequence[str], every: Mapping[str, Check]) -> dict[str, Check]:
    """Those named, or all; UsageError for a name that there is not."""
    for name in only:
        if name not in every:
            raise UsageError(f"--only {name}: there is no such check", f"there are {', '.join(every)}")
    return {name: check for name, check in every.items() if not only or name in only}


def try_check(check: Check, subject: Any) -> Outcome:
    """What it comes to, whatever happens in it."""
    begun = time.monotonic()
    missing = [name for name in check.needs if importlib.util.find_spec(name) is None]
    try:
        found = Outcome("skipped", f"{', '.join(missing)} is not installed") if missing else check.work(subject)
    except Skip as reason:
        found = Outcome("skipped", str(reason))
    except HpcrlError as error:
        found = Outcome("failed", str(error))
    except Exception as error:  # noqa: BLE001  (whatever goes wrong in a check is what it found)
        found = Outcome(
            "failed", f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        )
    return msgspec.structs.replace(found, seconds=round(time.monotonic() - begun, 2))
