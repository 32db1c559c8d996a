"""What weights of several adapters are called, and where an adapter keeps what is its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.adapters.run_directories import AdapterDir, places_of
from hpcrl.adapters.serving import requested_slot
from hpcrl.adapters.versions import name_of, version_in
from hpcrl.config.options import Options
from hpcrl.config.rules.several_adapters import policies_of
from hpcrl.plan import Location, Plan
from hpcrl.run.peers import StorePeer, find, publish
from hpcrl.run.role import RoleContext
from hpcrl.run.rundir import RunDir
from hpcrl.token_frames import ADAPTER
from tests.support.options import GRPO

HERE = Location("127.0.0.1", (0,))


def test_versions_by_slot() -> None:
    name = name_of([3, 0, 12])
    assert [version_in(name, slot) for slot in range(3)] == [3, 0, 12]
    assert version_in(name_of([7]), None) == version_in("7", 0) == 7


@pytest.mark.parametrize(
    ("name", "slot"), [("3.0", 2), ("3.0", None), ("3.", 0), ("a.1", 1), ("-1", None), ("²", None), (".", 0)]
)
def test_a_name_that_no_trainer_gave(name: str, slot: int | None) -> None:
    with pytest.raises(ValueError, match=name):
        version_in(name, slot)


def test_a_request_names_its_adapter() -> None:
    assert requested_slot(None, 1) == requested_slot({ADAPTER: 5}, 1) == 0
    assert requested_slot({ADAPTER: 2, "more": True}, 3) == 2
    for extra in (None, {}, {ADAPTER: 3}, {ADAPTER: -1}, {ADAPTER: "0"}):
        with pytest.raises(ValueError, match="name one of 3 adapters"):
            requested_slot(extra, 3)


def test_an_adapter_lives_and_ends_with_its_run(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    run.begin()
    options = Options(**GRPO | {"lora_rank": 4, "adapter": {"a": {"lr": 1e-3}, "b": {"seed": 9}}})
    context = RoleContext(run, options, Plan("run", 0, (HERE,), (), HERE), 0)
    places = dict(places_of(context, make=True))
    assert [place.options.seed for place in places.values()] == [options.seed, 9]
    one = places["b"].rundir
    assert isinstance(one, AdapterDir) and one.root == run.root / "adapters/b"
    assert Options.model_validate_json(one.options_file.read_bytes()).seed == 9
    assert (one.keys, one.plan_file, one.logs) == (run.keys, run.plan_file, run.logs)
    publish(one, StorePeer(host="here", port=1))
    assert find(places["a"].rundir, StorePeer) is find(run, StorePeer) is None
    assert find(one, StorePeer) is not None
    one.fail("rollout", 0, "no prompts")
    run.request_stop()
    failure = run.failure()
    assert failure is not None and failure.message == "no prompts" and places["a"].rundir.failure() == failure
    assert one.stop_requested() and not one.superseded()
    list(places_of(context, make=True))  # as a second attempt does


def test_a_run_of_one_policy_is_its_own_place(tmp_path: Path) -> None:
    options = Options(**GRPO)
    context = RoleContext(RunDir(tmp_path), options, Plan("run", 0, (HERE,), (), HERE), 0)
    assert list(places_of(context, make=False)) == [("", context)] and policies_of(options) == [options]
