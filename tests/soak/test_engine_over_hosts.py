"""One engine over two hosts (addresses of this machine): tensor parallel over gloo, updates in both parts, and how it
ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hpcrl.plan import Host, make_plan
from tests.support.engines import CLOSE, Engines, Side
from tests.support.runs import REPO, gone
from tests.support.tiny import make_model

pytestmark = [pytest.mark.vllm, pytest.mark.soak]

HOSTS = [Host("t", 1, "127.0.0.1", "lo"), Host("a", 1, "127.0.0.1", "lo"), Host("b", 1, "127.0.0.2", "lo")]


class OverHosts(Engines):
    """An engine on hosts a and b: its two supervisors."""

    follower: subprocess.Popen[bytes]

    def __init__(self, root: Path, model: Path, **values: Any) -> None:
        super().__init__(root, model, 1, rollout_num_gpus=2, rollout_num_gpus_per_engine=2, **values)

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        self.plan = make_plan(self.options, HOSTS, "test")
        assert [place.host for place in self.plan.engine_nodes(0)] == ["a", "b"]
        self.write(self.plan)
        command = [
            sys.executable,
            "-m",
            "hpcrl.engine.follower",
            str(self.rundir.root),
            "--attempt",
            "0",
            "--index",
            "0",
        ]
        env = os.environ | {"PYTHONPATH": str(REPO), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
        with (self.rundir.logs / "engine-0-node-1.log").open("wb") as out:
            self.follower = subprocess.Popen(
                [*command, "--node", "1"],
                cwd=REPO,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        return super()._start(index)

    def everybody(self) -> list[int]:
        top = psutil.Process(self.follower.pid)
        return [*self.pids(), top.pid, *(child.pid for child in top.children(recursive=True))]


@pytest.fixture(scope="module")
def side(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    root = tmp_path_factory.mktemp("over")
    model = make_model(root / "model", tied=True)
    engines = OverHosts(root / "run", model, check_weight_update_equal=True)
    found = Side(engines, model)
    yield found
    found.close()
    engines.follower.terminate()
    engines.stop()
    engines.follower.wait(30)


def test_both_parts_get_every_update(side: Side) -> None:
    assert len(side.sender.manifests[0]) == 2, "a worker on each host"
    assert side.sender.manifests[0][0]["backend"] == "hpcrl_gloo"
    assert side.distance() <= CLOSE
    for _ in range(2):
        side.step()
        assert side.distance() <= CLOSE


def test_a_part_that_dies_is_named_and_nothing_is_left(side: Side) -> None:
    engines = side.engines
    assert isinstance(engines, OverHosts)
    pids = engines.everybody()
    [server] = psutil.Process(engines.follower.pid).children()
    os.kill(server.pid, signal.SIGKILL)
    assert engines.follower.wait(30) != 0
    failure = engines.rundir.failure()
    assert failure is not None and "engine 0, part 1 on b: its vLLM" in failure.message, failure
    engines.stop()
    assert gone(pids)
