"""Another user races for places in gloo groups, many times: of trainer ranks, and of engines of two workers.

N is how many rounds each has.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from pathlib import Path

import pytest

from tests.support.engines import Engines
from tests.support.gloo_attack import GlooAttack
from tests.support.second_user import SecondUser
from tests.support.tiny import make_model
from tests.transport.pickles.examples import attacks
from tests.transport.pickles.test_gloo_race import race

pytestmark = [pytest.mark.soak, pytest.mark.process]


def test_races_for_a_trainer_rank_s_place(second_user: SecondUser, tmp_path: Path) -> None:
    """None of them runs anything."""
    made, refused = tmp_path / "made", 0
    for _ in range(int(os.environ.get("N", "50"))):
        found, _ = race(second_user, made)
        assert not made.exists()
        refused += any("posix.mkdir" in said for said in found)
    print(f"the stranger's pickle was refused in {refused} rounds")
    assert refused > 0


def test_races_for_an_engine_worker_s_place(second_user: SecondUser, tmp_path: Path) -> None:
    """Each engine is up or ends, and runs nothing."""
    model, made = make_model(tmp_path / "model"), tmp_path / "made"
    rounds = int(os.environ.get("N", "20"))
    connected = 0
    for number in range(rounds):
        attack = GlooAttack(second_user, os.getuid(), pickle.dumps(attacks(made)["mkdir"]))
        engines = Engines(tmp_path / f"run-{number}", model, rollout_num_gpus=2, rollout_num_gpus_per_engine=2)
        up = False
        try:
            with contextlib.suppress(AssertionError):
                engines.wait()
                up = True
        finally:
            engines.stop()
            reached = attack.end()
        print(f"round {number}: {'up' if up else 'ended'}, {reached}", flush=True)
        connected += reached["made"] > 0  # on a busy machine it can come too late
        assert not made.exists()
    print(f"the stranger was connected in {connected} of {rounds} rounds")
    assert connected > rounds / 2
