"""Submit, status, stop, resume, requeue and cancel, on real runs, over a fake Slurm and over real Slurm."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.support.batch import Queue, Submitted, over_queues, over_queues_in_core
from tests.support.runs import SFT, metrics, recipe

STEPS = 200  #: of a run that commands must reach before it ends: a tenth of a second each on a quiet machine
LONG = {"num_rollout": STEPS, "rollout_batch_size": 32, "save_interval": None}


def sft(queue: Queue, path: Path, task: Path, **values: object) -> Path:
    path.mkdir(exist_ok=True)
    return recipe(path, task, **(SFT | dict(queue.shape) | values))


@over_queues
def test_a_job_waits_says_why_runs_and_ends(queue: Queue, tmp_path: Path, task: Path) -> None:
    run = queue.submit(sft(queue, tmp_path, task), tmp_path / "run", settings=queue.held)
    waiting = run.status()
    assert (waiting["phase"], waiting["scheduler"]) == ("pending", "slurm")
    assert waiting["message"].startswith("held") and waiting["job_id"] == run.number, waiting
    page = queue.hpcrl("status", run.root).stdout
    assert f"Slurm job {run.number}" in page, page
    refused = queue.hpcrl("stop", run.root, check=False)
    assert refused.returncode == 1 and "queue with hpcrl cancel" in refused.stderr
    refused = queue.hpcrl("resume", run.root, check=False)
    assert refused.returncode == 2 and f"its job {run.number} is {waiting['job_state'].lower()}" in refused.stderr
    queue.release(run)
    watched = queue.hpcrl("watch", run.root)
    assert watched.stdout.splitlines()[-1].split()[1:3] == ["finished", "6/6"], watched.stdout
    assert list(metrics(run.root)) == list(range(6))
    run.until(lambda: not queue.processes(run), 60)
    assert run.status()["phase"] == "finished"
    assert json.loads((run.root / "job.json").read_text())["scheduler"] == "slurm"
    for verb in ("stop", "cancel"):
        refused = queue.hpcrl(verb, run.root, check=False)
        assert refused.returncode == 1 and "finished" in refused.stderr
    refused = queue.hpcrl("resume", run.root, check=False)
    assert refused.returncode == 2 and "finished" in refused.stderr


@over_queues_in_core
def test_requeued_stopped_and_resumed(queue: Queue, tmp_path: Path, task: Path) -> None:
    """Near its limit a run saves and is requeued; stopped, it saves, and `hpcrl resume` submits it again."""
    path = sft(queue, tmp_path, task, **LONG | {"num_rollout": 100000})
    run = queue.submit(path, tmp_path / "run", "--rollout-batch-size", "16")
    run.until(lambda: run.training(0))
    queue.cut(run)
    run.until(lambda: "queued again" in run.output())
    queue.lengthen(run)
    assert "time limit is near)" in run.output() and "(1 of 20 requeues)" in run.output(), run.logs()
    run.until(lambda: run.training(1))
    queue.hpcrl("stop", run.root)
    stopped = run.becomes("stopped", 60)
    assert "hpcrl stop" in stopped["message"], stopped
    assert (stopped["job_id"], stopped["restarts"], stopped["attempt"]) == (run.number, 1, 1)
    run.until(lambda: not queue.processes(run), 60)
    run.until(lambda: queue.status(run) == 143, 30)
    steps = run.steps() + 5
    again = queue.hpcrl("resume", run.root, "--time", "20", "--num-rollout", str(steps)).stdout
    second = Submitted(queue, run.root, re.match(r"job (\d+)", again)[1])
    assert second.number != run.number
    second.until(lambda: second.steps() == steps)
    second.becomes("finished")
    assert list(metrics(run.root)) == list(range(steps)), "no step twice, none left out"
    assert json.loads((run.root / "job.json").read_text())["site"]["time"] == "20"


@over_queues
def test_chain_continues_and_ends(queue: Queue, tmp_path: Path, task: Path) -> None:
    """In a chain the next job continues, and the rest ends at once."""
    run = queue.submit(sft(queue, tmp_path, task, **LONG), tmp_path / "run", "--chain", "3")
    first, second, third = json.loads((run.root / "job.json").read_text())["chain"]
    assert first == run.number
    run.until(lambda: run.training(0))
    queue.cut(run)
    run.until(lambda: f"job {second} of the chain continues" in run.output())
    run.until(lambda: run.steps() == STEPS)
    ended = run.becomes("finished")
    assert (ended["job_id"], ended["restarts"], ended["attempt"]) == (second, 0, 1), run.logs()
    assert list(metrics(run.root)) == list(range(STEPS)), "no step twice, none left out"
    run.until(lambda: f"do for job {third} of the chain" in run.output(), 60)


@over_queues_in_core
def test_cancel_running_and_pending(queue: Queue, tmp_path: Path, task: Path) -> None:
    """Cancel ends a run, and takes another out of the queue."""
    path = sft(queue, tmp_path, task, **(LONG | {"num_rollout": 100000}))
    runs = [
        queue.submit(path, tmp_path / "runs" / name, settings=held) for name, held in (("a", ()), ("b", queue.held))
    ]
    running, waiting = runs
    running.until(lambda: running.steps() > 2)
    said = queue.hpcrl("cancel", waiting.root).stdout
    assert f"cancelled Slurm job {waiting.number}" in said and "which had not started" in said, said
    waiting.becomes("cancelled", 30)
    assert running.status()["phase"] == "running", "the other is left alone"
    said = queue.hpcrl("cancel", running.root).stdout
    assert f"cancelled Slurm job {running.number}" in said and "had not started" not in said, said
    running.until(lambda: not queue.processes(running), 60)
    running.becomes("cancelled", 60)


@over_queues
def test_impossible_requests_are_refused(queue: Queue, tmp_path: Path, task: Path) -> None:
    """What cannot be satisfied is refused and leaves nothing."""
    path = sft(queue, tmp_path, task)
    for words, said in ((("trainer.gpus_per_node=64",), "64"), (("acount=x",), "did you mean account?")):
        done = queue.hpcrl("submit", path, "--run-dir", tmp_path / "run", "--set", *words, check=False)
        [error] = [line for line in done.stderr.splitlines() if not line.startswith("hpcrl: note:")]
        assert done.returncode == 2 and said in error and ";" in error, error  # one line, with a hint
        assert not (tmp_path / "run").exists()
    shown = queue.hpcrl("submit", path, "--run-dir", tmp_path / "run", "--dry-run", "--set", "trainer.mem=8G").stdout
    assert "# dry run" in shown and not (tmp_path / "run").exists()
