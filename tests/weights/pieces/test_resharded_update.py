"""Updates in pieces between real trainer ranks and real engines: bit for bit what rank 0 gathers, over the layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hpcrl.engine.membership.broadcast import EngineBroadcast, EngineLost
from hpcrl.engine.membership.http import Address
from hpcrl.engine.membership.registry import Engine
from hpcrl.errors import HpcrlError
from hpcrl.models.convert.to_fp8 import convert
from hpcrl.models.files.fp8 import Scheme
from hpcrl.plan import Plan
from hpcrl.run.rundir import RunDir
from hpcrl.trainer.collectives import make_patient
from hpcrl.trainer.megatron.hf_weights import export, load_hf
from hpcrl.trainer.megatron.model import build
from hpcrl.trainer.parallel_state import initialize
from hpcrl.trainer.weight_export import WeightExporter
from hpcrl.weights.comparison import digest
from hpcrl.weights.sender import WeightSender
from hpcrl.weights.worker_calls import WorkerCalls
from tests.support.engines import CLOSE, SMALL, Engines, Reference, generate
from tests.support.forked_engines import Nursery
from tests.support.ranks import run_ranks
from tests.support.tiny import make_family

pytestmark = pytest.mark.vllm
PROMPT = list(range(20, 44))
DOWN = "model.layers.0.mlp.experts.0.down_proj.weight"


def change(policy: Any, seed: int, every: int) -> None:
    """Other weights, the same on all copies of a part: every so many elements of each are scaled by what only `seed`
    decides."""
    with torch.no_grad():
        for module in policy.modules:
            for value in module.state_dict(keep_vars=True).values():
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    value.view(-1)[::every] *= 1 + seed / 16


def rank_side(
    root: Path, plan: Plan, addresses: list[Address], options: Any, wide: Path, updates: int, every: int
) -> list[dict[str, Any]]:
    """One trainer rank: so many updates, of weights that differ each time; metrics and digests of each."""
    ranks = initialize(options)
    policy = build(options.model_copy(update={"hf_checkpoint": str(wide)}), ranks)
    load_hf(policy, wide)
    patient = make_patient(options)
    way_out = WeightExporter(policy, patient, "127.0.0.1", options.hf_checkpoint)
    sender = WeightSender(RunDir(root), plan.trainers[0].at, options, ranks.rank == 0)
    found = []
    if ranks.rank == 0:
        sender.connect([Engine.at(address, index) for index, address in enumerate(addresses)])
    for version in range(1, 1 + updates):
        change(policy, version, every)
        metrics = sender.publish(way_out.stream(), version)
        tensors = {name: digest(tensor) for name, tensor in export(policy) if ranks.rank == 0}
        largest = len(way_out.piece_sender.memory.buffer) if way_out.piece_sender else 0
        found.append(
            {"metrics": metrics, "tensors": tensors, "memory": largest, "sent": sender.update and sender.update.plan}
        )
    way_out.leave()
    sender.close()
    return [{**entry, "sent": entry["sent"] and entry["sent"].sent().tolist()} for entry in found]


def update(
    engines: Engines, wide: Path, world: int, updates: int, every: int = 1, **layout: Any
) -> list[list[dict[str, Any]]]:
    values = {"actor_num_gpus_per_node": world, **layout}
    options = engines.options.model_copy(update=values)
    addresses = [engines.address(index) for index in range(len(engines.processes))]
    return run_ranks(
        world, rank_side, engines.rundir.root, engines.plan, addresses, options, wide, updates, every, timeout=240
    )


TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "sequence_parallel": True}
SOAK = pytest.mark.soak
CASES = [
    pytest.param("qwen3", True, [(4, TP2 | PP2)], id="qwen3"),
    pytest.param("qwen3_moe", False, [(4, TP2 | EP2 | PP2)], id="qwen3_moe"),
    pytest.param("qwen3", False, [(2, TP2), (2, PP2)], id="qwen3-untied", marks=SOAK),
    pytest.param("glm4", False, [(4, TP2 | {"context_parallel_size": 2})], id="glm4", marks=SOAK),
    pytest.param("qwen3_moe", False, [(2, EP2)], id="qwen3_moe-ep", marks=SOAK),
    pytest.param("glm4_moe", False, [(2, TP2 | EP2)], id="glm4_moe", marks=SOAK),
    pytest.param("deepseek_v3", False, [(2, TP2 | EP2)], id="deepseek_v3", marks=SOAK),
    pytest.param("glm4_moe_lite", False, [(2, TP2 | EP2)], id="glm4_moe_lite", marks=SOAK),
    pytest.param("minimax_m2", False, [(2, TP2 | EP2)], id="minimax_m2", marks=SOAK),
    pytest.param("qwen3_next", False, [(2, TP2 | EP2)], id="qwen3_next", marks=SOAK),
]
#: what an engine of a family needs on CPUs
NEEDED: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        "bf16": True,
        "deterministic_mode": False,
        "vllm": {"enable_prefix_caching": False, "enable_chunked_prefill": True},
    }
}


@pytest.mark.parametrize(("name", "tied", "layouts"), CASES)
def test_one_engine_of_a_layout(
    name: str, tied: bool, layouts: list[tuple[int, dict[str, Any]]], nursery: Nursery, tmp_path: Path
) -> None:
    """--check-weight-update-equal compares what the model multiplies with to the tensors that rank 0 gathers."""
    model = make_family(tmp_path / "model", name, tied)
    values = {"check_weight_update_equal": True, "update_weight_buffer_size": SMALL, **NEEDED.get(name, {})}
    engines = nursery.engines(tmp_path / "run", model, **values)
    for world, layout in layouts:
        found = update(engines, model, world, 3, **layout)
        driver = found[0]
        assert driver[0]["tensors"] != driver[1]["tensors"] != driver[2]["tensors"]
        assert driver[2]["metrics"]["perf/update_weights_bytes"] == sum(driver[2]["sent"])
        assert all(sent > 0 for sent in driver[0]["sent"]), "every rank sends"
        assert max(entry[0]["memory"] for entry in found) <= SMALL
    assert engines.stop() == [0]


def ipc_side(root: Path, plan: Plan, addresses: list[Address], options: Any, wide: Path) -> list[float]:
    """One trainer rank, whose engine is said to receive with hpcrl_ipc, which no engine on CPUs is let: bytes of two
    updates."""
    ranks = initialize(options)
    policy = build(options, ranks)
    load_hf(policy, wide)
    way_out = WeightExporter(policy, make_patient(options), "127.0.0.1", None)
    sender = WeightSender(RunDir(root), plan.trainers[0].at, options, ranks.rank == 0)
    if ranks.rank == 0:
        sender.connect([Engine.at(addresses[0], 0)])
        sender.manifests[0][0]["backend"] = "hpcrl_ipc"
    sent = []
    for version in (1, 2):
        change(policy, version, 1)
        sent.append(sender.publish(way_out.stream(), version).get("perf/update_weights_bytes", 0.0))
    assert way_out.exported_memory.block is not None, "its memory was opened"
    way_out.leave()
    sender.close()
    return sent


def test_an_engine_opens_the_ranks_memory_by_its_name(nursery: Nursery, tmp_path: Path) -> None:
    """--weight-transfer ipc with a real engine, in the host's memory: every tensor is compared with what rank 0
    gathers."""
    model = make_family(tmp_path / "model", "qwen3")
    engines = nursery.engines(tmp_path / "run", model, check_weight_update_equal=True, update_weight_buffer_size=SMALL)
    options = engines.options.model_copy(update={"actor_num_gpus_per_node": 2, **TP2})
    found = run_ranks(2, ipc_side, engines.rundir.root, engines.plan, [engines.address()], options, model, timeout=120)
    assert found[0] == 2 * [float(sum(tensor.nbytes for _, tensor in Reference(model).pairs()))]
    assert engines.stop() == [0]


@pytest.mark.soak
def test_fp8_codes_and_scales_come_from_the_ranks(nursery: Nursery, tmp_path: Path) -> None:
    """Blocks that lie on two ranks; the engine then computes what it computes with those of one rank."""
    wide = make_family(tmp_path / "wide", "qwen3")
    convert(wide, tmp_path / "fp8", Scheme("block", (32, 32)))
    engines = nursery.engines(tmp_path / "run", tmp_path / "fp8", update_weight_buffer_size=SMALL)
    answers = []
    for world, layout in ((4, TP2 | PP2), (1, {})):
        found = update(engines, wide, world, 1, **layout)
        answers.append(generate(engines.address(), PROMPT, 24, seed=7))
        total = sum(tensor.nbytes for _, tensor in Reference(wide).pairs())
        assert found[0][0]["metrics"]["perf/update_weights_bytes"] < 0.5 * total
    assert answers[0]["token_ids"] == answers[1]["token_ids"]
    assert answers[0]["logprobs"] == answers[1]["logprobs"]
    assert engines.stop() == [0]


@pytest.mark.soak
@pytest.mark.parametrize("transfer", ["shm", "gloo"])
def test_two_worker_engines_share_a_host(transfer: str, tmp_path: Path) -> None:
    """Two engines of two workers that hold half of every expert, from four ranks; over sockets each engine has its own
    leader."""
    model = make_family(tmp_path / "model", "qwen3_moe")
    workers = {"rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 2, "weight_transfer": transfer}
    engines = Engines(
        tmp_path / "run", model, 2, check_weight_update_equal=True, update_weight_buffer_size=SMALL, **workers
    )
    try:
        for index in range(2):
            engines.wait(index)
        found = update(engines, model, 4, 2, **TP2 | PP2 | {"sequence_parallel": True})
        reference = Reference(model)
        sent = found[0][1]["metrics"]["perf/update_weights_bytes"]
        once = sum(t.nbytes for _, t in reference.pairs())
        assert sent == once or (transfer == "gloo" and sent == 2 * once), (
            "once to each host; over sockets to each engine"
        )
        with torch.no_grad():  # what a checkpoint holds; the frequencies of the positions stay
            for tensor in reference.model.parameters():
                tensor.mul_(1 + 1 / 16).mul_(1 + 2 / 16)
        for index in range(2):
            answer = generate(engines.address(index), PROMPT, 24)
            assert reference.distance(PROMPT, answer) < 1e2 * CLOSE
    finally:
        assert engines.stop() == [0, 0]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param("qwen3_moe", TP2 | EP2, id="experts-spread"),
        pytest.param("qwen3", TP2, id="dense", marks=SOAK),
    ],
)
def test_data_parallel_parts(name: str, layout: dict[str, Any], tmp_path: Path) -> None:
    """Of an engine with two data-parallel parts every worker of both says what it holds, gets that, and is compared.

    With experts it is updated as one that sleeps: vLLM's pause computes a batch, which with experts on parts of a CPU it
    cannot.
    """
    model = make_family(tmp_path / "model", name)
    spread = {"enable_expert_parallel": True} if layout.keys() > TP2.keys() else {}
    engines = Engines(
        tmp_path / "run",
        model,
        check_weight_update_equal=True,
        update_weight_buffer_size=SMALL,
        rollout_num_gpus=2,
        rollout_num_gpus_per_engine=2,
        vllm={"data_parallel_size": 2} | spread,
    )
    try:
        address = engines.address()
        fleet = EngineBroadcast(engines.rundir, [Engine.at(address, 0)], 60)
        [workers] = WorkerCalls(fleet, 2, "127.0.0.1").call("asking", "hpcrl_manifest")
        assert [worker["worker"] for worker in workers] == ["0.0", "1.0"]
        held = [sum(length for _, length in worker["tensors"][DOWN]["rows"]) for worker in workers if spread]
        assert sorted(held) == ([0, 64] if spread else []), "an expert is in one part"
        found = update(engines, model, 2, 2, **layout, colocate=bool(spread))
        once = sum(tensor.nbytes for _, tensor in Reference(model).pairs())
        assert [entry["metrics"]["perf/update_weights_bytes"] for entry in found[0]] == [once, once]
        with pytest.raises(HpcrlError, match="__class__ is not"):
            WorkerCalls(fleet, 2, "127.0.0.1").call("asking", "__class__")
    finally:
        assert engines.stop() == [0]


# ---- engines that end and come


def fault_side(root: Path, plan: Plan, addresses: list[Address], options: Any, wide: Path) -> dict[str, float]:
    """One trainer rank: bytes of every update, by what it was."""
    ranks = initialize(options)
    policy = build(options, ranks)
    load_hf(policy, wide)
    way_out = WeightExporter(policy, make_patient(options), "127.0.0.1", None)
    sender = WeightSender(RunDir(root), plan.trainers[0].at, options, ranks.rank == 0)
    found: dict[str, float] = {}

    def publish(what: str, engines: list[int], version: int) -> None:
        if ranks.rank == 0:
            sender.connect([Engine.at(addresses[index], index) for index in engines])
            if what == "one dies":
                EngineBroadcast(RunDir(root), [Engine.at(addresses[1], 1)], 30).call("breaking", "die_in_pieces")
        try:
            found[what] = sender.publish(way_out.stream(), version).get("perf/update_weights_bytes", 0.0)
        except EngineLost as lost:
            found[what] = -1.0 if "engine-1" in str(lost) else 0.0
        change(policy, version, 64)

    publish("first", [0, 1], 1)
    publish("second", [0, 1], 2)
    publish("one dies", [0, 1], 3)
    publish("again", [0], 3)
    publish("a third joins", [2], 3)
    publish("both", [0, 2], 4)
    publish("on they go", [0, 2], 5)
    way_out.leave()
    sender.close()
    return found


@pytest.mark.soak
@pytest.mark.parametrize("transfer", ["auto", "gloo"])
def test_engine_dies_and_another_joins(transfer: str, nursery: Nursery, tmp_path: Path) -> None:
    """It ends the attempt; then the one that is left gets a whole update, one that joins another alone, then all theirs.

    Every update is compared, bit for bit, with what rank 0 gathers.
    """
    model = make_family(tmp_path / "model", "qwen3")
    values = {
        "check_weight_update_equal": True,
        "update_weight_buffer_size": SMALL,
        "weight_transfer": transfer,
        "attempts": 2,
    }
    engines = nursery.engines(tmp_path / "run", model, 3, rollout_num_gpus=3, **values)
    options = engines.options.model_copy(update={"actor_num_gpus_per_node": 2, **TP2})
    addresses = [engines.address(index) for index in range(3)]
    found = run_ranks(2, fault_side, engines.rundir.root, engines.plan, addresses, options, model, timeout=240)[0]
    whole = found["first"]
    assert found["one dies"] == -1, "it is engine 1 that was lost"
    alone = whole / 2 if transfer == "gloo" else whole  # over sockets each engine gets its own
    assert found["again"] == found["a third joins"] == alone
    assert found["second"] == found["both"] == found["on they go"] == whole
    answers = [generate(addresses[index], PROMPT, 24, seed=7) for index in (0, 2)]
    assert answers[0]["logprobs"] == answers[1]["logprobs"]
    assert {span["version"] for answer in answers for span in answer["weight_versions"]} == {"5"}
    engines.processes[1].process.kill()  # without its core, vLLM's server takes long to end
    engines.stop()
