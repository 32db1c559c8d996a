"""Timelines read back: a track a process, on one clock.

Invariants: it only reads; a line that is torn or damaged is left out; within a track nothing is reordered by the clock.

The clocks of hosts are aligned through the file system that holds the run directory: whoever makes a file learns from
its time of change how far the file system's clock is from its own, within the time that the call took.  Where the
difference may be 0 (the clocks agree, or the file system takes the time from its clients, as Lustre does) nothing is
moved: then it is as good as the hosts' own synchronisation, usually some milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from hpcrl.careful_files import read_regular
from hpcrl.report.timeline.spans import FOLDER, Header, old_of


class Span(NamedTuple):
    """begin, end: microseconds of unix time; more: what else was said."""

    name: str
    begin: int
    end: int
    more: dict[str, Any]


@dataclass
class Track:
    """One process's spans, in the order in which they ended.  attempt: None of a launcher."""

    header: Header
    attempt: int | None
    spans: list[Span] = field(default_factory=list)

    @property
    def role(self) -> str:
        return self.header.role

    @property
    def name(self) -> str:
        where = f" of {self.header.host}" if self.role in ("host", "joined") else ""
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
    for folder in (stage / FOLDER).glob("attempt-*"):
        number = folder.name.removeprefix("attempt-")
        if number.isdigit():
            for path in folder.glob("*.jsonl"):
                if not path.name.endswith(".old.jsonl"):
                    found += read_tracks(path, int(number))
    return sorted(found, key=lambda track: (track.attempt, track.role, track.header.index, track.header.opened))


def read_launchers(root: Path) -> list[Track]:
    """The tracks of every start of a run's launcher, in order."""
    paths = (path for path in (root / FOLDER).glob("launcher-*.jsonl") if not path.name.endswith(".old.jsonl"))
    return sorted((track for path in paths for track in read_tracks(path, None)), key=lambda track: track.header.opened)


def read_tracks(path: Path, attempt: int | None) -> list[Track]:
    """The tracks of a file: one, or one for each process that went on with it; what was put aside comes first."""
    tracks: list[Track] = []
    for part in (old_of(path), path):
        for row in _rows(part):
            if isinstance(row, Header):
                if tracks and row.part and tracks[-1].header.pid == row.pid:  # the same process goes on
                    opened = tracks[-1].header.opened
                    row = msgspec.structs.replace(row, opened=opened)
                    tracks[-1].header = row
                else:
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
        lines = read_regular(path).split(b"\n")
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
