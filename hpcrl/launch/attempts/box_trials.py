"""Which kinds of sandboxes are tried where before a stage begins: those of the stages after it.

A stage's own servers of sandboxes say at its beginning why a node can make none (`hpcrl.sandbox.nodes.main`); those of
a later one would say it hours later, when the stages before it have done their work.

Invariant: a node is asked for what a later stage's plan has there, and for nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from hpcrl.config.options import Options
from hpcrl.errors import HpcrlError, UsageError
from hpcrl.plan import Host, Plan, make_plan
from hpcrl.run.peers import PublishedRecords
from hpcrl.sandbox.nodes.trial import BoxTrial, word_of
from hpcrl.utils.waiting import Deadline, LastSign

LATE_FILE = 5.0  #: seconds after the end of a program on another host in which its file may still come to be seen here


def kinds_to_try(
    options: Options, plan: Plan, later: Sequence[Options], hosts: Sequence[Host], kept: int
) -> dict[str, tuple[str, ...]]:
    """host -> the kinds that later stages want there and this one does not, as `try_kinds` takes them.  Pure.

    Args:
        options, plan: of the stage that begins.
        hosts, kept: as of `make_plan`.
    """
    own = {(place.host, word_of(options.sandbox_kind)) for place in plan.sandboxes}
    wanted: dict[str, list[str]] = {}
    for following in later:
        try:
            places = make_plan(following, list(hosts), "trial", kept=kept).sandboxes
        except UsageError:  # a host is lost: what becomes of the stage is found out when it begins
            continue
        for place in places:
            word = word_of(following.sandbox_kind)
            if (place.host, word) not in own and word not in wanted.setdefault(place.host, []):
                wanted[place.host].append(word)
    return {host: tuple(words) for host, words in wanted.items() if words}


def wait_for_trials(
    folder: Path, hosts: Collection[str], seconds: float, running: Callable[[], bool]
) -> dict[str, BoxTrial]:
    """What hosts say in a directory of their trials: all that has come in time.

    Args:
        running: whether the programs that make the trials still run.
    """
    ran = LastSign()

    def over() -> bool:
        if running():
            ran.heard()
        return ran.silence > LATE_FILE

    return PublishedRecords(folder, BoxTrial).wait(hosts, Deadline(seconds), 0.1, over)


def refuse_untried(wanted: Mapping[str, Sequence[str]], found: Mapping[str, BoxTrial]) -> None:
    """Raise HpcrlError that names the first host that can make no box of a kind that is wanted there, or has not said
    so."""
    silent = BoxTrial("it did not try to make a sandbox, or gave no answer", "is it up, and its network?")
    bad = [(host, trial) for host in wanted if (trial := found.get(host, silent)).what]
    if bad:
        host, trial = bad[0]
        more = f" (and {len(bad) - 1} more)" if bad[1:] else ""
        raise HpcrlError(f"a later stage's sandboxes: host {host}: {trial.what}{more}", trial.hint)
