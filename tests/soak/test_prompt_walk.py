"""A prompt's way to its gradient: how many files of hpcrl a reader has to open who follows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tests.support.prompt_walk
from tests.support.runs import POLICY, REPO, Run, make_task, recipe

pytestmark = [pytest.mark.vllm, pytest.mark.soak]

#: what looks after the engines meanwhile, now and then
BESIDE = {"engine/membership/registry.py", "rollout/engines/membership.py", "run/engine_files.py"}
MOST = 72  #: files in the rollout process and the trainer together, as measured
SMALL = {"rollout_batch_size": 4, "n_samples_per_prompt": 2, "num_rollout": 3, "save_interval": None}


def test_a_prompts_way_is_short(tmp_path: Path) -> None:
    walks = tmp_path / "walks"
    walks.mkdir()
    root = tmp_path / "run"
    task = make_task(tmp_path / "task")
    path = f"{Path(tests.support.prompt_walk.__path__[0])}:{REPO}"
    made = recipe(tmp_path, task, **(POLICY | SMALL | {"run_dir": str(root)}))
    run = Run(made, root=root, HPCRL_WALK=str(walks), PYTHONPATH=path)
    status, out = run.end(500)
    assert status == 0, out + run.logs()
    found = [json.loads(file.read_text()) for file in sorted(walks.glob("*.1.json"))]  # the second step of each process
    rollout, trainer = (
        next(walk for walk in found if goes_by(walk, name))
        for name in ("rollout/policy_rollouts.py", "trainer/training_loop.py")
    )
    files = {*rollout["files"], *trainer["files"]} - BESIDE
    for name, walk in (("rollout", rollout), ("trainer", trainer)):
        print(f"{name}: {len(walk['files'])} files, {walk['changes']} changes of file")
        for file, calls in walk["files"].items():
            print(f"  {file} {calls}")
    print(f"{len(files)} files")
    assert len(files) <= MOST


def goes_by(walk: dict[str, Any], file: str) -> bool:
    return any(name.startswith(file.partition("/")[0]) for name in walk["files"])
