"""What is reported of an attempt while it runs: on the screen, in state.json, in the launcher's timeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from hpcrl.config.recipe import Stage
from hpcrl.errors import HpcrlError, Stopped
from hpcrl.report.progress import Progress
from hpcrl.report.timeline.spans import ATTEMPT, BEGINS, Timeline
from hpcrl.run.attempt_log import note_ready
from hpcrl.run.job_files import JobStateFile
from hpcrl.run.peers import TrainerPeer, find
from hpcrl.run.rundir import RunDir
from hpcrl.run.summary import read_summary


@contextmanager
def observe(
    rundir: RunDir, stage: Stage, title: str, total: int | None, state: JobStateFile, timeline: Timeline
) -> Iterator[Callable[[], None]]:
    """Tell of an attempt, on the screen, in state.json and in the timeline; gives what is called again and again."""
    state.set("starting", stage=stage.name, attempt=rundir.attempt, message="")
    about = {"stage": stage.name, "attempt": rundir.attempt}
    timeline.mark(BEGINS, **about)
    begun, status, ready = timeline.now(), "failed", False
    try:
        with closing(Progress(rundir, title, total)) as progress:

            def look() -> None:
                nonlocal ready
                progress.poll()
                if not ready and (peer := find(rundir, TrainerPeer)):
                    ready = True
                    note_ready(rundir, peer.start)
                    if state.phase == "starting":
                        state.set("running")

            yield look
        status = summary.status if (summary := read_summary(rundir.root)) else status
    except Stopped:
        status = "stopped"
        raise
    except HpcrlError:
        state.set("starting", message=f"attempt {rundir.attempt} failed; looking for the host at fault")
        raise
    finally:
        timeline.add(ATTEMPT, begun, timeline.now(), status=status, **about)
