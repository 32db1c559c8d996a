"""Two ranks whose calls do not fit together are found, and named with the first call that differs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hpcrl.config.options import Options
from hpcrl.planning.rehearsal.collectives import GroupCall, differing, totals, unlike_messages
from hpcrl.planning.rehearsal.ranks import Boundary, same_rows

STAGES = {0: 0, 1: 0, 2: 1, 3: 1}


def call(group: str = "tp", what: str = "allreduce_", size: int = 64, peer: int = -1) -> GroupCall:
    return GroupCall(group, what, size, peer, "forward and backward")


def records() -> dict[int, list[GroupCall]]:
    """Of two stages of two ranks each, that fit."""
    first = [call(), call("dp"), call("tp", "allgather_", 32)]
    found = {rank: list(first) for rank in STAGES}
    for rank in (0, 1):
        found[rank] += [call("pp", "send", 128, rank + 2), call("pp", "recv_", 128, rank + 2)]
        found[rank + 2] += [call("pp", "recv_", 128, rank), call("pp", "send", 128, rank)]
    return found


def test_ranks_that_fit() -> None:
    """The order of sending and receiving between two ranks may differ, and so may the bytes of an exchange of tokens."""
    found = records()
    assert differing(found, STAGES) == ""
    found[0].append(call("ep", "alltoall_base_", 10))
    found[1].append(call("ep", "alltoall_base_", 20))
    assert differing(found, STAGES) == ""


@pytest.mark.parametrize(
    ("rank", "at", "planted", "said"),
    [
        (1, 0, None, "collective 1: rank 0 asks for allreduce"),
        (1, 1, call("tp"), "allreduce of 64 bytes in group dp"),
        (1, 0, call(size=60), "60 bytes"),
        (1, 2, call("tp", "reduce_scatter_", 32), "reduce_scatter of 32"),
        (1, 2, None, "rank 1 has none left"),
        (3, 0, call("cp"), "ranks 2 and 3"),
        (2, 3, None, "message 1 from rank 0 to rank 2"),
        (2, 4, call("pp", "send", 64, 0), "message 1 from rank 2 to rank 0"),
    ],
)
def test_a_fault_is_found(rank: int, at: int, planted: GroupCall | None, said: str) -> None:
    """A call that is missing, of another group, of another size, of another kind; a message that one side lacks."""
    found = records()
    found[rank][at : at + 1] = [] if planted is None else [planted]
    assert said in differing(found, STAGES)


def test_rows_of_other_context_places() -> None:
    """Ranks of other context places may sum other rows, but in groups that both are in; all else is compared, and so is
    the order."""
    opts = Options(hf_checkpoint="x", tensor_model_parallel_size=2, context_parallel_size=2, actor_num_gpus_per_node=4)
    same = same_rows(opts)
    assert same(0, 1, "tp") and same(0, 2, "cp") and same(0, 3, "world") and not same(0, 3, "tp")
    assert same(0, 3, "of ranks 0,1,2,3"), "a group that is named by its ranks is one of both"
    one, two = [call(), call("cp")], [call(size=60), call("cp")]
    stage = {0: 0, 1: 0, 3: 0}
    assert differing({0: one, 3: two}, stage, same) == ""
    assert "collective 1" in differing({0: one, 1: two}, stage, same)
    assert "collective 1" in differing({0: one, 3: two[::-1]}, stage, same)


@pytest.mark.parametrize(
    "make",
    [
        lambda size: call("of ranks 0,1,2,3", size=size),
        lambda size: call("tp", "allgather_", size),
        lambda size: GroupCall("tp", "allreduce_", size, -1, "optimizer step"),
    ],
)
def test_bytes_of_other_context_places(make: Callable[[int], GroupCall]) -> None:
    """What does not depend on the rows of a rank, or is in a group of both, has as many bytes at every context place."""
    opts = Options(hf_checkpoint="x", tensor_model_parallel_size=2, context_parallel_size=2, actor_num_gpus_per_node=4)
    stage = {0: 0, 3: 0}
    assert differing({0: [make(64)], 3: [make(64)]}, stage, same_rows(opts)) == ""
    assert "60 bytes" in differing({0: [make(64)], 3: [make(60)]}, stage, same_rows(opts))


def test_another_order_is_found() -> None:
    """The same calls in another order are a deadlock where the groups differ."""
    found = records()
    found[1][0], found[1][1] = found[1][1], found[1][0]
    assert "collective 1" in differing(found, STAGES)


def test_messages_of_equal_stages() -> None:
    """Of stages 0, 1, 1, 3 the second 1 is told by the first: what it sends is what the last receives."""
    found = {0: [call("pp", "send", 128, 1)], 1: [call("pp", "recv_", 128, 0), call("pp", "send", 128, 2)]}
    found[3] = [call("pp", "recv_", 128, 2)]
    between = [Boundary(0, 1, 1, 0, (0, 1)), Boundary(1, 2, 1, 0, (1, 2)), Boundary(1, 2, 3, 2, (2, 3))]
    assert unlike_messages(found, between) == ""
    found[1][1] = call("pp", "send", 64, 2)
    assert "stages 1 and 2" in unlike_messages(found, between)
    found[1][0] = call("pp", "recv_", 64, 0)
    assert "stages 2 and 3" in unlike_messages(found, between[1:])
    del found[3]
    assert unlike_messages(found, between[1:]) == "", "a rank that was not rehearsed says nothing"


def test_totals() -> None:
    assert totals([call(), call(), call("dp", size=500)]) == [("dp", "allreduce", 1, 500), ("tp", "allreduce", 2, 128)]
