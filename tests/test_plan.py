"""The plan is a pure function: rank order, one role a slot, clear refusals."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.errors import UsageError
from hpcrl.options import Options
from hpcrl.plan import Host, Plan, local_hosts, make_plan


def options(trainers: int, gpus: int, per_engine: int = 1) -> Options:
    return Options(actor_num_gpus_per_node=trainers, rollout_num_gpus=gpus, rollout_num_gpus_per_engine=per_engine)


@given(st.integers(1, 8), st.integers(0, 4), st.integers(1, 4), st.lists(st.integers(1, 8), min_size=1, max_size=6))
def test_every_slot_has_at_most_one_role_and_ranks_follow_host_order(
    trainers: int, engines: int, per_engine: int, slots: list[int]
) -> None:
    hosts = [Host(f"n{i}", n) for i, n in enumerate(slots)]
    try:
        plan = make_plan(options(trainers, engines * per_engine, per_engine), hosts, "r")
    except UsageError as error:
        short = sum(slots) < trainers + engines * per_engine
        assert short or "span" in str(error)
        return
    places = [*plan.trainers, *plan.engines]
    used = [(p.host, s) for p in places for s in p.slots]
    assert len(used) == len(set(used)) == trainers + engines * per_engine
    order = [(h.name, s) for h in hosts for s in range(h.slots)]
    assert used == order[: len(used)]
    assert plan.rollout.host in {h.name for h in hosts}


def test_too_few_slots_name_both_numbers() -> None:
    with pytest.raises(UsageError, match="5 slots, the hosts have 3"):
        make_plan(options(4, 1), [Host("a", 3)], "r")


def test_a_plan_survives_json_and_prints_every_process() -> None:
    o = options(2, 2)
    plan = make_plan(o, local_hosts(o), "run-1", attempt=3)
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan
    assert plan.hosts == ("127.0.0.1",)
    assert [line.split()[:2] for line in plan.table().splitlines()[1:]] == [
        ["trainer", "0"], ["trainer", "1"], ["engine", "0"], ["engine", "1"], ["rollout", "0"],
    ]  # fmt: skip
