"""trackio: the metrics of each stage as one of its runs, on this machine (`trackio show`) or in the Space that
TRACKIO_SPACE_ID names; it takes no report."""

from __future__ import annotations

import os

from hpcrl.report.trackers.record import COLUMNS, TrackedStage

NEEDS = ("trackio", "pandas")  #: it makes its tables of DataFrames


def send(stage: TrackedStage) -> str:
    """Log what is new; returns what it is called there."""
    import trackio

    trackio.init(
        project=stage.project,
        name=f"{stage.name.replace('/', '-')}-{stage.identity[:6]}",
        space_id=os.environ.get("TRACKIO_SPACE_ID"),
        config=dict(stage.options),
        resume="allow",
    )
    for step, values in stage.rows:
        trackio.log(values, step=step)
    if stage.samples:
        import pandas

        table = trackio.Table(dataframe=pandas.DataFrame(stage.samples, columns=list(COLUMNS)))
        trackio.log({"samples": table}, step=stage.rows[-1][0])
    trackio.finish()
    return f"{stage.project}: {stage.name}"
