"""Weights & Biases: a run of its own for each stage, continued each time; WANDB_MODE=offline leaves it in the stage's
directory, for `wandb sync`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hpcrl.report.trackers.record import COLUMNS, TrackedStage


@contextmanager
def opened(stage: TrackedStage) -> Iterator[Callable[[TrackedStage], str]]:
    """A function that logs what is new, and returns the page of the run, or its directory."""
    import wandb

    run = wandb.init(
        project=stage.project,
        name=stage.name,
        id=stage.identity,
        resume="allow",
        dir=str(stage.root),
        group=stage.options.get("wandb_group"),
        config=dict(stage.options),
    )
    run.define_metric("step")
    run.define_metric("*", step_metric="step")  # a resumed run repeats steps, which wandb's own count would refuse

    def send(stage: TrackedStage) -> str:
        for step, values in stage.rows:
            run.log({"step": step, **values})
        if stage.samples:
            run.log({"samples": wandb.Table(columns=list(COLUMNS), data=stage.samples)})
        if stage.report is not None:
            page = wandb.Artifact(f"report-{stage.identity}", type="report")
            page.add_file(str(stage.report))
            run.log_artifact(page)
        return str(run.url or run.dir)

    yield send
    run.finish()
