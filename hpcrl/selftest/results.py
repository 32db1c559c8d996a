"""What the self-test has found so far, a file a check in its directory, and how it is shown.

Invariant: a result is on disk as soon as it is known, whole or not at all, so that an interrupted self-test goes on
with what it lacks.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from hpcrl.careful_files import Damaged, read_json
from hpcrl.doctor.packages import version
from hpcrl.run.rundir import write_atomic
from hpcrl.selftest.registry import Check, Outcome

PACKAGES = ("hpcrl", "torch", "megatron-core", "vllm", "transformers", "transformer-engine", "numpy")


class Results:
    """DIR/results/NAME.json of each check that has ended, and DIR/started/NAME of each that has begun."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for name in ("results", "started", "logs"):
            (directory / name).mkdir(parents=True, exist_ok=True)

    def begin(self, name: str) -> None:
        (self.directory / "started" / name).touch()

    def write(self, name: str, outcome: Outcome) -> None:
        write_atomic(self.directory / "results" / f"{name}.json", msgspec.json.encode(outcome))

    def read(self) -> dict[str, Outcome]:
        found = {}
        for file in (self.directory / "results").glob("*.json"):
            with contextlib.suppress(OSError, Damaged):
                found[file.stem] = read_json(file, Outcome)
        return found

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
            rows.append(f"{outcome.result:8} {name:16} {outcome.said} ({outcome.seconds:.0f} s)")
    counts = [f"{sum(o.result == kind for o in found.values())} {kind}" for kind in ("passed", "failed", "skipped")]
    return "\n".join([*rows, ", ".join(counts)])


def report(every: Mapping[str, Check], found: Mapping[str, Outcome], hosts: list[str]) -> bytes:
    """The JSON file: versions, machine, and each check with what holds if it passes."""
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
            }
        )
    )
