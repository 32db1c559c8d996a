"""Engines as text: a table of them, and a line for the page of their run.

Invariant: pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hpcrl.report.run_status import span
from hpcrl.run.engine_files import EngineView, EngineViews

OLD = 30.0  #: seconds after which what was said of engines is no longer news
HEAD = ("ENGINE", "STATE", "HOST", "VERSION", "REQUESTS", "RESTARTS", "")


def engine_table(views: EngineViews, now: float) -> str:
    """One line an engine; now: unix time."""
    rows = [HEAD, *(_row(view) for view in views.engines)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if now - views.time > OLD:
        lines.append(f"(as of {span(now - views.time)} ago)")
    return "\n".join(lines)


def _row(view: EngineView) -> tuple[str, ...]:
    version = "-" if view.version is None else str(view.version)
    return (str(view.index), view.state, view.host, version, str(view.requests), str(view.restarts), view.why)


def engine_line(engines: Sequence[EngineView]) -> str:
    """3 serving, 1 ended; 2 restarts.  Nothing for none."""
    counts = Counter(view.state for view in engines)
    states = ", ".join(f"{count} {state}" for state, count in counts.most_common())
    restarts = sum(view.restarts for view in engines)
    return states + (f"; {restarts} restart{'s' if restarts > 1 else ''}" if restarts else "")
