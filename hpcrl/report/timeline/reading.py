"""Timelines read back, a track a process, on one clock; and as trace events for https://ui.perfetto.dev or
chrome://tracing.

Invariants: it only reads; a line that is torn or damaged is left out; within a track nothing is reordered by the clock.

The clocks of hosts are aligned through the file system that holds the run directory: the process that makes a file
learns from its time of change how far the file system's clock is from its own, within the time that the call took.
Where the difference may be 0 (the clocks agree, or the file system takes the time from its clients, as Lustre does)
nothing is
moved: then it is as good as the hosts' own synchronisation, usually some milliseconds.

Of the trace ("Trace Event Format", Chromium: events X complete, i instant, C counter, M metadata): what an engine was
asked to do, which the rollout process alone sees, is shown on the engine's track; events of one thread of a track nest,
as the format demands: what overlaps otherwise gets another thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from hpcrl.report.run_files import Run
from hpcrl.report.timeline.spans import ALIVE, FOLDER, GENERATE, Header, merged_of, old_of, order
from hpcrl.utils.untrusted_files import MOST, SAMPLES, count_of, read_regular


class Span(NamedTuple):
    """One stretch of time of a process.

    Attributes:
        begin, end: microseconds of unix time.
        more: what else was said.
    """

    name: str
    begin: int
    end: int
    more: dict[str, Any]


@dataclass
class Track:
    """One process's spans, in the order in which they ended.

    Attributes:
        attempt: None of a launcher.
    """

    header: Header
    attempt: int | None
    spans: list[Span] = field(default_factory=list)

    @property
    def role(self) -> str:
        return self.header.role

    @property
    def name(self) -> str:
        where = f" of {self.header.host}" if self.role == "host" else ""
        return f"{self.role}{where}" if where or self.role == "launcher" else f"{self.role}-{self.header.index}"

    @property
    def begin(self) -> int:
        """When the process began to record."""
        return min([self.header.opened, *(span.begin for span in self.spans[:1])])

    @property
    def end(self) -> int:
        """The last that is known of the process."""
        return max([self.header.opened, *(span.end for span in self.spans)])

    def named(self, *names: str) -> list[Span]:
        """The spans of these names."""
        return [span for span in self.spans if span.name in names]


def read_stage(stage: Path) -> list[Track]:
    """The tracks of every attempt of a stage, by attempt, role and number."""
    found = []
    names = {path.name.removesuffix(".jsonl") for path in (stage / FOLDER).glob("attempt-*")}
    for name in names:
        number, folder = count_of(name.removeprefix("attempt-")), stage / FOLDER / name
        if number is None:
            continue
        if (merged := merged_of(folder)).is_file():
            found += _tracks(_rows(merged, SAMPLES), number)
            continue
        for path in folder.glob("*.jsonl"):
            if not path.name.endswith(".old.jsonl"):
                found += read_tracks(path, number)
    return sorted(found, key=lambda track: (track.attempt, track.role, track.header.index, track.header.opened))


def read_launchers(root: Path) -> list[Track]:
    """The tracks of every start of a run's launcher, in order."""
    paths = (path for path in (root / FOLDER).glob("launcher-*.jsonl") if not path.name.endswith(".old.jsonl"))
    return sorted((track for path in paths for track in read_tracks(path, None)), key=lambda track: track.header.opened)


def read_tracks(path: Path, attempt: int | None) -> list[Track]:
    """The tracks of a file: one, or one for each process that continued it; what was put aside comes first."""
    return _tracks(chain(_rows(old_of(path)), _rows(path)), attempt)


def _tracks(rows: Iterable[Header | Span], attempt: int | None) -> list[Track]:
    tracks: list[Track] = []
    for row in rows:
        if isinstance(row, Header):
            if tracks and row.part and _who(tracks[-1].header) == _who(row):  # the same process continues
                tracks[-1].header = msgspec.structs.replace(row, opened=tracks[-1].header.opened)
            else:
                tracks.append(Track(row, attempt))
        elif tracks:
            tracks[-1].spans.append(row)
    return tracks


def _who(header: Header) -> tuple[str, int, str, int]:
    return header.role, header.index, header.host, header.pid


def _rows(path: Path, most: int = MOST) -> Iterator[Header | Span]:
    header = msgspec.json.Decoder(Header).decode
    short, long = (
        msgspec.json.Decoder(kind).decode for kind in (tuple[str, int, int], tuple[str, int, int, dict[str, Any]])
    )
    try:
        lines = read_regular(path, most).split(b"\n")
    except OSError:
        return
    for line in lines[:-1]:
        try:
            if line.startswith(b"{"):
                yield header(line)
            elif line.endswith(b"}]"):
                yield Span(*long(line))
            elif line:
                yield Span(*short(line), {})
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue


# ---- a run


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


# ---- one clock


def offsets(headers: Iterable[Header]) -> dict[str, int]:
    """Microseconds by which the file system's clock is ahead of each host's; 0 where it may be so.

    Each file that was made on a host bounds the difference on both sides; all of them together leave an interval, whose
    middle counts. Where they leave none (a clock was set meanwhile), the host's clock is left alone.
    """
    bounds: dict[str, tuple[int, int]] = {}
    for header in headers:
        if header.least is not None and header.most is not None:
            low, high = bounds.get(header.host, (header.least, header.most))
            bounds[header.host] = max(low, header.least), min(high, header.most)
    return {host: 0 if low > high or low <= 0 <= high else (low + high) // 2 for host, (low, high) in bounds.items()}


def align(tracks: list[Track]) -> list[Track]:
    """The same tracks on the clock of the file system."""
    by = offsets(track.header for track in tracks)
    return [_moved(track, by[track.header.host]) if by.get(track.header.host) else track for track in tracks]


def _moved(track: Track, by: int) -> Track:
    header = msgspec.structs.replace(track.header, opened=track.header.opened + by)
    return Track(
        header, track.attempt, [span._replace(begin=span.begin + by, end=span.end + by) for span in track.spans]
    )


# ---- as trace events


def trace(tracks: Sequence[Track], title: str = "") -> dict[str, Any]:
    """The JSON object of a trace.  Times in microseconds from the first event, which `otherData` tells in unix time."""
    first = min((track.begin for track in tracks), default=0)
    hosts: dict[str, str] = {}
    by_track: dict[str, list[Span]] = {}
    for track in tracks:
        hosts.setdefault(track.name, track.header.host)
        for span in track.spans:
            owner = f"engine-{span.more.get('engine')}" if span.name == GENERATE else track.name
            of = {} if track.attempt is None else {"attempt": track.attempt}
            by_track.setdefault(owner, []).append(span._replace(more=of | span.more))
    events: list[dict[str, Any]] = []
    for number, name in enumerate(sorted(by_track, key=order), 1):
        where = f" ({hosts[name]})" if hosts.get(name) and hosts[name] not in name else ""
        events += [
            {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": f"{name}{where}"}},
            {"ph": "M", "name": "process_sort_index", "pid": number, "tid": 0, "args": {"sort_index": number}},
            *_events(by_track[name], number, first),
        ]
    about = {"title": title, "began": first / 1e6, "clock": "the file system's that holds the run directory"}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _events(spans: Iterable[Span], process: int, first: int) -> Iterator[dict[str, Any]]:
    """The events of one track."""
    lasting = []
    for span in spans:
        at = {"name": span.name, "pid": process, "ts": span.begin - first}
        if span.name.startswith("#"):
            values = {name: value for name, value in span.more.items() if name != "attempt"}
            yield at | {"ph": "C", "name": span.name[1:], "args": values}
        elif span.end > span.begin:
            lasting.append(span)
        elif span.name != ALIVE:
            yield at | {"ph": "i", "s": "p", "tid": 1, "args": span.more}
    for lane, span in lanes(lasting):
        at = {"name": span.name, "pid": process, "tid": lane, "ts": span.begin - first}
        yield at | {"ph": "X", "dur": span.end - span.begin, "args": span.more}


def lanes(spans: Iterable[Span]) -> Iterator[tuple[int, Span]]:
    """(thread, span), threads from 1: each span on the first where it fits within what is open there, or after it; by
    begin."""
    open_: list[list[int]] = []  # of each thread, the ends of what is open, the outermost first
    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        for number, ends in enumerate(open_):
            while ends and ends[-1] <= span.begin:
                ends.pop()
            if not ends or span.end <= ends[-1]:
                ends.append(span.end)
                yield number + 1, span
                break
        else:
            open_.append([span.end])
            yield len(open_), span
