"""The plan is a pure function: rank order, one role a slot (two when colocated), clear refusals."""

from __future__ import annotations

import collections

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.config.options import Options
from hpcrl.errors import UsageError
from hpcrl.groups import planned
from hpcrl.plan import Host, Plan, local_hosts, make_plan, socket_names, visible_devices


def options(trainers: int, gpus: int, per_engine: int = 1, nodes: int = 1, **more: object) -> Options:
    return Options(
        actor_num_nodes=nodes,
        actor_num_gpus_per_node=trainers,
        rollout_num_gpus=gpus,
        rollout_num_gpus_per_engine=per_engine,
        **more,
    )


SHAPES = st.tuples(
    st.integers(1, 4),  # nodes of the trainer
    st.integers(1, 8),  # its ranks on each
    st.integers(0, 4),  # engines
    st.integers(1, 16),  # GPUs of one
    st.lists(st.integers(0, 8), min_size=1, max_size=8),  # slots of the hosts
    st.booleans(),  # colocated
)


@given(SHAPES)
def test_every_slot_has_one_role_or_two_when_colocated(shape: tuple) -> None:
    nodes, each, engines, size, slots, colocate = shape
    hosts = [Host(f"n{i}", n) for i, n in enumerate(slots)]
    o = options(each, engines * size, size, nodes, colocate=colocate)
    try:
        plan = make_plan(o, hosts, "r")
    except UsageError as error:
        assert "do not fit" in str(error) and f"the hosts have {sum(slots)}" in str(error)
        return
    assert len(plan.trainers) == nodes * each and len(plan.engines) == engines
    trained = [(p.host, s) for p in plan.trainers for s in p.slots]
    served = [(p.host, s) for e in plan.engines for p in (e, *e.also) for s in p.slots]
    assert len(set(trained)) == len(trained) and len(set(served)) == len(served) == engines * size
    uses = collections.Counter(trained + served)
    assert max(uses.values(), default=0) <= 1 + colocate
    assert set(uses) <= {(h.name, s) for h in hosts for s in range(h.slots)}
    order = {h.name: i for i, h in enumerate(hosts)}
    assert trained == sorted(trained, key=lambda x: (order[x[0]], x[1]))
    for place in plan.engines:
        assert bool(place.also) == (len(place.slots) < size)  # one host, or whole hosts
        if place.also:
            assert all(len(p.slots) == slots[order[p.host]] for p in (place, *place.also))
    spare = [h.name for h in hosts if h.slots == 0]
    assert plan.rollout.host == (spare[0] if spare else (plan.engines or plan.trainers)[0].host)


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.integers(1, 4))
def test_tensor_parallel_groups_inside_a_host(tp: int, pp: int, cp: int, nodes: int) -> None:
    """Tensor-parallel groups stay inside a host where they can."""
    o = options(
        8, 0, nodes=nodes, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, context_parallel_size=cp
    )
    plan = make_plan(o, [Host(f"n{i}", 8) for i in range(nodes)], "r")
    if (8 * nodes) % (tp * pp * cp):
        with pytest.raises(UsageError, match="cannot be divided"):
            planned(o)
        return
    for kind, groups in planned(o).items():
        assert sorted(rank for group in groups for rank in group) == list(range(8 * nodes)), kind
        assert len({len(group) for group in groups}) == 1
    for group in planned(o)["tp"]:
        assert len({plan.trainers[rank].host for rank in group}) == 1


def test_too_few_slots() -> None:
    """Too few slots: the error names both numbers and every host."""
    with pytest.raises(UsageError, match=r"needs 5 slots, the hosts have 3 \(a 3\)"):
        make_plan(options(4, 1), [Host("a", 3)], "r")


def test_a_host_that_is_listed_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="host a.*twice"):
        make_plan(options(1, 0), [Host("a", 3), Host("a", 3)], "r")


def test_trainers_and_engines_share_nodes() -> None:
    """Trainers take their share of each node, and engines the rest."""
    plan = make_plan(options(4, 8, 4, nodes=2), [Host("a", 8), Host("b", 8)], "r")
    assert [p.host for p in plan.trainers] == ["a"] * 4 + ["b"] * 4
    assert [(e.host, e.slots) for e in plan.engines] == [("a", (4, 5, 6, 7)), ("b", (4, 5, 6, 7))]


def test_engine_larger_than_a_host() -> None:
    """An engine larger than a host takes whole hosts."""
    o = options(8, 64, 32, nodes=8, colocate=True)
    plan = make_plan(o, [Host(f"n{i}", 8) for i in range(8)], "r")
    assert [e.hosts for e in plan.engines] == [("n0", "n1", "n2", "n3"), ("n4", "n5", "n6", "n7")]
    with pytest.raises(UsageError, match="engines of --rollout-num-gpus-per-engine 12 slots do not fit"):
        make_plan(options(1, 12, 12), [Host("a", 1), Host("b", 8), Host("c", 8)], "r")


def test_a_host_without_slots_is_the_rollouts() -> None:
    plan = make_plan(options(1, 1), [Host("a", 1), Host("b", 1), Host("c", 0, "10.0.0.3", "ib0")], "r")
    assert (plan.rollout.host, plan.rollout.at) == ("c", "10.0.0.3")
    assert socket_names(plan.rollout) == {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "=ib0"}
    assert plan.trainers[0].at == "a" and socket_names(plan.trainers[0]) == {}


@pytest.mark.parametrize(
    ("values", "hosts", "sandboxes", "rollout"),
    [
        ({"sandbox_num_nodes": 2}, {"a": 1, "b": 1, "c": 0, "d": 0, "e": 0}, "de", "c"),
        ({"sandbox_num_nodes": 2}, {"a": 1, "b": 1, "c": 0, "d": 0}, "cd", "b"),
        ({"sandbox_num_nodes": 2}, {"a": 0, "b": 2, "c": 2, "d": 2}, "da", "b"),
        ({}, {"a": 2, "b": 2, "c": 2}, "c", "a"),
        ({"sandbox_num_nodes": 2}, {"a": 2}, "aa", "a"),
        ({"sandbox_on": "engines"}, {"a": 1, "b": 1, "c": 0}, "b", "c"),
        ({"sandbox_on": "engines"}, {"a": 2}, "a", "a"),
        ({"sandbox_on": "rollout"}, {"a": 2}, "", "a"),
    ],
)
def test_hosts_of_sandboxes(values: dict[str, object], hosts: dict[str, int], sandboxes: str, rollout: str) -> None:
    """Hosts of their own, the last that are free; the run needs them no more than it has to."""
    o = options(1, 1, **({"sandbox_on": "nodes"} | values))
    plan = make_plan(o, [Host(name, slots) for name, slots in hosts.items()], "r")
    assert [place.host for place in plan.sandboxes] == list(sandboxes) and plan.rollout.host == rollout
    used = {place.host for place in (*plan.trainers, *plan.engines, plan.rollout)}
    assert set(plan.needed_hosts) == used and set(plan.hosts) == used | set(sandboxes)
    assert plan.table().count("sandbox") == len(sandboxes)


@pytest.mark.parametrize(
    ("hosts", "rollout"),
    [
        ({"a": 1, "b": 1, "d": 0, "e": 0}, "b"),
        ({"a": 1, "b": 1, "c": 0, "d": 0, "e": 0}, "c"),
        ({"a": 1, "b": 1, "d": 2, "e": 2}, "b"),
        ({"d": 0, "a": 2, "e": 2}, "a"),
        ({"a": 2}, "a"),
        ({"a": 1, "b": 1, "e": 0}, "b"),
    ],
)
def test_a_stage_without_sandboxes(hosts: dict[str, int], rollout: str) -> None:
    """Its rollout process is where it would be if the job had no nodes for those of another stage, and so is that of a
    stage with fewer of them; the last is of a job that has lost one."""
    given = [Host(name, slots) for name, slots in hosts.items()]
    without = options(1, 1)
    plan = make_plan(without, given, "r", kept=2)
    assert plan == make_plan(without, [host for host in given if host.name not in "de"], "r")
    assert plan.rollout.host == rollout and not plan.sandboxes
    fewer = make_plan(options(1, 1, sandbox_on="nodes"), given, "r", kept=2)
    assert fewer.rollout.host == rollout and len(fewer.sandboxes) == 1


def test_too_few_hosts_for_sandboxes() -> None:
    with pytest.raises(UsageError, match="leave 1 of the 3 hosts free"):
        make_plan(options(1, 1, sandbox_on="nodes", sandbox_num_nodes=2), [Host(n, 1) for n in "abc"], "r")


def test_a_plan_survives_json_and_prints_every_process() -> None:
    o = options(2, 2)
    plan = make_plan(o, local_hosts(o), "run-1", attempt=3)
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan
    assert plan.hosts == plan.trainer_hosts == ("127.0.0.1",)
    assert plan.ranks_on("127.0.0.1") == (0, 1)
    assert [line.split() for line in plan.table().splitlines()[1:]] == [
        ["trainer", "0-1", "127.0.0.1", "0-1"], ["engine", "0", "127.0.0.1", "2"],
        ["engine", "1", "127.0.0.1", "3"], ["rollout", "0", "127.0.0.1", "-"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("inherited", "slots", "own", "found"),
    [
        (None, (2, 3), None, "2,3"),
        ("", (0,), None, "0"),
        ("4,5,6,7", (2, 3), None, "6,7"),
        ("0,1,2,3,4,5,6,7", (2, 3), None, "2,3"),
        ("GPU-a,GPU-b,GPU-c,GPU-d", (1,), None, "GPU-b"),
        ("4,5,6,7", (0, 1, 2, 3), (2,), "4,5,6,7"),  # a task of slot 2 that sees the whole host
        ("0", (0, 1, 2, 3), (2,), "0"),  # one that sees its own, under whatever number
        ("6", (0, 1, 2, 3), (2,), "6"),
        ("0,1", (2, 3), (2, 3), "0,1"),
    ],
)
def test_visible_devices_count_in_what_was_inherited(
    inherited: str | None, slots: tuple[int, ...], own: tuple[int, ...] | None, found: str
) -> None:
    assert visible_devices(inherited, slots, 4, own) == found


@pytest.mark.parametrize(
    ("inherited", "slots", "own", "error"),
    [
        ("0,1", (2, 3), None, "CUDA_VISIBLE_DEVICES=0,1 holds 2 GPUs, the plan uses 4 slots of this host;"),
        ("0,1", (0, 1), None, "holds 2 GPUs, the plan uses 4 slots"),
        ("0", (0, 1), None, "holds 1 GPUs"),
        (
            "0",
            (2, 3),
            (2, 3),
            "holds 1.*bound to this task, 2 are needed: slots 2-3.*let each task see",
        ),
    ],
)
def test_no_process_takes_the_gpus_of_another(
    inherited: str, slots: tuple[int, ...], own: tuple[int, ...] | None, error: str
) -> None:
    with pytest.raises(UsageError, match=error):
        visible_devices(inherited, slots, 4, own)


def test_slots_up_to_the_last_in_use() -> None:
    """Slots of a host are counted up to the last one in use."""
    plan = make_plan(options(4, 8, 4, nodes=2), [Host("a", 16), Host("b", 8), Host("c", 0)], "r")
    assert [plan.slots_on(host) for host in "abc"] == [12, 4, 0]
