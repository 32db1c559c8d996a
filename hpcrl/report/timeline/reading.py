"""Timelines read back, a track a process; and as trace events for https://ui.perfetto.dev or chrome://tracing.

Invariants: it only reads; a line that is torn or damaged is left out; within a track nothing is reordered by the clock.
Times are those of each host's own clock: `hpcrl doctor --nodes` says where clocks differ.

Of the trace ("Trace Event Format", Chromium: events X complete, i instant, C counter, M metadata): what an engine was
asked to do, which the rollout process alone sees, is shown on the engine's track; events of one thread of a track nest,
as the format demands: what overlaps otherwise gets another thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from hpcrl.report.run_files import Run
from hpcrl.report.timeline.spans import ALIVE, FOLDER, GENERATE, Header, merged_of, order
from hpcrl.utils.untrusted_files import SAMPLES, count_of, read_regular


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
        if number is not None:
            merged = merged_of(folder)
            for path in [merged] if merged.is_file() else folder.glob("*.jsonl"):
                found += read_tracks(path, number)
    return sorted(found, key=lambda track: (track.attempt, track.role, track.header.index, track.header.opened))


def read_launchers(root: Path) -> list[Track]:
    """The tracks of every start of a run's launcher, in order."""
    paths = (root / FOLDER).glob("launcher-*.jsonl")
    return sorted((track for path in paths for track in read_tracks(path, None)), key=lambda track: track.header.opened)


def read_tracks(path: Path, attempt: int | None) -> list[Track]:
    """The tracks of a file, one for each process that has written it."""
    tracks: list[Track] = []
    for row in _rows(path):
        if isinstance(row, Header):
            tracks.append(Track(row, attempt))
        elif tracks:
            tracks[-1].spans.append(row)
    return tracks


def _rows(path: Path) -> Iterator[Header | Span]:
    header = msgspec.json.Decoder(Header).decode
    short, long = (
        msgspec.json.Decoder(kind).decode for kind in (tuple[str, int, int], tuple[str, int, int, dict[str, Any]])
    )
    try:
        lines = read_regular(path, SAMPLES).split(b"\n")
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
    """Every track of a run: the launcher's, by start, and the stages', by name."""

    launchers: list[Track]
    stages: dict[str, list[Track]]

    @property
    def tracks(self) -> list[Track]:
        return [*self.launchers, *(track for tracks in self.stages.values() for track in tracks)]


def read_run(run: Run) -> Recorded:
    """All timelines of a run."""
    return Recorded(read_launchers(run.root), {stage.name: read_stage(stage.root) for stage in run.stages})


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
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"title": title, "began": first / 1e6}}


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
