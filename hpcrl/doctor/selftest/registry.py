"""What the self-test checks (a file of hpcrl/doctor/selftest/checks/ is a check, named as the file is) and what it has
found so far, a file a check in its directory.

Each check has a `CHECK`, and its code next to it.  Invariants: listing them imports no torch; a check says passed,
failed or skipped with the reason, and an error in it is its failure, never the end of the others.  A result is on disk
as soon as it is known, whole or not at all, so that an interrupted self-test resumes with what it lacks.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from hpcrl.doctor.selftest import checks
from hpcrl.errors import HpcrlError, UsageError
from hpcrl.run.peers import PublishedRecords
from hpcrl.run.rundir import write_atomic
from hpcrl.utils.installed import version
from hpcrl.utils.plugins import PluginFolder
from hpcrl.utils.untrusted_files import touch

if TYPE_CHECKING:
    import torch

Number = float | int | str | bool


class Outcome(msgspec.Struct, frozen=True):
    """What came of a check.

    Attributes:
        text: one line.
        numbers: what was measured, with the unit in the name.
        seconds: that it took.
    """

    result: Literal["passed", "failed", "skipped"]
    text: str
    numbers: dict[str, Number] = {}
    seconds: float = 0.0


class Skip(Exception):
    """The check cannot be made here; the text says why."""


@dataclass(frozen=True)
class CheckContext:
    """Where a check runs.

    Attributes:
        device: this rank's.
        directory: shared by all ranks, empty at first.
        link: bytes a second that the network between the hosts can carry one way, None if its driver does not say.
        hosts: how many take part.
    """

    rank: int
    world: int
    device: torch.device
    directory: Path
    hosts: int = 1
    link: float | None = None


@dataclass(frozen=True)
class Check:
    """A check.

    Attributes:
        title: what holds if it passes.
        turn: its place in the order.
        runs: "ranks": `work` of a Place in one process a GPU of every host, in one group of torch.distributed; "alone":
            the same in one process with one GPU; "launcher": `work` of a directory in the command itself, which starts
            whole runs.
        needs: modules without which it is skipped.
    """

    title: str
    turn: int
    runs: Literal["ranks", "alone", "launcher"]
    work: Callable[[Any], Outcome]
    needs: tuple[str, ...] = ()


def find_checks() -> dict[str, Check]:
    """All of them by name, in their order."""
    names = PluginFolder(Path(checks.__file__).parent).names()
    found = {name: importlib.import_module(f"{checks.__name__}.{name}").CHECK for name in names}
    return dict(sorted(found.items(), key=lambda item: item[1].turn))


def choose_checks(only: Sequence[str], every: Mapping[str, Check]) -> dict[str, Check]:
    """Those named, or all.

    Raises:
        UsageError: for an unknown name.
    """
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


# ---- results, kept on disk

PACKAGES = ("hpcrl", "torch", "megatron-core", "vllm", "transformers", "transformer-engine", "numpy")


class Results:
    """DIR/results/NAME.json of each check that has ended, and DIR/started/NAME of each that has begun."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for name in ("results", "started", "logs"):
            (directory / name).mkdir(parents=True, exist_ok=True)

    def start_check(self, name: str) -> None:
        touch(self.directory / "started" / name)

    def write(self, name: str, outcome: Outcome) -> None:
        write_atomic(self.directory / "results" / f"{name}.json", msgspec.json.encode(outcome))

    def read(self) -> dict[str, Outcome]:
        return PublishedRecords(self.directory / "results", Outcome).poll()

    def interrupted(self, names: Iterable[str]) -> str | None:
        """The check of `names` that began and has no result: what its process died in."""
        ended = self.read()
        return next(
            (name for name in names if name not in ended and (self.directory / "started" / name).exists()), None
        )

    def hosts(self) -> list[str]:
        """Those that met in it, where there were several."""
        return sorted(file.stem for file in (self.directory / "hosts").glob("*.json"))

    def clear(self, names: Iterable[str]) -> None:
        """Forget that these began."""
        for name in names:
            (self.directory / "started" / name).unlink(missing_ok=True)


def table(every: Mapping[str, Check], found: Mapping[str, Outcome]) -> str:
    """One line a check: what came of it, its name, what it says; then how many of each."""
    rows = []
    for name in every:
        outcome = found.get(name)
        if outcome is None:
            rows.append(f"{'not run':8} {name}")
        else:
            rows.append(f"{outcome.result:8} {name:16} {outcome.text} ({outcome.seconds:.0f} s)")
    counts = [f"{sum(o.result == kind for o in found.values())} {kind}" for kind in ("passed", "failed", "skipped")]
    return "\n".join([*rows, ", ".join(counts)])


def report(
    every: Mapping[str, Check], found: Mapping[str, Outcome], hosts: list[str], kernels: Mapping[str, list[str]]
) -> bytes:
    """The JSON file: versions, machine, each check with what holds if it passes, and lines of logs by run."""
    packages = {name: shown for name in PACKAGES if (shown := version(name))}
    rows = {
        name: {"holds": check.title, **(msgspec.to_builtins(found[name]) if name in found else {"result": "not run"})}
        for name, check in every.items()
    }
    return msgspec.json.format(
        msgspec.json.encode(
            {
                "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "python": platform.python_version(),
                "machine": platform.machine(),
                "cpus": len(os.sched_getaffinity(0)),
                "hosts": hosts,
                "packages": packages,
                "checks": rows,
                "kernels": kernels,
            }
        )
    )
