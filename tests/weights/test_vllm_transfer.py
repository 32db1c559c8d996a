"""--weight-transfer vllm: vLLM's own trainer and worker classes between real ranks and real engines, over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hpcrl.engine.membership.broadcast import EngineBroadcast
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
from hpcrl.weights import vllm_transfer
from hpcrl.weights.sender import WeightSender
from tests.support.engines import SMALL, Engines, generate
from tests.support.forked_engines import IPC, Nursery
from tests.support.ranks import run_ranks
from tests.support.tiny import make_family
from tests.weights.pieces.test_resharded_update import EP2, NEEDED, PP2, TP2, change

pytestmark = pytest.mark.vllm
PROMPT = list(range(20, 44))
SOAK = pytest.mark.soak
UPDATES = 2


def rank_side(
    root: Path, plan: Plan, addresses: list[Address], options: Any, wide: Path, packed: bool, spoil: str = ""
) -> list[Any]:
    """One rank: two updates; seconds and bytes of each, and at the end the tensors, or what went wrong."""
    from tests.support import vllm_on_cpu

    ipc = root.name == IPC
    (vllm_on_cpu.install_ipc if ipc else vllm_on_cpu.install)()
    vllm_transfer.PACKED = packed
    ranks = initialize(options)
    policy = build(options.model_copy(update={"hf_checkpoint": str(wide)}), ranks)
    load_hf(policy, wide)
    exporter = WeightExporter(policy, make_patient(options), "127.0.0.1", options.hf_checkpoint)
    asked: list[str] = []
    post_all = EngineBroadcast.post_all
    EngineBroadcast.post_all = lambda fleet, phase, path, *more: (
        asked.append(path) or post_all(fleet, phase, path, *more)
    )  # type: ignore[method-assign]
    sender = WeightSender(RunDir(root), plan.trainers[0].at, options, ranks.rank == 0)
    if ranks.rank == 0:
        sender.connect([Engine.at(address, index) for index, address in enumerate(addresses)])
    found: list[Any] = []
    for version in range(1, 1 + UPDATES):
        change(policy, version, 1)
        found.append(sender.publish(exporter.stream(), version))
    if ranks.rank == 0 and not ipc:
        before = asked[: asked.index("/init_weight_transfer_engine")]
        assert before[-1] == "/pause?mode=keep", "nothing is sampled while NCCL starts"
    if spoil and ipc:
        found += refused(sender, exporter, ranks.rank == 0, spoil)
        sender.publish(exporter.stream(), UPDATES)
        return found
    if spoil and ranks.rank == 0:
        assert isinstance(sender.update, vllm_transfer.VllmUpdate)
        sender.update.trainer.source.shapes.pop(spoil)
    if spoil:
        try:
            sender.publish(exporter.stream(), 1 + UPDATES)
        except (HpcrlError, ValueError) as error:
            found.append(str(error))
    found.append({name: tensor.clone() for name, tensor in export(policy) if ranks.rank == 0})
    sender.close()
    return found


def refused(sender: WeightSender, exporter: WeightExporter, driver: bool, name: str) -> list[str]:
    """An update that the engine refuses when it comes to a tensor: what rank 0 says; the other ranks go on."""
    fleet = sender.fleet
    said = []
    if driver:
        assert fleet is not None
        fleet.call("spoiling", "forget", name)
    try:
        sender.publish(exporter.stream(), 1 + UPDATES)
    except HpcrlError as error:
        said = [str(error)]
    if driver:
        assert fleet is not None
        fleet.call("mending", "remember")
        sender.connect(fleet.engines)
    return said


def updated(engines: Engines, wide: Path, world: int, packed: bool = True, spoil: str = "", **layout: Any) -> Any:
    options = engines.options.model_copy(update={"actor_num_gpus_per_node": world, **layout})
    addresses = [engines.address(index) for index in range(len(engines.processes))]
    return run_ranks(
        world, rank_side, engines.rundir.root, engines.plan, addresses, options, wide, packed, spoil, timeout=240
    )[0]


def started_from(tensors: dict[str, torch.Tensor], model: Path, there: Path) -> Path:
    """A directory with these weights, for an engine that starts from them."""
    there.mkdir()
    for path in model.iterdir():
        if path.suffix == ".json" and "index" not in path.name:
            (there / path.name).write_bytes(path.read_bytes())
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, there / "model.safetensors", {"format": "pt"}
    )
    return there


CASES = [
    pytest.param("qwen3", 2, TP2, 2, True, id="qwen3"),
    pytest.param("qwen3_moe", 2, TP2 | EP2, 1, False, id="qwen3_moe-tensor-by-tensor"),
    pytest.param("qwen3", 2, PP2, 1, False, id="qwen3-tensor-by-tensor", marks=SOAK),
    pytest.param("qwen3_moe", 2, PP2, 1, True, id="qwen3_moe", marks=SOAK),
    pytest.param("glm4", 2, PP2, 1, True, id="glm4", marks=SOAK),
    pytest.param("glm4_moe", 2, TP2 | EP2, 1, True, id="glm4_moe", marks=SOAK),
    pytest.param("deepseek_v3", 2, TP2 | EP2, 1, True, id="deepseek_v3", marks=SOAK),
    pytest.param("glm4_moe_lite", 2, TP2 | EP2, 1, True, id="glm4_moe_lite", marks=SOAK),
    pytest.param("minimax_m2", 2, TP2 | EP2, 1, True, id="minimax_m2", marks=SOAK),
    pytest.param("qwen3_next", 2, TP2 | EP2, 1, True, id="qwen3_next", marks=SOAK),
]


@pytest.mark.parametrize(("name", "world", "layout", "count", "packed"), CASES)
def test_tokens_are_those_of_a_fresh_engine(
    name: str, world: int, layout: dict[str, Any], count: int, packed: bool, nursery: Nursery, tmp_path: Path
) -> None:
    model = make_family(tmp_path / "model", name)
    values = {"weight_transfer": "vllm", "check_weight_update_equal": True, "update_weight_buffer_size": SMALL}
    values |= {"rollout_num_gpus": count} | NEEDED.get(name, {})
    engines = nursery.engines(tmp_path / "run", model, count, **values)
    *metrics, tensors = updated(engines, model, world, packed, **layout)
    size = sum(tensor.nbytes for tensor in tensors.values())
    assert [entry["perf/update_weights_bytes"] for entry in metrics] == UPDATES * [pytest.approx(size, rel=1e-4)]
    if name == "minimax_m2":  # every tensor was compared; vLLM's router for CPUs knows softmax alone
        assert engines.stop() == [0]
        return
    fresh = nursery.engines(tmp_path / "fresh", started_from(tensors, model, tmp_path / "new"), **NEEDED.get(name, {}))
    expected = generate(fresh.address(), PROMPT, 24, seed=7)
    for index in range(count):
        answer = generate(engines.address(index), PROMPT, 24, seed=7)
        assert answer["token_ids"] == expected["token_ids"] and answer["logprobs"] == expected["logprobs"]
        assert {span["version"] for span in answer["weight_versions"]} == {str(UPDATES)}
    assert engines.stop() == count * [0] and fresh.stop() == [0]


@pytest.mark.parametrize(
    ("name", "layout"),
    [pytest.param("qwen3", TP2, id="qwen3"), pytest.param("qwen3_moe", TP2 | EP2, id="qwen3_moe", marks=SOAK)],
)
def test_every_rank_packs_all_tensors(name: str, layout: dict[str, Any], nursery: Nursery, tmp_path: Path) -> None:
    """On shared GPUs; the engine reads what the last rank has packed, in many buffers."""
    model = make_family(tmp_path / "model", name)
    values = {"weight_transfer": "vllm", "check_weight_update_equal": True, "update_weight_buffer_size": SMALL}
    engines = nursery.engines(tmp_path / IPC, model, **values)
    *metrics, tensors = updated(engines, model, 2, **layout)
    assert len(metrics) == UPDATES and metrics[0]["perf/update_weights_bytes"] > 5 * SMALL
    fresh = nursery.engines(tmp_path / "fresh", started_from(tensors, model, tmp_path / "new"))
    answers = [generate(side.address(), PROMPT, 24, seed=7) for side in (engines, fresh)]
    assert answers[0]["token_ids"] == answers[1]["token_ids"] and answers[0]["logprobs"] == answers[1]["logprobs"]
    assert engines.stop() == [0] == fresh.stop()


def test_ranks_go_on_where_an_engine_refuses(nursery: Nursery, tmp_path: Path) -> None:
    """On shared GPUs, in the middle of the buffers: rank 0 alone raises, and the next update is whole."""
    model = make_family(tmp_path / "model", "qwen3")
    engines = nursery.engines(tmp_path / IPC, model, weight_transfer="vllm", update_weight_buffer_size=SMALL)
    name = "model.layers.1.self_attn.v_proj.weight"
    *_, error = updated(engines, model, 2, spoil=name, **TP2)
    assert name in error
    answer = generate(engines.address(), PROMPT, 8, seed=7)
    assert {span["version"] for span in answer["weight_versions"]} == {str(UPDATES)}
    assert engines.stop() == [0]


@pytest.mark.soak
def test_fp8_blocks_are_quantised_on_rank_0(nursery: Nursery, tmp_path: Path) -> None:
    """Codes and scales are two names each; the engine computes what one started from the converted weights does."""
    wide = make_family(tmp_path / "wide", "qwen3")
    scheme = Scheme("block", (32, 32))
    convert(wide, tmp_path / "fp8", scheme)
    values = {"weight_transfer": "vllm", "update_weight_buffer_size": SMALL}
    engines = nursery.engines(tmp_path / "run", tmp_path / "fp8", **values)
    *metrics, tensors = updated(engines, wide, 2, **TP2)
    assert metrics[0]["perf/update_weights_bytes"] < 0.5 * sum(tensor.nbytes for tensor in tensors.values())
    convert(started_from(tensors, wide, tmp_path / "new"), tmp_path / "new-fp8", scheme)
    fresh = nursery.engines(tmp_path / "fresh", tmp_path / "new-fp8")
    answers = [generate(side.address(), PROMPT, 24, seed=7) for side in (engines, fresh)]
    assert answers[0]["token_ids"] == answers[1]["token_ids"]
    assert engines.stop() == [0] == fresh.stop()


def test_names_that_differ_end_the_update(nursery: Nursery, tmp_path: Path) -> None:
    """The rank and the engine both see it; the rank names the tensor."""
    model = make_family(tmp_path / "model", "qwen3")
    engines = nursery.engines(tmp_path / "run", model, weight_transfer="vllm", update_weight_buffer_size=SMALL)
    name = "model.layers.1.self_attn.v_proj.weight"
    *_, error, _ = updated(engines, model, 1, spoil=name)
    assert name in error
    engines.stop()
