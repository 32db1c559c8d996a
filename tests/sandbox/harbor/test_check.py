"""`python -m hpcrl.sandbox.harbor`, and the command line of docs/agents.md: tasks are looked at before anything runs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.able import needs
from tests.support.harbor_tasks import TOML, VERIFIER, write_task

pytestmark = [pytest.mark.process, needs("namespaces")]
AGENT = "--custom-generate-function-path hpcrl.rollout.samplers.harbor_agent.generate"


def said(folder: Path, *words: str) -> tuple[int, str]:
    """(exit status, what was printed)."""
    done = subprocess.run([sys.executable, "-m", *words], cwd=folder, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def test_tasks_are_told_apart(tmp_path: Path) -> None:
    """Those whose verifiers tell a solution from nothing, those that do not, and those that have no verdict."""
    tasks = tmp_path / "tasks"
    write_task(tasks / "good")
    assert said(tmp_path, "hpcrl.sandbox.harbor", "tasks/") == (
        0,
        "ok    good: untouched 0, solved 1\n1 of 1 tasks can be learned from\n",
    )
    write_task(tasks / "none", verifier="exit 1\n")
    write_task(tasks / "same", verifier=VERIFIER.replace("score=0", "score=1"))
    status, text = said(tmp_path, "hpcrl.sandbox.harbor", "tasks/")
    assert status == 1 and "FAIL  same: untouched 1, solved 1; the verifier's last words: " in text
    assert "1 of 3 tasks" in text
    assert "none/tests/test.sh" in text
    write_task(tasks / "gpu", TOML + "gpus = 1\n")
    status, text = said(tmp_path, "hpcrl.sandbox.harbor", "tasks/")
    assert status == 1 and "FAIL  gpu: " in text and "gpu/task.toml" in text and "1 of 4 tasks" in text


def test_a_slice_and_what_has_no_solution(tmp_path: Path) -> None:
    """It is neither good nor bad; a slice is that of a run."""
    write_task(tmp_path / "tasks" / "a")
    shutil.rmtree(tmp_path / "tasks" / "a" / "solution")
    write_task(tmp_path / "tasks" / "b", TOML + "gpus = 1\n")
    status, text = said(tmp_path, "hpcrl.sandbox.harbor", "tasks/@[:1]")
    assert status == 0 and text == (
        "?     a: untouched 0, no solution/solve.sh\n"
        "0 of 1 tasks can be learned from, 1 have no solution that would show it\n"
    )
    status, text = said(tmp_path, "hpcrl.sandbox.harbor", "tasks/@[1:x]")
    assert status == 2 and "[1:x] is not a slice" in text
    status, text = said(tmp_path, "hpcrl.sandbox.harbor", "none")
    assert status == 1 and "none is no directory" in text


def test_a_run_looks_at_its_tasks(tmp_path: Path, task: Path) -> None:
    """The documented line is refused by the file and key of a task, and accepted without it; nothing is started."""
    tasks = tmp_path / "tasks"
    write_task(tasks / "good")
    (tmp_path / "recipe.toml").write_text(
        f'hf_checkpoint = "{task / "model"}"\nactor_num_gpus_per_node = 1\nrollout_num_gpus = 1\nbf16 = false\n'
        "num_rollout = 1\nrollout_batch_size = 1\nn_samples_per_prompt = 2\n"
    )
    line = [
        "hpcrl",
        "run",
        "recipe.toml",
        "--prompt-data",
        "tasks/",
        "--apply-chat-template",
        *AGENT.split(),
        "--dry-run",
    ]
    status, text = said(tmp_path, *line)
    assert status == 0, text
    write_task(tasks / "gpu", TOML + "gpus = 1\n")
    status, text = said(tmp_path, *line)
    assert status == 1 and "gpu/task.toml" in text and "gpus" in text
