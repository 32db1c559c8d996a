"""MLflow: a run for each stage, found again by a tag, at MLFLOW_TRACKING_URI."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hpcrl.report.trackers.record import COLUMNS, TrackedStage

TAG = "hpcrl.identity"
NOT_TAKEN = re.compile(r"[^\w\-. /:]")  #: in the name of a metric, such as pass@8
LONGEST = 500  #: characters of an option's value that MLflow takes


@contextmanager
def opened(stage: TrackedStage) -> Iterator[Callable[[TrackedStage], str]]:
    """A function that logs what is new, and returns the run's identifier there."""
    import mlflow

    experiment = mlflow.set_experiment(stage.project)
    search = f"tags.`{TAG}` = '{stage.identity}'"
    known = mlflow.search_runs([experiment.experiment_id], search, output_format="list")
    again = known[0].info.run_id if known else None
    with mlflow.start_run(run_id=again, run_name=stage.name, tags={TAG: stage.identity}) as run:
        if again is None:
            mlflow.log_params({name: json.dumps(value)[:LONGEST] for name, value in stage.options.items()})

        def send(stage: TrackedStage) -> str:
            for step, values in stage.rows:
                mlflow.log_metrics({NOT_TAKEN.sub("_", name): value for name, value in values.items()}, step=step)
            if stage.samples:
                rows = [dict(zip(COLUMNS, row, strict=True)) for row in stage.samples]
                mlflow.log_dict({"samples": rows}, "samples.json")
            if stage.report is not None:
                mlflow.log_artifact(str(stage.report))
            return str(run.info.run_id)

        yield send
