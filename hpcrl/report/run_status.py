"""What a run is doing: the run directory and, where there is a job, Slurm's word, judged into one Status.

Phases: `pending` (waits in the queue), `preparing`, `starting`, `running`, `saving`, `ending`, `requeued`
(ended early, to be started again), `finished`, `stopped` (saved; can be resumed), `failed`, `cancelled`, and `lost`: it
should be at work and gives no sign of life.

Invariant: pure, except that it reads the directory; a launcher's word counts only as long as it is fresh, or final and
newer than the job that is in the queue now.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from hpcrl.errors import CodeError, HpcrlError
from hpcrl.plan import Plan
from hpcrl.report.metrics import (
    WINDOW,
    evaluated,
    held_out_means,
    measure,
    number,
    seconds_left,
    step_rows,
    step_time,
    tokens_per_sec,
)
from hpcrl.report.not_learning import notes_of
from hpcrl.report.run_files import Run, StageFiles
from hpcrl.run.attempt_log import Fault
from hpcrl.run.engine_files import EngineView
from hpcrl.run.job_files import CANCEL, CANCELLED, OVER, STOP, SUBMITTING, WORKING, JobState
from hpcrl.run.peers import EnginePeer, StorePeer, TrainerPeer, peer_file, role_of
from hpcrl.run.queued_job import QueuedJob
from hpcrl.run.rundir import RunDir, listed
from hpcrl.run.skipped_checkpoints import read_passed_over
from hpcrl.run.started_runs import LIVE
from hpcrl.utils.untrusted_files import Damaged, read_json

FRESH = 60.0  #: seconds for which a launcher's word is good: it repeats it every 10 s
OVERDUE = 25.0  #: seconds after which it is said that it has not repeated it
SKEW = 30.0  #: seconds by which the clocks of hosts may differ
RESTARTED = "Slurm has started it again; its launcher has not written anything yet"
#: bytes at the end of metrics.jsonl, and records among them, that count in a list and for one run
BRIEF, LONG = (24 << 10, WINDOW + 4), (1 << 20, 1 << 20)


class Status(msgspec.Struct):
    """One run, for a table, a screen or a program (`--json`).  Times are seconds, rates per second; None: not known."""

    run: str
    phase: str
    message: str = ""  #: the error with its hint, why it waits, or what else there is to know
    scheduler: str = "local"
    job_id: str | None = None
    job_state: str | None = None  #: in Slurm's own word
    host: str = ""  #: where the launcher runs
    stage: str = ""
    stages: list[str] = []  #: all of the recipe's
    attempt: int | None = None
    restarts: int = 0
    step: int = 0
    total: int | None = None
    reward: float | None = None
    loss: float | None = None
    tokens_per_sec: float | None = None
    trained_per_sec: float | None = None  #: tokens, while the trainer trains
    step_per_gpu: float | None = None  #: tokens a second and a GPU of the run, over the whole step
    mfu: float | None = None
    rated: str = ""  #: the trainer's GPU and what it is rated for, where MFU is known
    staleness: float | None = None
    accuracy: dict[str, float] = {}
    measure: str = "accuracy"  #: what that is: "reward" where rewards are not all 0 or 1
    accuracy_after: int | None = None  #: how many steps had been done at that evaluation
    awaits: str = ""  #: what a run that is starting waits for
    numbers_notes: list[str] = []  #: failed gradings, and signs that nothing is learned
    sandboxes: str = ""  #: by state, how long callers wait, failures by cause
    faults: list[Fault] = []  #: attempts of this stage that have failed
    engines: list[EngineView] = []  #: as long as the run is at work
    step_time: float | None = None
    last_step: float | None = None  #: age of the last step
    silent: float | None = None  #: age of the launcher's last word
    needs: float | None = None  #: to the end of this stage
    left: float | None = None  #: to the time limit
    fits: bool | None = None  #: whether the stage will end before the time limit
    log: str = ""  #: the log to read first
    next: str = ""  #: what to do, once it is not at work
    stop_asked: bool = False
    notes: list[str] = []

    @property
    def queued(self) -> bool:
        """Whether it is a Slurm job."""
        return self.scheduler == "slurm"


def judge_run(
    run: Run,
    now: float,
    queued: QueuedJob | None = None,
    here: bool | None = None,
    brief: bool = False,
) -> Status:
    """The status of a run.

    Args:
        now: unix time.
        queued: Slurm's word on the job, None if it could not be asked.
        here: whether the launcher's process lives on this host (None: it may be on another).
        brief: the recipe's stages are left out.
    """
    job = run.job
    state = run.state
    stage = run.stage
    phase, message = _phase(run, now, queued, here)
    if phase == "cancelled" and stage and (saved := stage.saved) is not None:
        message = f"{message or phase}; it resumes after step {saved}"
    status = Status(os.fsencode(run.root).decode(errors="replace"), phase, message, notes=run.notes)
    if job:
        status.scheduler = job.scheduler
        status.job_id = job.job_id
    if queued and queued.phase != "gone":
        status.job_state = queued.word
    if state:
        status.host = state.host if phase != "pending" else ""
        status.restarts = state.restarts
        status.silent = max(0.0, now - state.time)
    if stage:
        _numbers(status, stage, now, *(BRIEF if brief else LONG))
    if not brief:
        if os.path.lexists(run.root / LIVE):
            status.notes.append("custom functions are imported from where they are, not from copies (--live-code)")
        if stage:
            stage.notes += [f"attempt {one.attempt}: {one.text}" for one in read_passed_over(stage.root)]
            status.faults = stage.faults
            status.numbers_notes = notes_of(stage.root, stage.rows(*LONG))
            status.sandboxes = sandbox_line(stage.rows(*LONG))
        status.stages = run.planned
        if phase == "starting" and message != RESTARTED and stage and stage.attempt is not None:
            status.awaits = awaited(RunDir(stage.root, stage.attempt))
        if phase in WORKING and message != RESTARTED and stage and stage.engines:
            status.engines = stage.engines.engines
    if phase == "failed":
        status.log = str(run.log)
    if phase in ("stopped", "failed", "cancelled", "lost"):
        ways = {"mpirun": "hpcrl launch --resume {} --hostfile FILE"}
        if job and job.queued and job.site is None:  # it was not hpcrl that submitted it
            ways["slurm"] = "give Slurm its script again: SCRIPT --run-dir {}"
        again = ways.get(status.scheduler, "hpcrl resume {}").format(status.run)
        status.next = again
        if phase == "failed" and stage and stage.failure and stage.failure.kind == CodeError.__name__:
            from hpcrl.run.code_files import how_to_fix  # imports asyncio, which other runs do without

            status.next = how_to_fix(run.root, stage.failure, again) or again
    status.stop_asked = (run.root / STOP).exists() and phase in WORKING
    ends = (queued and queued.ends) or (state and state.ends)
    if ends and phase in WORKING:
        status.left = max(0.0, ends - now)
        status.fits = None if status.needs is None else status.needs <= status.left
    return status


# ---- the phase


def _phase(run: Run, now: float, queued: QueuedJob | None, here: bool | None) -> tuple[str, str]:
    """(phase, message)."""
    state, job = run.state, run.job
    if queued and queued.phase == "pending":
        return "pending", f"will never start: {queued.reason}" if queued.never else queued.reason
    if queued and queued.ending and (state is None or state.phase in WORKING):
        saving = state is not None and state.phase == "saving"
        return "saving" if saving else "ending", "Slurm is ending its last start"
    since = job.submitted - SKEW if job else 0.0
    if queued and queued.start is not None:
        since = max(since, queued.start - (SKEW if queued.phase == "ended" else 5.0))
    if state is None or state.time < since:  # or it is the word of an earlier start
        return _without_word(run, now, queued, here, since)
    if state.phase in OVER:
        if state.phase == "stopped" and queued and queued.outcome == "cancelled" and not (run.root / STOP).exists():
            return "cancelled", queued.reason  # its launcher cannot tell this signal from that of a stop
        return state.phase, _error(run.stage, state) if state.phase == "failed" else state.message
    if queued and queued.phase == "ended":
        return _ended(run, queued, since)
    if state.phase == "requeued" and not (queued and queued.phase == "gone"):
        return "requeued", state.message or "it continues when Slurm starts it again"
    if now - state.time <= FRESH and here is not False:
        overdue = f"no word from its launcher for {span(now - state.time)}" if now - state.time > OVERDUE else ""
        return (state.phase if state.phase in WORKING else "running"), state.message or overdue
    if (run.root / CANCEL).exists():
        return "cancelled", CANCELLED
    return "lost", _silence(now - state.time, queued, state.host, here)


def _without_word(run: Run, now: float, queued: QueuedJob | None, here: bool | None, since: float) -> tuple[str, str]:
    """The phase of a run whose launcher has not said anything `since`: not yet, or it is older than state.json."""
    if queued and queued.phase == "ended":
        return _ended(run, queued, since)
    stage = run.stage
    if run.job and queued:
        if queued.phase == "gone":
            return "lost", f"Slurm knows no job {run.job.job_id} of this run"
        return "starting", RESTARTED if run.state else ""
    if run.job and run.job.queued and not run.job.job_id and now - run.job.submitted < SUBMITTING:
        return "pending", "it is being submitted"
    if run.job and run.job.queued and not run.job.job_id:
        return "lost", f"its submission was cut short; hpcrl resume {run.root} submits it"
    if run.job and run.job.queued:
        return "pending", "submitted; Slurm is not here to say more"
    if stage is None or stage.attempt is None:
        if here:
            return ("preparing" if stage is None else "starting"), ""
        return "lost", "it has not begun, and no process of it is known here"
    if here:
        return ("starting" if stage.trainer_record is None else "running"), ""
    if stage.failure:
        return "failed", _error(stage, None)
    if (summary := stage.summary) and summary.attempt == stage.attempt:
        if not summary.finished:
            return "stopped", f"saved after {summary.rollout_id} of {summary.total} steps"
        if not run.planned or run.planned[-1] == stage.name:
            return "finished", ""
        return "lost", f"stage {stage.name} is done, the next has not begun, and no process of it is known here"
    last = [row["time"] for row in stage.rows(*BRIEF) if number(row.get("time"))]
    if last and now - last[-1] <= FRESH and here is None:
        return "running", ""
    return "lost", _silence(now - last[-1], queued, "", here) if last else "no process of it is known here"


def _ended(run: Run, queued: QueuedJob, since: float) -> tuple[str, str]:
    """What Slurm says of a job whose launcher had no time to say anything."""
    found = run.stage.failure if run.stage and queued.outcome == "failed" else None
    if found is None or found.time < since:
        return queued.outcome, queued.reason
    return queued.outcome, f"{queued.reason} (first seen as: {found})" if queued.cause else str(found)


def _error(stage: StageFiles | None, state: JobState | None) -> str:
    """The first error of the last attempt, or what the launcher ended with."""
    failure = stage.failure if stage else None
    if failure and (state is None or stage.attempt == state.attempt):
        return str(failure)
    return state.message if state else ""


def _silence(age: float, queued: QueuedJob | None, host: str, here: bool | None) -> str:
    """Why a run counts as lost."""
    if here is False and host:
        return f"its launcher on {host} is gone, {span(age)} after its last heartbeat"
    what = f"no sign of life for {span(age)}" + (f" (its launcher was on {host})" if host else "")
    if queued:
        return what + (
            ", and Slurm has no job of it" if queued.phase == "gone" else f", though Slurm says {queued.word}"
        )
    return what


# ---- the numbers


def _numbers(status: Status, stage: StageFiles, now: float, size: int, most: int) -> None:
    """Fill in what the stage has logged."""
    rows, settings = stage.rows(size, most), stage.settings
    status.stage = stage.name
    status.attempt = stage.attempt
    begun = stage.trainer_record
    status.total = (begun and begun.total) or (stage.summary and stage.summary.total) or settings.num_rollout
    status.step = begun.start if begun else 0
    if begun and begun.tflops:
        status.rated = f"{begun.device}: {begun.tflops:.0f} TFLOP/s in BF16"
    if steps := step_rows(rows):
        _last_step(status, steps[-1], now)
    status.step_time = step_time(rows)
    status.measure = measure(rows)
    for row in rows:
        if evaluated(row):
            status.accuracy = held_out_means(row)
            status.accuracy_after = row["rollout_id"] + 1
    if status.total and status.phase in WORKING:
        status.needs = seconds_left(
            rows, status.step, status.total, settings.save_interval, settings.eval_interval, now
        )


def _last_step(status: Status, row: dict[str, Any], now: float) -> None:
    get = {name: value for name, value in row.items() if number(value)}.get
    status.step = max(status.step, row["rollout_id"] + 1)
    status.reward = get("rollout/reward")
    status.loss = get("train/loss")
    status.staleness = get("staleness/max")
    status.tokens_per_sec = tokens_per_sec(row)
    if get("perf/tokens_per_sec") is not None:  # else nothing was sampled
        status.trained_per_sec = get("perf/train_tokens_per_sec")
    status.step_per_gpu = get("perf/step_tokens_per_sec_per_gpu")
    status.mfu = get("perf/mfu")
    if get("time"):
        status.last_step = max(0.0, now - get("time"))


def sandbox_line(rows: Sequence[dict[str, Any]]) -> str:
    """How many were in which state in the last step, how long callers waited, and failures of all steps by cause; ""
    where there are no sandboxes.

    Args:
        rows: records of metrics.jsonl, in order: all, or the last of them.
    """
    steps = [row for row in step_rows(rows) if number(row.get("sandbox/used"))]
    if not steps:
        return ""
    get = {name.removeprefix("sandbox/"): value for name, value in steps[-1].items() if number(value)}.get
    text = f"{get('used', 0):.1f} in use, {get('warm', 0):.1f} warm, {get('making', 0):.1f} being made"
    text += f"; {get('wait_time', 0.0):.2g} s until one is ready"
    failures: Counter[str] = Counter()
    for row in steps:
        for name, value in row.items():
            if name.startswith("sandbox/failures/") and number(value):
                failures[name.removeprefix("sandbox/failures/")] += round(value)
    since = f" since step {steps[0]['rollout_id']}" if rows[0]["rollout_id"] > 0 else ""
    known = ", ".join(f"{count} {cause}" for cause, count in failures.most_common() if count)
    return f"{text}; failures: {known}{since}" if known else text


def span(seconds: float) -> str:
    """A length of time in at most two units: 20 ms, 4.2 s, 42 s, 5 min 10 s, 2 h 3 min, 4 d 1 h; "?" if it is no
    number."""
    if not number(seconds):
        return "?"
    whole = int(seconds)
    if whole < 1:
        return f"{seconds * 1000:.0f} ms"
    for unit, size, lower, small in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            first, rest = divmod(whole, size)
            return f"{first} {unit}" + (f" {rest // small} {lower}" if rest // small else "")
    return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"


# ---- what a starting run waits for

_ENGINE = re.compile(rf"{role_of(EnginePeer)}-(\d+)\.")


def awaited(rundir: RunDir) -> str:
    """`waiting for engines, 1 of 4 up`; of an attempt that is up `first step`, which it is until a step is logged."""
    try:
        plan = read_json(rundir.plan_file, Plan)
        names = listed(rundir.here / "peers")
    except (OSError, Damaged, HpcrlError):
        return "looking for hosts"
    if peer_file(rundir.here, TrainerPeer, 0).name in names:
        return "first step"
    if plan.trainers and peer_file(rundir.here, StorePeer, 0).name not in names:
        return "starting processes"
    up = len({match[1] for name in names if (match := _ENGINE.match(name))})
    if up < len(plan.engines):
        return f"waiting for engines, {up} of {len(plan.engines)} up"
    return "loading the model" if plan.trainers else "loading the prompts"
