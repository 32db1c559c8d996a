"""Of two engines one is killed in the middle of a weight update: the run continues with the other, and the one that is
lost comes back.

Over NCCL where there are GPUs for a trainer and two engines, over sockets elsewhere.  It has run on no GPU
yet.
"""

from __future__ import annotations

from pathlib import Path

import psutil

from hpcrl.doctor.selftest.checks.large_update import GPU
from hpcrl.doctor.selftest.registry import Check, Outcome, Skip
from hpcrl.doctor.selftest.tiny_model import make_model
from hpcrl.doctor.selftest.whole_run import ENGINES, engine_run, gpu_count, steps
from hpcrl.engine.membership.http import CORE, Address, HttpError, request_json
from hpcrl.run.peers import EnginePeer, find
from hpcrl.run.rundir import RunDir
from hpcrl.transport.auth import http_key

STEPS = 8
LOST = 1  #: the engine that is killed
CPU = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4}


class Strike:
    """Kills the processes below an engine's supervisor once its core is taking weights after the first step.

    Attributes:
        during: the call that the core was in; "" before the strike.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.during = ""

    def __call__(self) -> bool:
        """Whether it has been done."""
        if not self.during and (self.root / "attempts").exists() and steps(self.root):
            rundir = RunDir.latest(self.root)
            if (engine := find(rundir, EnginePeer, LOST)) is not None:
                self._look(engine, http_key(rundir, LOST))
        return bool(self.during)

    def _look(self, engine: EnginePeer, key: str) -> None:
        try:
            busy = request_json(Address(engine.host, engine.port, key), "GET", CORE, 1.0)
        except HttpError:
            return
        at = busy.get("at", "") if isinstance(busy, dict) else ""
        if at.startswith("/collective_rpc"):
            self.during = at.partition(" ")[0]
            for process in psutil.Process(engine.pid).children(recursive=True):
                process.kill()


def work(directory: Path) -> Outcome:
    gpus = gpu_count()
    if 0 < gpus < 3:
        raise Skip(f"{gpus} GPUs: a trainer and two engines need three")
    model = directory / "loss-model"
    if not (model / "config.json").exists():
        make_model(model, **(GPU if gpus else CPU))
    strike = Strike(directory / "loss")
    rows = engine_run(
        directory,
        "loss",
        gpus,
        turn=strike,
        hf_checkpoint=str(model),
        rollout_num_gpus=2,
        weight_transfer="nccl" if gpus else "gloo",
        num_rollout=STEPS,
        check_weight_update_equal=False,
    )
    numbers = {"steps": len(rows), "during": strike.during}
    if len(rows) != STEPS:
        return Outcome("failed", f"{len(rows)} of {STEPS} steps were made", numbers)
    if not strike.during:
        return Outcome("failed", "no update took long enough to be hit: nothing was shown", numbers)
    return Outcome("passed", f"an engine was killed in {strike.during}; all {STEPS} steps were made", numbers)


CHECK = Check("a run survives the loss of an engine during an update", 95, "launcher", work, ENGINES)
