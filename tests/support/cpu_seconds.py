"""How fast this machine is now, by a fixed piece of work; and CPU seconds per folder of tests, a plugin of pytest.

CI prints the seconds next to those recorded in tests/baseline.toml, both divided by the time of the fixed work in the
same run.  It fails only if the total is more than 1.4 times the recorded one.  A process counts once it has ended.
"""

from __future__ import annotations

import hashlib
import os
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parent.parent / "baseline.toml"
MOST = 1.4  #: times the recorded total
IDLE = 0.06  #: seconds of the fixed work on an idle machine of 2025
spent: Counter[str] = Counter()  #: folder below tests/ -> CPU seconds of this process and of its ended children


def _work() -> None:
    """Half of it is Python's, half of it a C library's."""
    sum(i * i % 7 for i in range(1_000_000))
    hashlib.sha256(bytes(30_000_000)).digest()


def calibrate() -> float:
    """CPU seconds of the fixed work, the fastest of five."""
    found = []
    for _ in range(5):
        before = sum(os.times()[:2])
        _work()
        found.append(sum(os.times()[:2]) - before)
    return min(found)


def slowdown() -> float:
    """How many times longer the fixed work takes now than on an idle machine, at least 1: a factor for limits."""
    began = time.monotonic()
    _work()
    return max(1.0, (time.monotonic() - began) / IDLE)


def table(units: dict[str, float], recorded: dict[str, float]) -> tuple[list[str], bool]:
    """The lines to print, and whether the total is in bounds.

    Args:
        units: folder -> CPU seconds, in those of the fixed piece of work.
        recorded: the same, from tests/baseline.toml; {}: nothing is recorded.
    """
    total, before = sum(units.values()), sum(recorded.values())
    rows = [(name, now, recorded.get(name, 0.0)) for name, now in units.items()]
    lines = [f"{name:<14}{now:9.0f}   recorded {old:9.0f}" for name, now, old in (*rows, ("all", total, before))]
    return lines, not recorded or total <= MOST * before


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    before = sum(os.times()[:4])
    try:
        return (yield)
    finally:
        folder, below, _ = item.nodeid.removeprefix("tests/").partition("::")[0].partition("/")
        spent[folder if below else "tests"] += sum(os.times()[:4]) - before


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    spent.update(getattr(node, "workeroutput", {}).get("cpu_seconds", {}))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI print the table, keep it for tools/baseline.py, and fail if the total is out of bounds."""
    output = getattr(session.config, "workeroutput", None)
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    cache = getattr(session.config, "cache", None)  # none with -p no:cacheprovider, as in the tests that run pytest
    if output is not None:
        output["cpu_seconds"] = dict(spent)
    elif "HPCRL_REQUIRE" in os.environ and reporter and cache and not session.config.option.collectonly:
        layer, unit = session.config.option.markexpr, calibrate()
        units = {name: round(seconds / unit, 1) for name, seconds in spent.most_common()}
        cache.set(f"cpu_seconds/{layer}", units)
        lines, fine = table(units, tomllib.loads(FILE.read_text()).get("cpu_seconds", {}).get(layer, {}))
        reporter.write_sep("=", f"CPU time, in {unit:.3f} s: half of it Python's")
        reporter.write_line("\n".join(lines))
        if not fine:
            reporter.write_line(f"that is more than {MOST} times what tests/baseline.toml records", red=True)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
