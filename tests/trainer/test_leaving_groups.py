"""A trainer rank that has come to its end leaves its process groups before the interpreter goes."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from hpcrl.config.options import Options
from hpcrl.trainer import main, parallel_state
from tests.support.ranks import run_ranks


def left() -> bool:
    import torch.distributed as dist

    from hpcrl.trainer.parallel_state import initialize, leave

    initialize(Options(actor_num_gpus_per_node=2, bf16=False))
    return leave() and not dist.is_initialized()


@pytest.mark.process
def test_ranks_leave_their_groups() -> None:
    assert run_ranks(2, left) == [True, True]


def test_leaving_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(parallel_state, "shutdown", ended.wait)
    assert not parallel_state.leave(0.05)
    ended.set()


def test_a_rank_leaves_after_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(main, "act", lambda role, context, index, body, late: body() or 0)
    monkeypatch.setattr(main, "trainer_timeline", lambda *_: SimpleNamespace(close=lambda: done.append("closed")))
    monkeypatch.setattr(main, "Trainer", lambda *_: SimpleNamespace(run=lambda: done.append("ran")))
    monkeypatch.setattr("hpcrl.trainer.megatron.cpu_shim.install", lambda: None)
    monkeypatch.setattr(parallel_state, "leave", lambda: done.append("left") or True)
    assert main.work(SimpleNamespace(rundir=None, plan=None), 0) == 0
    assert done == ["ran", "closed", "left"]
