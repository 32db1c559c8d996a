"""Errors of collectives are known by their class, and an error of one rank is raised by all with its own."""

from __future__ import annotations

from typing import Any

import pytest

from hpcrl.engine.membership.http import HttpError
from hpcrl.errors import DataError, HpcrlError, PeerError, Stopped, kind_of
from hpcrl.transport.share_format import WireError
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.process


def start() -> Any:
    from datetime import timedelta

    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=60))  # the start of all ranks counts too
    dist.barrier()
    dist.distributed_c10d._get_default_store().set_timeout(timedelta(seconds=5))
    return dist


def left_alone() -> list[tuple[str, bool]]:
    """On rank 0, what its collectives raise once rank 1 is gone, and whether that counts as an echo; plus errors of
    other kinds."""
    import torch

    from hpcrl.trainer.collectives import may_be_echo

    dist = start()
    if dist.get_rank() == 1:
        return []
    store = dist.distributed_c10d._get_default_store()
    found = []
    for work in (
        lambda: dist.all_reduce(torch.ones(2)),
        lambda: dist.all_reduce(torch.ones(2), async_op=True).wait(),
        lambda: [w.wait() for w in dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.ones(2), 1)])],
        lambda: dist.barrier(),
        lambda: store.get("nobody sets this"),
        lambda: torch.empty(2**60),
        lambda: torch.ones(2) @ torch.ones(3),
    ):
        try:
            work()
        except Exception as error:  # noqa: BLE001  (told to the test)
            found.append((type(error).__name__, may_be_echo(error)))
    others = (
        ValueError("gloo: connection reset"),
        PeerError("engine-0: NCCL timed out"),
        torch.OutOfMemoryError("NCCL"),
        NotImplementedError("gloo"),
        dist.DistBackendError("any"),
        dist.DistBackendError("NCCL error\nLast error:\nCuda failure 2 'out of memory'"),
    )
    return found + [(type(error).__name__, may_be_echo(error)) for error in others]


def test_error_is_known_by_its_class() -> None:
    """An error of a collective is known by its class and not by its text."""
    found = run_ranks(2, left_alone)[0]
    assert found[:5] == [("RuntimeError", True)] * 4 + [("DistStoreError", True)]
    assert found[7:] == [
        ("ValueError", False),
        ("PeerError", False),
        ("OutOfMemoryError", False),
        ("NotImplementedError", False),
        ("DistBackendError", True),
        ("DistBackendError", False),
    ]


def alone() -> bool:
    from hpcrl.trainer.collectives import may_be_echo

    before = may_be_echo(RuntimeError("x"))
    start()
    return before or may_be_echo(RuntimeError("x"))


def test_a_single_rank_has_nobody_to_echo() -> None:
    assert run_ranks(1, alone) == [False]


def agree_on_rank(error: HpcrlError) -> tuple[str, str, str]:
    from hpcrl.trainer.collectives import agree

    dist = start()

    def fail() -> None:
        raise error

    try:
        agree(fail, wanted=dist.get_rank() == 1)
    except HpcrlError as found:
        return type(found).__name__, found.what, found.hint
    return "", "", ""


def test_all_ranks_raise_the_first_error() -> None:
    """All ranks raise the error of the one that failed."""
    assert run_ranks(2, agree_on_rank, DataError("no such file", "look")) == [("DataError", "no such file", "look")] * 2


def test_foreign_error_class() -> None:
    """An error class of another room is raised as what it derives from."""
    assert kind_of(HttpError("refused", 500)) == "PeerError"
    assert kind_of(WireError("bytes")) == "HpcrlError"
    assert kind_of(Stopped("x")) == "Stopped"


def http_error_on_rank() -> tuple[str, str, str]:
    return agree_on_rank(HttpError("POST /x answered 500", 500))


def test_an_http_error_of_one_rank_reaches_the_others() -> None:
    assert run_ranks(2, http_error_on_rank) == [("PeerError", "POST /x answered 500", "")] * 2
