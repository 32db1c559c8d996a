"""A run's timeline in the trace event format, for https://ui.perfetto.dev or chrome://tracing: one process a track.

Invariants: pure; what an engine was asked to do, which the rollout process alone sees, is shown on the engine's track;
events of one thread of a track nest, as the format demands: what overlaps otherwise gets another thread.

Source of the format: "Trace Event Format" (Chromium), events X (complete), i (instant), C (counter), M (metadata).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from hpcrl.report.timeline.names import GENERATE, order
from hpcrl.report.timeline.reading import Span, Track
from hpcrl.report.timeline.spans import ALIVE


def trace(tracks: Sequence[Track], title: str = "") -> dict[str, Any]:
    """The JSON object of a trace.  Times in microseconds from the first event, which `otherData` tells in unix time."""
    first = min((track.begin for track in tracks), default=0)
    hosts: dict[str, str] = {}
    by_track: dict[str, list[Span]] = {}
    for track in tracks:
        hosts.setdefault(track.name, track.header.host)
        for span in track.spans:
            owner = f"engine-{span.more.get('engine')}" if span.name == GENERATE else track.name
            by_track.setdefault(owner, []).append(_of(span, track.attempt))
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


def _of(span: Span, attempt: int | None) -> Span:
    return span if attempt is None else span._replace(more={"attempt": attempt} | span.more)


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
    """(thread, span), threads from 1: each span on the first where it lies within what is open there, or after it; by
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
