"""From a run directory to what its allocations were spent on: which attempt ran where and when, and what of it was
kept.

Invariants: it only reads; a process that has left no timeline (on a host that does not share the run directory) is
taken to have done what its nearest kin did; what a killed process had not finished counts as waiting, and is mostly
lost anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hpcrl.plan import Host, Plan
from hpcrl.report.run_files import Run, StageFiles, load_json
from hpcrl.report.timeline.accounting import AttemptSpent, Owner, Spent
from hpcrl.report.timeline.reading import Span, Track, align, read_launchers, read_stage
from hpcrl.report.timeline.spans import (
    ATTEMPT,
    BEGINS,
    DOES,
    EVALUATE,
    GENERATE,
    PAUSED,
    READY,
    SAVE,
    SAVED,
    STEP,
    Cost,
)
from hpcrl.run.rundir import HOSTS
from hpcrl.untrusted_files import Damaged, read_json

Work = list[tuple[int, int, Cost]]


@dataclass(frozen=True)
class Recorded:
    """Every track of a run on one clock: the launcher's, by start, and the stages', by name."""

    launchers: list[Track]
    stages: dict[str, list[Track]]

    @property
    def tracks(self) -> list[Track]:
        return [*self.launchers, *(track for tracks in self.stages.values() for track in tracks)]


def read_run(run: Run) -> Recorded:
    """All timelines of a run."""
    launchers = read_launchers(run.root)
    by_stage = {stage.name: read_stage(stage.root) for stage in run.stages}
    aligned = iter(align([*launchers, *(track for tracks in by_stage.values() for track in tracks)]))
    return Recorded(
        [next(aligned) for _ in launchers], {name: [next(aligned) for _ in tracks] for name, tracks in by_stage.items()}
    )


def spending(run: Run, recorded: Recorded) -> list[Spent]:
    """What each start of the run's launcher held, and did with it."""
    stages = {stage.name: stage for stage in run.stages}
    found = []
    for number, launcher in enumerate(recorded.launchers):
        last = number == len(recorded.launchers) - 1
        beat = int(run.state.time * 1e6) if last and run.state else 0
        nodes: dict[str, int] = {}
        attempts, end = [], max(launcher.end, beat)
        for mark in launcher.named(BEGINS):
            name = str(mark.more.get("stage", ""))
            attempt = int(mark.more.get("attempt", 0))
            if (stage := stages.get(name)) is None:
                continue
            tracks = recorded.stages.get(name, [])
            own = [track for track in tracks if track.attempt == attempt]
            over = next((span for span in launcher.named(ATTEMPT) if _same(span, name, attempt)), None)
            until = over.end if over else max([end, *(track.end for track in own)])
            end = max(end, until)
            plan = load_json(stage.root / "attempts" / str(attempt) / "plan.json", Plan, run.notes)
            for host, slots in hosts_of(stage, attempt, plan):
                nodes[host] = max(slots, nodes.get(host, 0))
            live = (
                over is None and last and run.state is not None and run.state.phase in ("running", "saving", "starting")
            )
            status = "running" if live else str(over.more.get("status", "")) if over else "killed"
            spent = spent_by(mark.begin, until, status, plan, own, _next_start(tracks, attempt))
            attempts.append(replace(spent, cause=stage.causes.get(attempt, "")))
        found.append(Spent(launcher.begin, end, nodes or {launcher.header.host: 0}, attempts))
    return found


def _same(span: Span, stage: str, attempt: int) -> bool:
    return span.more.get("stage", "") == stage and span.more.get("attempt") == attempt


def hosts_of(stage: StageFiles, attempt: int, plan: Plan | None) -> Iterator[tuple[str, int]]:
    """(host, slots) that an attempt held; those of its plan where nothing else is known."""
    try:
        hosts = read_json(stage.root / "attempts" / str(attempt) / HOSTS, list[Host])
        yield from ((host.name, host.slots) for host in hosts)
    except (OSError, Damaged):
        for host in plan.hosts if plan else ():
            yield host, plan.slots_on(host) if plan else 0


# ---- one attempt


def spent_by(
    begin: int, end: int, status: str, plan: Plan | None, tracks: Sequence[Track], next_start: int | None
) -> AttemptSpent:
    """An attempt that ended with `status` ("finished", "stopped", "running", or another where work may be lost).

    Args:
        next_start: the rollout from which a later attempt resumed; None if none did.
    """
    driver = next((track for track in tracks if track.role == "trainer" and track.header.index == 0), None)
    ready = driver.named(READY)[:1] if driver else []
    lost = None
    if status not in ("finished", "stopped", "running"):
        lost = lost_from(driver, next_start)
        lost = begin if lost is None else lost
    owners = list(_owners(plan, tracks, driver)) if plan else []
    kept = (
        sum(span.end - span.begin for span in driver.named(STEP) if lost is None or span.begin < lost) if driver else 0
    )
    return AttemptSpent(begin, end, ready[0].begin if ready else None, lost, owners, kept)


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
    later = [
        track
        for track in tracks
        if track.role == "trainer" and track.header.index == 0 and (track.attempt or 0) > attempt
    ]
    for track in sorted(later, key=lambda track: track.attempt or 0):
        if ready := track.named(READY):
            return int(ready[0].more.get("rollout_id", 0))
    return None


def _owners(plan: Plan, tracks: Sequence[Track], driver: Track | None) -> Iterator[Owner]:
    """Who had which slots, and did what there."""
    trainers = {track.header.index: track for track in tracks if track.role == "trainer"}
    by_host = {plan.trainers[rank].host: rank for rank in sorted(trainers, reverse=True) if rank < len(plan.trainers)}
    work = {rank: does(track) for rank, track in trainers.items()}
    for rank, place in enumerate(plan.trainers):
        known = rank if rank in work else by_host.get(place.host, 0)
        yield Owner(place.host, place.slots, work.get(known, []))
    rollouts = [track for track in tracks if track.role == "rollout"]
    for index, engine in enumerate(plan.engines):
        done = engine_work(tracks, index, len(plan.engines))
        for place in (engine, *engine.also):
            yield Owner(place.host, place.slots, done)
    yield Owner(plan.rollout.host, (), [piece for track in rollouts for piece in does(track)])


def engine_work(tracks: Sequence[Track], index: int, engines: int) -> Work:
    """What engine `index` of so many did, as its supervisor, the rollout process and the trainer saw it."""
    found: Work = []
    for track in tracks:
        if track.role == "rollout":
            found += generating(track, index, engines)
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
    found: Work = [(span.begin, span.end, wanted[span.name]) for span in track.spans if span.name in wanted]
    at = track.header.since or track.begin
    for name, spent in track.header.earlier.items():  # when is gone, how long is known
        if name in wanted:
            found.append((at, at + spent, wanted[name]))
            at += spent
    return found


def generating(track: Track, engine: int, engines: int) -> Work:
    """When an engine had requests, as the rollout process saw it."""
    found: Work = [
        (span.begin, span.end, "generating") for span in track.named(GENERATE) if span.more.get("engine") == engine
    ]
    if (earlier := track.header.earlier.get(GENERATE, 0)) and track.header.since is not None:
        found.append((track.header.since, track.header.since + earlier // engines, "generating"))
    return found
