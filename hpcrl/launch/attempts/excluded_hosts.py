"""Leaving hosts out of a job: what is reported and recorded about each, and which hosts replace them.

Invariant: hosts are left out here alone, so that screen, attempts.jsonl and the launcher's list say the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hpcrl.launch.attempts.spare_hosts import in_order, replacement, without
from hpcrl.plan import Host
from hpcrl.report.progress import say
from hpcrl.run.attempt_log import note_left_out
from hpcrl.run.rundir import RunDir


def leave_out(hosts: Sequence[Host], names: Iterable[str], why: str, rundir: RunDir) -> list[Host]:
    """The hosts without these, which no later attempt uses; says and notes which hosts take their places."""
    left = list(hosts)
    for name in in_order(hosts, names):
        taker = replacement(left, name)
        left = without(left, [name])
        place = f"spare host {taker.name} takes the place of {name}" if taker else f"the run continues without {name}"
        say(f"{why}: {place}")
        note_left_out(rundir, name, taker.name if taker else "", why)
    return left
