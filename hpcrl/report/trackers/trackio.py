"""trackio: the metrics of each stage as one of its runs, on this machine (`trackio show`) or in the Space that
TRACKIO_SPACE_ID names; it takes no report."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hpcrl.report.trackers.record import COLUMNS, TrackedStage

NEEDS = ("trackio", "pandas")  #: it makes its tables of DataFrames


@contextmanager
def opened(stage: TrackedStage) -> Iterator[Callable[[TrackedStage], str]]:
    """A function that logs what is new, and returns what the run is called there."""
    import trackio

    trackio.init(
        project=stage.project,
        name=f"{stage.name.replace('/', '-')}-{stage.identity[:6]}",
        space_id=os.environ.get("TRACKIO_SPACE_ID"),
        config=dict(stage.options),
        resume="allow",
    )

    def send(stage: TrackedStage) -> str:
        for step, values in stage.rows:
            trackio.log(values, step=step)
        if stage.samples:
            import pandas

            table = trackio.Table(dataframe=pandas.DataFrame(stage.samples, columns=list(COLUMNS)))
            trackio.log({"samples": table}, step=stage.rows[-1][0] if stage.rows else None)
        return f"{stage.project}: {stage.name}"

    yield send
    trackio.finish()
