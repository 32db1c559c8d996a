"""Cores and hardware threads, and the processors beside a GPU: as the kernel's own files say, and no further."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.utils.cpus import GIVEN, bind_beside, cores, read_list

REPO = Path(__file__).parents[2]
GPU = "0000:3b:00.0"


def machine(root: Path, count: int, threads: int) -> Path:
    """A /sys of `count` cores, of which the hardware threads are numbered as Linux does on x86: all first ones, all
    second ones."""
    for number in range(count * threads):
        topology = root / f"devices/system/cpu/cpu{number}/topology"
        topology.mkdir(parents=True)
        siblings = [str(number % count + again * count) for again in range(threads)]
        (topology / "thread_siblings_list").write_text(",".join(siblings) + "\n")
    return root


@pytest.mark.parametrize(
    ("count", "threads", "allowed", "given", "found"),
    [
        (8, 1, 8, "", 8),
        (8, 2, 16, "", 8),
        (8, 2, 16, "16", 8),
        (8, 2, 16, "4", 2),  # a quarter of the node, and not bound to it
        (8, 2, 16, "1", 1),
        (8, 2, 8, "", 8),  # bound to the first thread of each core
        (8, 2, 4, "16", 4),  # what it may really run on counts
        (8, 4, 32, "8", 2),
        (8, 2, 16, "x", 8),
        (8, 2, 16, "0", 8),
    ],
)
def test_hardware_threads_of_a_core_count_once(
    tmp_path: Path, count: int, threads: int, allowed: int, given: str, found: int
) -> None:
    assert cores(range(allowed), {GIVEN: given}, machine(tmp_path, count, threads)) == found


def test_unknown_topology(tmp_path: Path) -> None:
    """Where the kernel does not say, each processor is a core."""
    assert cores(range(6), {}, tmp_path / "none") == 6 and cores((), {}, tmp_path) == 1


@pytest.mark.parametrize(
    ("text", "numbers"), [("0-3,64\n", {0, 1, 2, 3, 64}), ("7\n", {7}), ("\n", set()), ("a-b\n", set()), (None, set())]
)
def test_lists_of_the_kernel(tmp_path: Path, text: str | None, numbers: set[int]) -> None:
    if text is not None:
        (tmp_path / "list").write_text(text)
    assert read_list(tmp_path / "list") == numbers


BIND = """
import json, os, sys, threading
from pathlib import Path
from hpcrl.utils.cpus import bind_beside
end = threading.Event()
other = threading.Thread(target=end.wait)
other.start()
found = bind_beside(sys.argv[1], Path(sys.argv[2]))
print(json.dumps([sorted(found), sorted(os.sched_getaffinity(0)), sorted(os.sched_getaffinity(other.native_id))]))
end.set()
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor alone")
def test_threads_stay_near_the_gpu(tmp_path: Path) -> None:
    """A process with all its threads stays near its GPU."""
    mine = sorted(os.sched_getaffinity(0))
    beside = tmp_path / "bus/pci/devices" / GPU / "local_cpulist"
    beside.parent.mkdir(parents=True)

    def bound(text: str, device: str = GPU) -> list[list[int]]:
        beside.write_text(text)
        done = subprocess.run(
            [sys.executable, "-c", BIND, device, str(tmp_path)],
            capture_output=True,
            text=True,
            check=True,
            cwd=REPO,
            timeout=240,
        )
        return json.loads(done.stdout)

    assert bound(f"{mine[-1]}\n") == [[mine[-1]]] * 3
    for text in (",".join(map(str, mine)), "100000-100003", ""):  # all that it has, none that it may use, not known
        assert bound(text) == [[], mine, mine]
    assert bound(f"{mine[-1]}\n", "0000:00:00.0") == [[], mine, mine]
    assert bind_beside("none", tmp_path) == frozenset()


def test_jobs_share_of_processors(tmp_path: Path) -> None:
    """A job says how many processors of the host are its own."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/bash\necho "${GIVEN}"\n')
    python.chmod(0o755)
    task = ["bash", str(REPO / "launch/task.sh"), "host"]
    for more, said in (({"SLURM_CPUS_ON_NODE": "12"}, "12\n"), ({}, "\n")):
        env = {"PATH": os.environ["PATH"], "HPCRL_PYTHON": str(python), "SLURMD_NODENAME": "n1", **more}
        assert subprocess.run(task, env=env, capture_output=True, text=True, check=True, timeout=240).stdout == said
