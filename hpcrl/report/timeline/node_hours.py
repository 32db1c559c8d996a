"""What the node-hours of a run went into, by phase.

A node's hour is divided over its slots (GPUs); at each moment a slot does what the busiest of its owners does
(`PRECEDENCE`), and waits where none does anything.  Before an attempt's trainer is ready, and outside of attempts, all
nodes are starting (or ending).  Of an attempt, everything from the first step that a later one had to repeat is lost;
where nothing was kept, all of it.

Invariants: it only reads; the phases of an allocation add up to its nodes times its length; a process that has left no
timeline (on a host that does not share the run directory) is taken to have done what its nearest kin did; what a killed
process had not finished counts as waiting, and is mostly lost anyway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from hpcrl.plan import Host, Plan
from hpcrl.report.run_files import Run, load_json
from hpcrl.report.timeline.reading import Recorded, Track
from hpcrl.report.timeline.spans import (
    ATTEMPT,
    BEGINS,
    COSTS,
    DOES,
    EVALUATE,
    GENERATE,
    PAUSED,
    PRECEDENCE,
    READY,
    SAVE,
    SAVED,
    STEP,
    Cost,
)
from hpcrl.run.rundir import HOSTS

HOUR = 3_600_000_000  #: microseconds
Work = Sequence[tuple[int, int, Cost]]  #: (begin, end, what is done), in microseconds, in any order


class Owner(NamedTuple):
    """A process on a node, and the slots that it has there."""

    node: str
    slots: tuple[int, ...]
    work: Work


@dataclass(frozen=True)
class Attempt:
    """One attempt, in microseconds.

    Attributes:
        ready: when its trainer could work, None if it never could.
        lost: from when on its work came to nothing, None if all was kept.
    """

    begin: int
    end: int
    ready: int | None = None
    lost: int | None = None
    owners: Sequence[Owner] = ()


@dataclass
class NodeHours:
    """Of all allocations of a run.

    Attributes:
        phases: node-hours by phase.
        seconds: that the allocations lasted, one after another.
        starts, attempts, lost: how many there were; of the attempts those that lost work.
    """

    phases: Counter[Cost] = field(default_factory=Counter)
    seconds: float = 0.0
    starts: int = 0
    attempts: int = 0
    lost: int = 0

    @property
    def total(self) -> float:
        return sum(self.phases.values())

    def rows(self) -> list[tuple[str, str, str]]:
        """(phase, node-hours, share), and the total; none if nothing is known."""
        if not self.starts:
            return []
        hours = [*((phase, self.phases[phase]) for phase in COSTS), ("total", self.total)]
        return [(name, f"{h:.4g}", f"{100 * h / self.total:.1f} %" if self.total else "-") for name, h in hours]

    def add(self, begin: int, end: int, nodes: Mapping[str, int], attempts: Sequence[Attempt]) -> None:
        """Count nodes (with their slots) that were held from begin to end, in microseconds."""
        self.seconds += (end - begin) / 1e6
        self.starts += 1
        self.attempts += len(attempts)
        self.lost += sum(attempt.lost is not None for attempt in attempts)
        for node, slots in nodes.items():
            for phase, time in _node(begin, end, attempts, node, slots).items():
                self.phases[phase] += time / HOUR


def node_hours(run: Run, recorded: Recorded) -> NodeHours:
    """What each start of the run's launcher held, and did with it."""
    stages = {stage.name: stage for stage in run.stages}
    found = NodeHours()
    for launcher in recorded.launchers:
        last = launcher is recorded.launchers[-1]
        end = max(launcher.end, int(run.state.time * 1e6) if last and run.state else 0)
        live = last and run.state is not None and run.state.phase in ("running", "saving", "starting")
        nodes: dict[str, int] = {}
        attempts = []
        for mark in launcher.named(BEGINS):
            told = lambda span: (span.more.get("stage", ""), span.more.get("attempt", 0))  # noqa: E731
            name, number = told(mark)
            if (stage := stages.get(name)) is None:
                continue
            tracks = recorded.stages.get(name, [])
            own = [track for track in tracks if track.attempt == number]
            over = next((span for span in launcher.named(ATTEMPT) if told(span) == (name, number)), None)
            until = over.end if over else max([end, *(track.end for track in own)])
            end = max(end, until)
            here = stage.root / "attempts" / str(number)
            plan = load_json(here / "plan.json", Plan, run.notes)
            for host in load_json(here / HOSTS, list[Host], run.notes) or ():  # what it held, in use or not
                nodes[host.name] = max(host.slots, nodes.get(host.name, 0))
            kept = over.more.get("status") in ("finished", "stopped") if over else live
            attempts.append(_attempt(mark.begin, until, kept, plan, own, _next_start(tracks, number)))
        found.add(launcher.begin, end, nodes or {launcher.header.host: 0}, attempts)
    return found


# ---- one node


def _node(begin: int, end: int, attempts: Sequence[Attempt], node: str, slots: int) -> Counter[Cost]:
    """Microseconds of one node, by phase."""
    found: Counter[Cost] = Counter()
    at = begin
    for attempt in sorted(attempts, key=lambda attempt: attempt.begin):
        first = min(max(attempt.begin, at), end)
        until = min(max(attempt.end, first), end)
        lost = until if attempt.lost is None else min(max(attempt.lost, first), until)
        ready = lost if attempt.ready is None else min(max(attempt.ready, first), lost)
        found["starting"] += ready - at
        found["lost"] += until - lost
        found.update(_shares([owner for owner in attempt.owners if owner.node == node], slots, ready, lost))
        at = until
    found["starting"] += end - at
    return found


def _shares(owners: Sequence[Owner], slots: int, begin: int, end: int) -> Counter[Cost]:
    """Microseconds of a node from `begin` to `end`: the mean of its slots; of a node without any, its processes'."""
    used = {slot for owner in owners for slot in owner.slots}
    number = max(slots, len(used))
    if number == 0:
        return Counter(divide([piece for owner in owners for piece in owner.work], begin, end))
    alike = Counter(tuple(n for n, owner in enumerate(owners) if slot in owner.slots) for slot in used)
    alike[()] += number - len(used)
    found: Counter[Cost] = Counter()
    for who, count in alike.items():  # slots with the same owners have the same hours
        for phase, time in divide([piece for n in who for piece in owners[n].work], begin, end).items():
            found[phase] += time * count / number
    return found


def divide(work: Iterable[tuple[int, int, Cost]], begin: int, end: int) -> Counter[Cost]:
    """How long from `begin` to `end` each phase is the first of PRECEDENCE at work; the rest is waiting.  It adds up to
    the whole."""
    changes = []
    for start, stop, phase in work:
        start, stop = max(start, begin), min(stop, end)
        if start < stop and phase in PRECEDENCE:
            changes += [(start, phase, 1), (stop, phase, -1)]
    changes.sort()
    found: Counter[Cost] = Counter()
    at_work: Counter[Cost] = Counter()
    for (at, phase, by), (then, _, _) in pairwise([(begin, "waiting", 0), *changes, (end, "waiting", 0)]):
        at_work[phase] += by
        if then > at:
            found[next((one for one in PRECEDENCE if at_work[one]), "waiting")] += then - at
    return found


# ---- one attempt


def _attempt(
    begin: int, end: int, kept: bool, plan: Plan | None, tracks: Sequence[Track], next_start: int | None
) -> Attempt:
    """An attempt.

    Args:
        kept: whether all that it did was.
        next_start: the rollout from which a later attempt resumed; None if none did.
    """
    driver = next((track for track in tracks if track.role == "trainer" and track.header.index == 0), None)
    ready = driver.named(READY)[:1] if driver else []
    lost = None
    if not kept:
        lost = lost_from(driver, next_start)
        lost = begin if lost is None else lost
    return Attempt(begin, end, ready[0].begin if ready else None, lost, list(_owners(plan, tracks)) if plan else [])


def lost_from(driver: Track | None, next_start: int | None) -> int | None:
    """From when on the work of an attempt came to nothing; None if all of it did.

    Args:
        driver: what trainer rank 0 did.
    """
    if driver is None or not (ready := driver.named(READY)):
        return None
    own = int(ready[0].more.get("rollout_id", 0))
    saved = [int(mark.more.get("rollout_id", own)) for mark in driver.named(SAVED)]
    kept = next_start if next_start is not None else max([own, *saved])
    if kept <= own:
        return None
    again = [span.begin for span in driver.named(STEP) if int(span.more.get("rollout_id", -1)) >= kept]
    done = [span.end for span in driver.named(STEP, SAVE, EVALUATE)]
    return min(again) if again else max(done, default=None)


def _next_start(tracks: Sequence[Track], attempt: int) -> int | None:
    """The rollout from which the first later attempt resumed that came so far."""
    drivers = [track for track in tracks if track.role == "trainer" and track.header.index == 0]
    for track in sorted(drivers, key=lambda track: track.attempt or 0):
        if (track.attempt or 0) > attempt and (ready := track.named(READY)):
            return int(ready[0].more.get("rollout_id", 0))
    return None


def _owners(plan: Plan, tracks: Sequence[Track]) -> Iterator[Owner]:
    """Who had which slots, and did what there."""
    trainers = {track.header.index: track for track in tracks if track.role == "trainer"}
    by_host = {plan.trainers[rank].host: rank for rank in sorted(trainers, reverse=True) if rank < len(plan.trainers)}
    work = {rank: does(track) for rank, track in trainers.items()}
    for rank, place in enumerate(plan.trainers):
        known = rank if rank in work else by_host.get(place.host, 0)
        yield Owner(place.host, place.slots, work.get(known, []))
    rollouts = [track for track in tracks if track.role == "rollout"]
    for index, engine in enumerate(plan.engines):
        done = engine_work(tracks, index)
        for place in (engine, *engine.also):
            yield Owner(place.host, place.slots, done)
    yield Owner(plan.rollout.host, (), [piece for track in rollouts for piece in does(track)])


def engine_work(tracks: Sequence[Track], index: int) -> Work:
    """What engine `index` did, as its supervisor, the rollout process and the trainer saw it."""
    found: list[tuple[int, int, Cost]] = []
    for track in tracks:
        if track.role == "rollout":
            own = (span for span in track.named(GENERATE) if span.more.get("engine") == index)
            found += [(span.begin, span.end, "generating") for span in own]
        elif track.role == "engine" and track.header.index == index:
            found += does(track)
        elif track.role == "trainer" and track.header.index == 0:
            found += does(track, "engine", PAUSED)
    return found


def does(track: Track, role: str = "", *names: str) -> Work:
    """What a track's spans are for the slots of `role` (its own).

    Args:
        names: only these spans.
    """
    costs = DOES.get(role or track.role, {})
    wanted = {name: cost for name, cost in costs.items() if not names or name in names}
    return [(span.begin, span.end, wanted[span.name]) for span in track.spans if span.name in wanted]
