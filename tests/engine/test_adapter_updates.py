"""Adapters from real trainer ranks to a real engine, alone or merged: what the engine multiplies with is compared bit
for bit, and its log-probs are those of the merged weights in transformers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hpcrl.engine.membership.http import Address
from hpcrl.engine.membership.registry import Engine
from hpcrl.plan import Plan
from hpcrl.run.rundir import RunDir
from hpcrl.trainer.collectives import make_patient
from hpcrl.trainer.megatron.hf_weights import export, load_hf
from hpcrl.trainer.megatron.model import build
from hpcrl.trainer.parallel_state import initialize
from hpcrl.trainer.weight_export import WeightExporter, sent_part
from hpcrl.weights.sender import WeightSender
from tests.support.engines import LONG, PROMPT, SMALL, Engines, Reference, generate
from tests.support.forked_engines import Nursery
from tests.support.ranks import run_ranks
from tests.support.tiny import make_family

pytestmark = pytest.mark.vllm

NEAR = 1e-5  #: of log-probs
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EP2 = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
PP2 = {"pipeline_model_parallel_size": 2}
LORA = {"lora_rank": 4, "lora_alpha": 6}


def rank_side(root: Path, plan: Plan, addresses: list[Address], options: Any) -> list[Any]:
    """One rank: two updates, each of another adapter; what each sent, and the merged weights."""
    from hpcrl.trainer.lora.values import init_adapter

    if options.weight_transfer == "vllm":
        from tests.support import vllm_on_cpu

        vllm_on_cpu.install()
    ranks = initialize(options)
    policy = build(options, ranks)
    load_hf(policy, options.hf_checkpoint)
    init_adapter(policy, 3)
    patient = make_patient(options)
    engines = [Engine.at(address, index) for index, address in enumerate(addresses)]
    sent = sent_part(policy, options)

    def updated(part: Any, version: int, base: bool) -> dict[str, float]:
        way_out = WeightExporter(part, patient, "127.0.0.1", options.hf_checkpoint)
        sender = WeightSender(RunDir(root), plan.trainers[0].at, options, ranks.rank == 0, base=base)
        if ranks.rank == 0:
            sender.connect(engines)
        metrics = sender.publish(way_out.stream(), version)
        way_out.leave()
        sender.close()
        return metrics

    if sent.of_adapters:
        updated(policy, 1, base=True)
    found = []
    for version in (2, 3):
        change(policy, version)
        metrics = updated(sent, version, base=False)
        merged = {name: tensor.clone() for name, tensor in export(policy.with_part("merged")) if ranks.rank == 0}
        elements = sum(tensor.numel() for _, tensor in export(policy.with_part("adapter")))
        found.append((metrics, merged, elements))
    return found


@torch.no_grad()
def change(policy: Any, seed: int) -> None:
    """Other values of B, by its place in the layer, the same on all ranks that hold them."""
    for module in policy.modules:
        for name, parameter in module.named_parameters():
            if name.endswith("lora_B"):
                rows = torch.arange(parameter.numel()).view(parameter.shape)
                parameter.copy_(torch.sin(rows * (1 + seed / 7)) / 8)


def updates_of(engines: Engines, world: int, **layout: Any) -> list[Any]:
    options = engines.options.model_copy(update={"actor_num_gpus_per_node": world, **layout})
    addresses = [engines.address(index) for index in range(len(engines.processes))]
    return run_ranks(world, rank_side, engines.rundir.root, engines.plan, addresses, options, timeout=60)[0]


def check_answers(engines: Engines, model: Path, merged: dict[str, torch.Tensor], version: int) -> None:
    there = shutil.copytree(model, model.with_name(f"merged{version}"))
    save_file(
        {name: tensor.contiguous() for name, tensor in merged.items()}, there / "model.safetensors", {"format": "pt"}
    )
    reference = Reference(there)
    for prompt in (PROMPT, LONG):
        answer = generate(engines.address(), prompt, 24)
        assert {span["version"] for span in answer["weight_versions"]} == {str(version)}
        assert reference.distance(prompt, answer) < NEAR


@pytest.mark.parametrize(
    ("name", "world", "layout", "alone", "transfer"),
    [
        ("qwen3", 4, TP2 | PP2, True, "auto"),
        ("qwen3_moe", 2, TP2 | EP2, False, "auto"),
        ("qwen3", 2, TP2, True, "vllm"),
    ],
    ids=["alone", "merged", "vllm"],
)
def test_adapters_of_ranks_in_an_engine(
    name: str, world: int, layout: dict[str, Any], alone: bool, transfer: str, nursery: Nursery, tmp_path: Path
) -> None:
    model = make_family(tmp_path / "model", name, False)
    values = {
        "check_weight_update_equal": True,
        "update_weight_buffer_size": SMALL,
        "weight_transfer": transfer,
        **LORA,
    }
    engines = nursery.engines(tmp_path / "run", model, without_weights=True, **values)
    found = updates_of(engines, world, **layout)
    for metrics, _, elements in found:
        assert (metrics["perf/update_weights_bytes"] == 4 * elements) == alone
    check_answers(engines, model, found[-1][1], 1 + len(found))
    assert engines.stop() == [0]
