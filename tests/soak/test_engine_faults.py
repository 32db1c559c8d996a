"""Engines of a real run that are killed and stopped, again and again, at steps that a seed draws: nothing is lost, and nothing changes.

SEED: which faults, and how weights travel (odd: gloo, even: shared memory); N: how many a seed (5).
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from hpcrl.rollout.ledger.journal import account
from hpcrl.run.engines.view import EngineViews, read_views
from tests.support.runs import POLICY, Run, all_gone, make_task, metrics, processes, recipe, samples

pytestmark = [pytest.mark.soak, pytest.mark.vllm]

SEEDS = [int(seed) for seed in (os.environ.get("SEED") or "1").split(",")]
FAULTS = int(os.environ.get("N") or 5)
ENGINES = 2


def supervisor(root: Path, index: int) -> psutil.Process:
    """The supervisor of an engine that lives."""
    for pid in processes(root):
        words = psutil.Process(pid).cmdline()
        if "hpcrl.engine.main" in words and words[words.index("--index") + 1] == str(index):
            return psutil.Process(pid)
    raise AssertionError(f"engine {index} has no supervisor")


def server(root: Path, index: int) -> psutil.Process:
    return supervisor(root, index).children()[0]


def core(root: Path, index: int) -> psutil.Process:
    return server(root, index).children()[-1]


#: what is done to whom
KINDS: dict[str, tuple[Callable[[Path, int], psutil.Process], signal.Signals]] = {
    "kill the server": (server, signal.SIGKILL),
    "kill the core": (core, signal.SIGKILL),
    "kill the supervisor": (supervisor, signal.SIGKILL),
    "stop the server": (server, signal.SIGSTOP),
    "stop the core": (core, signal.SIGSTOP),
}


def views(root: Path) -> EngineViews:
    found = read_views(root / "attempts/0")
    assert found is not None
    return found


def there(root: Path) -> list[int]:
    """The engines that answer, or are about to."""
    return [view.index for view in views(root).engines if view.state in ("serving", "joining")]


def start(path: Path, task: Path, rollouts: int, way: str) -> Run:
    path.mkdir()
    values = {"num_rollout": rollouts, "rollout_num_gpus": ENGINES, "engine_restarts": FAULTS, "engine_hang_timeout": 8}
    values |= {"weight_transfer": way, "save_interval": None}
    root = path / "run"
    return Run(recipe(path, task, **(POLICY | values | {"rollout_timeout": 600, "run_dir": str(root)})), root=root)


@pytest.mark.parametrize("seed", SEEDS)
def test_engines_end_at_drawn_times(tmp_path: Path, seed: int) -> None:
    chance, task, way = random.Random(seed), make_task(tmp_path / "task"), "gloo" if seed % 2 else "shm"
    rollouts = 4 * FAULTS + 4
    run = start(tmp_path / "faults", task, rollouts, way)
    for number in range(FAULTS):
        at, kind, after = 4 * number + chance.randrange(4), chance.choice(sorted(KINDS)), chance.uniform(0, 0.5)
        run.until(lambda at=at: run.steps() >= at, 600)
        run.until(lambda: bool(there(run.root)), 300)
        time.sleep(after)
        index = chance.choice(there(run.root) or [0])  # the last one as well: then the run waits
        find, what = KINDS[kind]
        try:
            find(run.root, index).send_signal(what)
        except (AssertionError, IndexError, psutil.Error):
            kind = "none: it was just ending"
        print(json.dumps({"fault": kind, "engine": index, "step": run.steps()}), flush=True)
    status, out = run.end(900)
    assert status == 0, out + run.logs()
    assert all_gone(run.root, [])
    print("restarts:", [view.restarts for view in views(run.root).engines], flush=True)
    untouched = start(tmp_path / "untouched", task, rollouts, way)
    status, out = untouched.end(900)
    assert status == 0, out + untouched.logs()
    assert metrics(run.root) == metrics(untouched.root) and samples(run.root) == samples(untouched.root)
    found = account(run.root)
    assert not found.wrong, found.wrong
    assert found.trained == rollouts * POLICY["rollout_batch_size"]
