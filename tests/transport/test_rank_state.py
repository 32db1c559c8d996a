"""The queue's books: what is under way, what comes again, which call is new."""

from __future__ import annotations

import random
from typing import Any

import pytest

from hpcrl.errors import PeerError
from hpcrl.plan import Location, Plan
from hpcrl.transport.messages import PROTOCOL, Hello, Reply, join
from hpcrl.transport.rank_state import Calls, PendingShares, Rank

PLAN = Plan("run", 3, (Location("127.0.0.1", (0,)),), (), Location("127.0.0.1", ()))


def outbox(*shares: int) -> PendingShares:
    """Shares of so many parts of 10 bytes, rollout ids from 0."""
    box = PendingShares(lease=60, part_bytes=10)
    for rollout_id, parts in enumerate(shares):
        box.put(rollout_id, [bytes([rollout_id]) * (10 * parts)])
    return box


def due(box: PendingShares, now: float = 0.0) -> list[tuple[int, int]]:
    return [(part.rollout_id, part.part) for part, _ in box.due(now)]


# ---- shares


def test_nothing_leaves_before_credit_is_given() -> None:
    assert due(outbox(2)) == []


def test_no_more_is_under_way_than_the_credit() -> None:
    box = outbox(3, 3)
    box.want(0, 2, (), 0)
    assert due(box) == [(0, 0), (0, 1)]
    assert due(box) == []
    box.acknowledge(0, 1)
    assert due(box) == [(0, 2)]
    box.acknowledge(0, 0)
    box.acknowledge(0, 2)
    assert due(box) == [(1, 0), (1, 1)]


def test_acknowledged_share_is_released() -> None:
    """A share is released when all of it is acknowledged."""
    box = outbox(2, 1)
    box.want(0, 9, (), 0)
    due(box)
    box.acknowledge(0, 0)
    assert 0 in box
    box.acknowledge(0, 1)
    assert 0 not in box
    assert (len(box), box.last_done) == (1, 0)


def test_a_fetch_acknowledges_what_lies_before_it() -> None:
    box = outbox(2, 3)
    box.want(1, 9, [0, 2], 0)
    assert 0 not in box
    assert due(box) == [(1, 1)]


def test_same_client_gets_the_rest() -> None:
    """The same client gets what it did not acknowledge."""
    box = outbox(3)
    box.want(0, 9, (), 0)
    due(box)
    box.acknowledge(0, 1)
    box.reconnected(same_client=True)
    assert due(box) == []  # no credit yet
    box.want(0, 9, (), 0)
    assert due(box) == [(0, 0), (0, 2)]


def test_new_client_gets_all_parts() -> None:
    """A new client gets all parts of a share that the old one had in part."""
    box = outbox(3)
    box.want(0, 9, (), 0)
    due(box)
    box.acknowledge(0, 1)
    box.reconnected(same_client=False)
    box.want(0, 9, (), 0)
    assert due(box) == [(0, 0), (0, 1), (0, 2)]


def test_lease_grows_with_each_resend() -> None:
    """A part that is missing after its lease is sent again, later each time."""
    box = outbox(2)
    box.want(0, 9, (), 0)
    due(box, 0)
    for now, expected in ((59, []), (61, [(0, 1)]), (122, []), (182, [(0, 1)]), (400, []), (423, [(0, 1)])):
        box.want(0, 9, [0], now)
        assert due(box, now) == expected


def test_busy_client_gets_nothing_twice() -> None:
    """A client that is busy elsewhere is sent nothing twice."""
    box = outbox(1, 1)
    box.want(0, 9, (), 0)
    assert due(box, 0) == [(0, 0), (1, 0)]
    box.acknowledge(0, 0)
    assert due(box, 10_000) == []


@pytest.mark.parametrize("rollout_id", [0, 1])
def test_ids_go_up(rollout_id: int) -> None:
    with pytest.raises(ValueError, match=f"rollout {rollout_id} was put after.*1"):
        outbox(1, 1).put(rollout_id, [b"x"])


@pytest.mark.parametrize(("rollout_id", "part"), [(7, 0), (0, 9)])
def test_acknowledgements_of_the_unknown_are_ignored(rollout_id: int, part: int) -> None:
    box = outbox(2)
    box.acknowledge(rollout_id, part)
    assert len(box) == 1


@pytest.mark.parametrize("seed", range(20))
def test_each_share_arrives_once(seed: int) -> None:
    """A line that loses everything under way now and then, a client that is replaced now and then."""
    rng = random.Random(seed)
    box = outbox(3, 1, 4, 2)
    total = 4
    line: list[Any] = []
    held: dict[int, bytes] = {}
    done: list[int] = []
    wanted, now = 0, 0.0
    for _ in range(3000):
        now += 1
        if wanted == total:
            break
        match rng.choice(["fetch", "move", "move", "move", "cut", "replace"]):
            case "fetch":
                box.want(wanted, rng.randint(1, 3), list(held), now)
                line += box.due(now)
            case "move" if line:
                part, pieces = line.pop(0)
                if part.rollout_id == wanted:
                    held[part.part] = b"".join(pieces)
                    if len(held) == part.parts:
                        assert bytes(join(part.sizes, [held[i] for i in range(part.parts)])[0]) == bytes(
                            [wanted]
                        ) * sum(part.sizes)
                        done.append(wanted)
                        for number in held:
                            box.acknowledge(wanted, number)
                        held, wanted = {}, wanted + 1
            case "cut" if rng.random() < 0.3:
                line.clear()
                box.reconnected(same_client=True)
            case "replace" if rng.random() < 0.3:
                line.clear()
                held.clear()
                box.reconnected(same_client=False)
    assert done == list(range(total))


# ---- calls and seats


def test_a_call_is_new_once() -> None:
    calls = Calls()
    assert calls.register_call(0)
    assert not calls.register_call(0)
    assert calls.finish(Reply(0, {"a": 1}))
    assert not calls.finish(Reply(0, {"a": 2}))
    assert calls.answer(0) == Reply(0, {"a": 1})
    assert calls.register_call(1)
    assert not calls.register_call(0)
    assert calls.answer(0) is None
    assert calls.unanswered() == [1]


def hello(**changes: Any) -> Hello:
    fields: dict[str, Any] = {
        "protocol": PROTOCOL,
        "run_id": "run",
        "attempt": 3,
        "dp_rank": 1,
        "dp_size": 2,
        "client": "a",
        "host": "node7",
        "pid": 1,
    }
    return Hello(**fields | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"run_id": "other"},
            "DP rank 1 on node7 belongs to run other",
        ),
        ({"attempt": 2}, "rollout process to run"),
        ({"dp_rank": 0}, "key of DP rank 1"),
        ({"dp_size": 4}, "counts 4 DP ranks, the rollout"),
        ({"protocol": 9}, "speaks queue protocol 9"),
    ],
)
def test_who_does_not_fit_gets_no_seat(changes: dict[str, Any], message: str) -> None:
    assert message in str(Rank(1, outbox()).refusal(hello(**changes), PLAN, 2))


def test_who_was_replaced_does_not_come_back() -> None:
    rank = Rank(1, outbox())
    rank.sit(b"1", hello())
    rank.calls.register_call(5)
    rank.sit(b"2", hello())
    assert not rank.calls.register_call(5)  # the same client over another connection
    rank.sit(b"3", hello(client="b", pid=2))
    assert rank.calls.register_call(5)
    assert rank.refusal(hello(client="b"), PLAN, 2) is None
    refusal = rank.refusal(hello(), PLAN, 2)
    assert isinstance(refusal, PeerError)
    assert "replaced" in str(refusal)
