"""Send a run's metrics to a tracker while they are written: `--use-wandb` and `--report-to`.

    python -m hpcrl.report.trackers.live RUN TRACKER       started next to the rollout process, which ends it

Invariants: each tracker has a process of its own, so that none can slow or stop the run; the first error is one warning
and ends that process, and `hpcrl report RUN --to TRACKER` sends the rest later; the last records are sent when the
attempt ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from subprocess import DEVNULL

import psutil

from hpcrl.config.options import Options
from hpcrl.errors import DeadlineError
from hpcrl.report.progress import say
from hpcrl.report.run_files import Run
from hpcrl.report.trackers.record import Sender
from hpcrl.run.process import PARENT, die_with_parent, end_processes
from hpcrl.run.started_runs import is_run

LOOK = 5.0  #: seconds between two looks at the metrics
PARTING = 8.0  #: seconds that the last records may take: fewer than the host waits for its last role


def trackers_of(options: Options) -> list[str]:
    """The trackers that get the metrics of a run, each once."""
    wandb = ["wandb"] if options.use_wandb else []
    found = dict.fromkeys([*wandb, *options.report_to])
    return [name for name in found if name != "wandb" or options.wandb_mode != "disabled"]


@contextlib.contextmanager
def sending_live(options: Options, stage: Path) -> Iterator[None]:
    """Send the run's metrics to every tracker while in this context.

    Args:
        stage: the directory of a stage, or of a run without stages.
    """
    root = stage if is_run(stage) else stage.parent
    environment = os.environ | {PARENT: str(os.getpid())}
    environment |= {"WANDB_MODE": options.wandb_mode} if options.wandb_mode else {}
    words = [sys.executable, "-m", "hpcrl.report.trackers.live", str(root)]
    started = [psutil.Popen([*words, name], stdin=DEVNULL, env=environment) for name in trackers_of(options)]
    try:
        yield
    finally:
        end_processes(started, PARTING)


def follow(root: Path, tracker: str, asked: threading.Event) -> None:
    """Send what is new until asked to end, and then once more."""
    sender = Sender(tracker)
    ends = False
    while not ends:
        ends = asked.wait(LOOK)
        with contextlib.suppress(DeadlineError):  # another tracker's process is sending: the next look sends more
            deque(sender.send_new(Run(root), None, last=ends), maxlen=0)


def main(argv: list[str]) -> int:
    die_with_parent()
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    root, tracker = Path(argv[0]), argv[1]
    try:
        follow(root, tracker, asked)
    except Exception as error:  # noqa: BLE001  (a tracker never stops a run)
        what = str(error) or type(error).__name__
        say(f"warning: {what}; the run continues, and hpcrl report {root} --to {tracker} sends its metrics later")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
