"""Several settings of one recipe: the loop of docs/slurm.md, typed on a login node, and the comparison of its runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support.batch import FakeSlurmQueue, Submitted
from tests.support.runs import REPO, SFT, metrics, recipe
from tests.support.slurm import ENV

#: as the page has it
LINES = re.compile(r"^    (for .*; done)\n    (hpcrl report .*?)(?:  +#.*)?$", re.MULTILINE)


@pytest.mark.process
@pytest.mark.parametrize("queue", ["fake"], indirect=True)
def test_a_loop_and_its_comparison(queue: FakeSlurmQueue, tmp_path: Path, task: Path) -> None:
    """Each run is a job of its own, with the learning rate that it was given; the report compares them."""
    loop, compare = LINES.search((REPO / "docs/slurm.md").read_text()).groups()
    recipe(tmp_path, task, **SFT | {"num_rollout": 2})
    to_hpcrl = f"cd {tmp_path}; PATH={Path(sys.executable).parent}:$PATH; "
    said = queue.cluster.run(["bash", "-c", to_hpcrl + loop], env=ENV).stdout
    roots = sorted((tmp_path / "runs").iterdir())
    for root, number in zip(roots, re.findall(r"^job (\d+)", said, re.MULTILINE), strict=True):
        Submitted(queue, root, number).becomes("finished")
        assert list(metrics(root)) == [0, 1]
    queue.cluster.run(["bash", "-c", to_hpcrl + compare], env=ENV)
    page = (tmp_path / "comparison.html").read_text()
    assert len(roots) == 2 and all(text in page for text in ("lr-1e-6", "lr-2e-6", "1e-06", "2e-06"))
