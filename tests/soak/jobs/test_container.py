"""The quick start in an image of Apptainer, under a real Slurm: trainer, engines and rollout are inside, as a centre has
them: no home directory, a /tmp of the container's own, and the interpreter where tools/container/hpcrl.def puts it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from tests.support.cluster import Cluster
from tests.support.runs import REPO, SubmittedRun
from tests.support.slurm import ENV, Job
from tests.whole_runs.test_unkind_sites import guides_command
from tools.cluster.roots import interpreter

pytestmark = [pytest.mark.cluster, pytest.mark.soak]
INSIDE = Path("/opt/hpcrl")
#: --userns: root of a machine that lacks a capability may start no container of another kind
SITE = """
python = "{inside}/bin/python"
[container]
kind = "apptainer"
image = "{image}"
gpus = "none"
mounts = [{mounts}]
args = ["--userns", "--contain"]
[trainer]
mem = "8G"
[engine]
mem = "8G"
[rollout]
mem = "4G"
"""


def test_quick_start_in_an_image(cluster: Cluster, tmp_path: Path) -> None:
    """The root of the nodes' release is the image; environment and checkout are mounted into it, to save minutes."""
    if cluster.run("command -v apptainer", "node1", check=False).returncode:
        pytest.skip("the nodes have no apptainer: `python -m tools.cluster root forky` unpacks a release that has it")
    assert not INSIDE.exists(), "the interpreter is to be found in the image alone"
    needed = {REPO, Path(torch.__file__).parents[1], *interpreter()}
    if not Path(sys.base_prefix).is_relative_to("/usr"):
        needed.add(Path(sys.base_prefix))
    mounts = [f"{sys.prefix}:{INSIDE}", *map(str, sorted(needed))]
    text = SITE.format(inside=INSIDE, image=cluster.layout.root, mounts=", ".join(f'"{mount}"' for mount in mounts))
    (tmp_path / "mine.toml").write_text(text)
    shorter = ["--sft.num-rollout", "2", "--grpo.num-rollout", "2"]
    told = ENV | {"HPCRL_SITE": str(tmp_path / "mine.toml")}
    said = cluster.run([*guides_command(), *shorter], env=told, cwd=tmp_path).stdout
    job = Job(cluster, Path(re.search(r"run directory: (\S+)", said)[1]), int(re.match(r"job (\d+)", said)[1]))
    job.ends(seconds=480)
    assert SubmittedRun(job.root / "grpo").steps() == 2 and SubmittedRun(job.root / "sft").steps() == 2, job.logs()
    script = (job.root / "job.sbatch").read_text()
    assert f"apptainer exec --bind {sys.prefix}:{INSIDE}" in script and "--no-home --userns --contain" in script
