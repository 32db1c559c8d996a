"""What docs/slurm.md has a user type on a login node, typed there: a real Slurm, the installed
`hpcrl`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.documents.scene import make_scene
from tests.documents.texts import printed
from tests.documents.which import helped
from tests.support.cluster import Cluster

pytestmark = pytest.mark.cluster

#: one network, and memory left for other jobs: Slurm gives a job all of a node's unless told otherwise
SITE = 'interface = "eth0"\n[trainer]\nmem = "6G"\n[engine]\nmem = "6G"\n[rollout]\nmem = "4G"\n'


def test_the_commands_of_a_login_node(cluster: Cluster, tmp_path: Path, task: Path) -> None:
    """A recipe that fine-tunes stands in for the user's: no engine to wait for."""
    scene = make_scene(tmp_path / "scene", task / "model", site=SITE)
    environment = scene.environment(Path(sys.executable).parent)
    commands = {
        scene.filled(command).replace("rewarded.toml", "tuned.toml")
        for command in [*printed(), *helped()]
        if command.verb == "doctor" or command.line.endswith("--print > job.sbatch")
    }
    assert len(commands) >= 5
    for line in sorted(commands):
        cluster.run(line, env=environment, cwd=scene.folder)
    said = cluster.run("sbatch job.sbatch", env=environment, cwd=scene.folder).stdout
    cluster.wait_state(int(re.search(r"job (\d+)", said)[1]), "COMPLETED", 300)
