"""The sandboxes of a run's worker processes together: how many are in which state, how long callers wait for one, and
what fails.

Invariants: what a process has reported counts once, and stays when the process ends; its boxes do not.  A run without
sandboxes has no measure of them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from hpcrl.rollout.worker_messages import SandboxReport
from hpcrl.sandbox.accounts import CAUSES, STATES


class SandboxTally:
    """Of the processes of one pool of workers.

    Attributes:
        done: what they have done in all: fields of `PoolCounts`, and failures by cause.
        spent: seconds that boxes were made ahead ("warm"), and being made ("making"), in all.
    """

    def __init__(self) -> None:
        self.done: Counter[str] = Counter()
        self.spent: Counter[str] = Counter()
        self._now: dict[object, dict[str, int]] = {}
        self._last = time.monotonic()

    def add_report(self, process: object, report: SandboxReport) -> None:
        """What a process has reported."""
        self.count_time()
        self.done.update(report.more)
        self._now[process] = report.states

    def forget(self, process: object) -> None:
        """A process has ended, and all of its boxes."""
        self.count_time()
        self._now.pop(process, None)

    def states(self) -> dict[str, int]:
        """Boxes in each of STATES now."""
        return {state: sum(states.get(state, 0) for states in self._now.values()) for state in STATES}

    def count_time(self) -> None:
        """Count the time until now."""
        now = time.monotonic()
        for state, count in self.states().items():
            if count and state != "used":  # whose time a process counts itself
                self.spent[state] += count * (now - self._last)  # type: ignore[assignment]
        self._last = now


class SandboxMeasures:
    """What of several tallies is new with each rollout."""

    def __init__(self, tallies: Sequence[SandboxTally]) -> None:
        self._tallies = tallies
        self._before: Counter[str] = Counter()
        self._at = time.monotonic()
        self._failures: set[str] = set()

    def states(self) -> dict[str, int]:
        """Boxes in each of STATES now."""
        found = [tally.states() for tally in self._tallies]
        return {state: sum(states[state] for states in found) for state in STATES}

    def totals(self) -> dict[str, float]:
        """What was done since the start of this process, and seconds in `used`, `warm`, `making` and `waited`; {} where
        there was no sandbox."""
        done: Counter[str] = Counter()
        for tally in self._tallies:
            tally.count_time()
            done.update(tally.done)
            done.update(tally.spent)
        done["used"] = done.pop("seconds", 0)
        return {name: float(value) for name, value in done.items()} if any(done.values()) else {}

    def measures(self) -> dict[str, float]:
        """Metrics of the time since the last call: the mean number of boxes in each state, those that were made and
        handed out, the mean wait for one, and failures by those causes that there have been."""
        totals, now = Counter(self.totals()), time.monotonic()
        if not totals:
            return {}
        more = Counter({name: value - self._before[name] for name, value in totals.items()})
        passed = max(now - self._at, 1e-9)
        self._before, self._at = totals, now
        self._failures |= {cause for cause in CAUSES if totals[cause]}
        found = {f"sandbox/{state}": more[state] / passed for state in STATES}
        found |= {f"sandbox/{name}": float(more[name]) for name in ("made", "handed_out")}
        found |= {"sandbox/seconds": float(more["used"]), "sandbox/idle_seconds": float(more["warm"])}
        found["sandbox/wait_time"] = more["waited"] / max(more["handed_out"], 1)
        found["sandbox/failures"] = float(sum(more[cause] for cause in CAUSES))
        return found | {f"sandbox/failures/{cause}": float(more[cause]) for cause in sorted(self._failures)}
