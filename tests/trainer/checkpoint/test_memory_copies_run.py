"""A real run that loses a rank between two checkpoints resumes from the memory of its hosts."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from hpcrl.run.scratch import SHARED
from tests.support.runs import KEPT, SFT, Run, metrics, recipe, role_pid, samples

pytestmark = pytest.mark.process

ROLLOUTS = 40


def start(path: Path, task: Path, **values: object) -> Run:
    path.mkdir()
    given = SFT | {"run_dir": str(path / "run"), "num_rollout": ROLLOUTS, "save_interval": None}
    return Run(recipe(path, task, **(given | {"actor_num_gpus_per_node": 2} | values)), root=path / "run")


def directories() -> set[Path]:
    return set(SHARED.glob("hpcrl-copies-*"))


def newest(copies: Path) -> int:
    """Rollouts of the newest copy of which both ranks' parts are there."""
    found = [int(path.name) for path in copies.glob("*") if path.name.isdigit()]
    return max((number for number in found if len(list((copies / f"{number}").glob("*/index.json"))) == 2), default=0)


def test_a_fault_costs_one_step_at_most(tmp_path: Path, task: Path) -> None:
    """SIGKILL of a rank, then of the host's process, after steps that the disk does not have: the next attempt takes
    them from memory, all but the last at most; losses and samples are those of a run without copies that nothing
    happened to; a run that ends well leaves nothing there."""
    untouched = start(tmp_path / "untouched", task)
    status, out = untouched.end()
    assert status == 0, out + untouched.logs()
    before = directories()
    run = start(tmp_path / "struck", task, non_persistent_save_interval=1, **KEPT)
    run.until(lambda: bool(directories() - before))
    (copies,) = directories() - before
    run.until(lambda: newest(copies) >= 3)
    stale = copies / "39" / "rank-00007"  # of an attempt of more ranks: never complete
    stale.mkdir(parents=True)
    for attempt, module in enumerate(("hpcrl.trainer.main", "hpcrl.launch.host"), 1):
        steps, struck = run.steps(), role_pid(run.root, module)
        os.kill(struck, signal.SIGKILL)
        kept = newest(copies)
        peer = run.root / "attempts" / str(attempt) / "peers" / "trainer-0.json"
        run.until(peer.exists)
        began = json.loads(peer.read_text())["start"]
        assert 3 <= kept <= began and began >= steps - 1, (module, kept, began, steps)
        assert not stale.exists(), "what is newer than where an attempt begins is of no use"
        assert "memory of the hosts" in (run.root / f"logs/attempt-{attempt}/trainer-0.log").read_text()
        run.until(lambda: newest(copies) > began)  # noqa: B023
    status, out = run.end()
    assert status == 0, out + run.logs()
    assert metrics(run.root) == metrics(untouched.root) and samples(run.root) == samples(untouched.root)
    assert directories() <= before
