"""The estimate against bytes counted on a device that knows shapes alone (hpcrl/planning/rehearsal/device.py), phase by phase.

Attention, rotary embedding and norms are stand-ins that keep what Transformer Engine's do (tests/support/fused_layers.py);
all else is what a GPU runs.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.options import Options
from hpcrl.models.family import find_family
from hpcrl.planning.formulas.parameters import Layout, halved_on_stage, on_stage
from hpcrl.planning.formulas.training_memory import ALLOWANCES, kept_buffers, rank_on, start_bytes, update_bytes
from tests.support import families
from tests.support.ranks import on_fake_device, on_fake_gpu

pytestmark = pytest.mark.process

TOKENS = 1024
SIZES = {"hidden_size": 256, "intermediate_size": 640, "num_attention_heads": 8, "num_hidden_layers": 4}
SIZES |= {"moe_intermediate_size": 192, "vocab_size": 2050}
FULL = {"megatron": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
VIRTUAL = {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}
CAREFUL = {"use_precision_aware_optimizer": True}
BF16 = CAREFUL | {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
OFFLOAD = CAREFUL | {"optimizer_cpu_offload": True}
#: name -> family, ranks, the one that is looked at, options
CASES: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    **{name: (name, 1, 0, {}) for name in families.SIZES},
    "recompute": ("qwen3", 1, 0, FULL),
    "tp2 sp": ("qwen3", 2, 0, TP2),
    "tp2 sp recompute": ("glm4", 2, 0, TP2 | FULL),
    "tp2 sp experts": ("glm4_moe", 2, 0, TP2),
    "ep2": ("glm4_moe", 2, 1, {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}),
    "cp2": ("qwen3", 2, 0, {"context_parallel_size": 2}),
    "dp2": ("qwen3", 2, 1, {}),
    "dp2 alone": ("qwen3", 2, 0, {"megatron": {"use_distributed_optimizer": False}}),
    "pp2 first": ("qwen3", 2, 0, {"pipeline_model_parallel_size": 2}),
    "pp2 last": ("qwen3", 2, 1, {"pipeline_model_parallel_size": 2}),
    "pp2 vpp2 first": ("qwen3", 2, 0, VIRTUAL),
    "pp2 vpp2 last": ("qwen3", 2, 1, VIRTUAL),
    "offload": ("qwen3", 1, 0, {"megatron": OFFLOAD}),
    "half of it": ("qwen3", 1, 0, {"megatron": OFFLOAD | {"optimizer_offload_fraction": 0.56}}),
    "precise": ("qwen3", 2, 0, {"megatron": CAREFUL}),
    "precise bf16": ("glm4_moe", 1, 0, {"megatron": BF16}),
    "fused": ("qwen3", 1, 0, {}),
}
#: with Transformer Engine's Adam, held by hpcrl/planning/fake_libraries/transformer_engine.py -> phases that this is no measure of: it
#: computes otherwise, and casts bf16 moments more often than once; Megatron takes a step to load half an optimizer
FUSED: dict[str, tuple[str, ...]] = {
    "offload": (),
    "half of it": ("start", "optimizer step"),
    "precise": (),
    "precise bf16": ("start",),
    "fused": ("optimizer step",),
}
BUFFER = 4 << 20  #: bytes of an update's buffers, which hold the largest tensor
NEAR = 0.05  #: relative


def counted(path: str, n: int, rank: int, fields: dict[str, Any]) -> dict[str, int]:
    """On a rank: bytes that are there between steps, and the peaks of its phases."""
    from hpcrl.planning.rehearsal import device as fake_device
    from hpcrl.planning.rehearsal.live_bytes import DeviceBytes
    from hpcrl.planning.rehearsal.one_rank import export, load_nothing
    from hpcrl.trainer.checkpoint.save_load import Position, everything
    from hpcrl.trainer.megatron import model
    from hpcrl.trainer.step import packing, passes, train_batch
    from tests.support.fused_layers import fused
    from tests.support.shares import plain_sample, share_of

    opts = options(path, n, fields)
    split = opts.tensor_model_parallel_size if opts.sequence_parallel else 1
    sent = (TOKENS // opts.context_parallel_size // split, 1, SIZES["hidden_size"])
    with fake_device.FakeDevice() as device, fused(sent), DeviceBytes(device) as live:
        with live.phase("start"):
            policy = model.build(opts, fake_device.join(opts, rank))
            if opts.megatron.get("use_distributed_optimizer", True):
                load_nothing(policy)
        start = live.peaks["start"]
        batch = share_of([plain_sample(8, TOKENS - 8, group_index=i, response_index=0) for i in range(4)]).batch
        packed = [packing.pack(batch, [row], policy.ranks, opts.sequence_parallel) for row in range(4)]
        step = train_batch.StepTotals("a step", 4, 4 * (TOKENS - 8), True)
        for _ in range(2):  # the first makes the optimizer's moments
            live.peaks.clear()
            with live.phase("log-probs"):
                passes.logprobs(policy, opts, packed)
            with live.phase("forward and backward"):
                for chunk in policy.chunks:
                    chunk.zero_grad_buffer()
                policy.optimizer.zero_grad()
                passes.run(policy, packed, partial(train_batch._loss, policy, opts, step), forward_only=False)
            with live.phase("optimizer step"):
                policy.optimizer.prepare_grads()
                model.take_step(policy.optimizer, 1.0)
        found = {"state": live.now}
        with live.phase("save"):
            everything(policy, policy.ranks, Position(1, 1))
        with live.phase("weight update"):
            written = export(policy, BUFFER)
        assert written * 1.01 >= sum(p.numel() for module in policy.modules for p in module.parameters()), "all weights"
    return found | live.peaks | {"start": start}


def options(path: str, n: int, fields: dict[str, Any]) -> Options:
    return Options(
        hf_checkpoint=path,
        actor_num_gpus_per_node=n,
        lr=1e-6,
        loss_type="sft_loss",
        rollout_max_response_len=TOKENS,
        **fields,
    )


@pytest.mark.parametrize("case", families.one_of_each_kind(CASES))
def test_phases_take_what_is_estimated(tmp_path: Path, case: str) -> None:
    """What stays, and the peak of every phase that takes more, within 5 %; a save takes nothing of the device, or what one tensor
    is made fp32 in."""
    family, n, rank, fields = CASES[case]
    path = str(families.make(tmp_path, family, **SIZES))
    found = (on_fake_gpu if case in FUSED else on_fake_device)(counted, path, n, rank, fields)
    config = json.loads(Path(path, "config.json").read_text())
    opts = options(path, n, fields)
    stage = rank if opts.pipeline_model_parallel_size > 1 else 0
    kind = find_family(config, "")
    terms = rank_on(opts, kind, config, Layout.from_options(opts, SIZES["num_hidden_layers"]), stage)
    allowed = sum(terms.gpu[name] for name in ALLOWANCES)
    state = sum(terms.gpu[name] for name in ("weights", "gradients", "optimizer"))
    assert state == pytest.approx(found["state"], rel=NEAR), "state"
    assert found["save"] - found["state"] == pytest.approx(terms.gpu["save"], rel=NEAR), "a save gathers nothing"
    pieces = {"weight_transfer": "nccl", "update_weight_buffer_size": BUFFER}
    updating = opts.model_copy(update={"loss_type": "policy_loss", "rollout_num_gpus": 1} | pieces)
    update = kept_buffers(updating) + update_bytes(updating, config, kind.transformer(config))
    assert state + update == pytest.approx(found["weight update"], rel=NEAR), "an update in pieces gathers nothing"
    assert found["log-probs"] + allowed <= terms.total, "never the most"
    if "start" not in FUSED.get(case, ("start",)):
        assert terms.resumed - allowed == pytest.approx(found["start"], rel=NEAR), "with Transformer Engine's Adam"
    if case not in FUSED and case != "dp2 alone":
        layout = Layout.from_options(opts, SIZES["num_hidden_layers"])
        count = on_stage(kind, config, layout, stage, opts.megatron)
        halved = halved_on_stage(kind, config, layout, stage, opts.megatron)
        taken = state + start_bytes(opts, count, layout, halved)
        assert taken == pytest.approx(found["start"], rel=NEAR), "start, with torch's Adam"
    for phase in ("forward and backward", "optimizer step"):
        if phase not in FUSED.get(case, ()):
            assert terms.phases[phase] - allowed == pytest.approx(found[phase], rel=NEAR), phase


#: family, ranks, the one that is looked at, options
ADAPTERS: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "tp2 sp": ("qwen3", 2, 0, TP2),
    "ep2": ("glm4_moe", 2, 1, {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}),
}


def counted_with_adapter(path: str, n: int, rank: int, fields: dict[str, Any]) -> dict[str, int]:
    """On a rank before its first step: bytes that are there, and the peaks of an update of merged weights and of the
    digest of the base."""
    from hpcrl.models.lora.matrices import is_adapter
    from hpcrl.models.lora.peft import bit_sums
    from hpcrl.planning.rehearsal import device as fake_device
    from hpcrl.planning.rehearsal.live_bytes import DeviceBytes
    from hpcrl.planning.rehearsal.one_rank import export
    from hpcrl.trainer.megatron import model
    from hpcrl.trainer.weight_export import sent_part

    opts = options(path, n, fields)
    with fake_device.FakeDevice() as device, DeviceBytes(device) as live:
        policy = model.build(opts, fake_device.join(opts, rank))
        base = [p for module in policy.modules for name, p in module.named_parameters() if not is_adapter(name)]
        with live.phase("weight update"):
            written = export(sent_part(policy, opts), BUFFER)
        assert written >= sum(p.numel() for p in base), "all weights, and no adapter"
        with live.phase("digest"):
            bit_sums(max(base, key=lambda p: p.numel()))
    return {name: taken - live.now for name, taken in live.peaks.items()} | {"state": live.now}


@pytest.mark.parametrize("case", ADAPTERS)
def test_an_adapter_takes_what_is_estimated(tmp_path: Path, case: str) -> None:
    """Next to weights without gradients; what is merged for an update, one matrix at a time; the digest of the base."""
    family, n, rank, fields = ADAPTERS[case]
    path = str(families.make(tmp_path, family, **SIZES))
    fields |= {"lora_rank": 8, "lora_serve": "merged"}
    found = on_fake_device(counted_with_adapter, path, n, rank, fields)
    config = json.loads(Path(path, "config.json").read_text())
    more = {"loss_type": "policy_loss", "rollout_num_gpus": 1, "update_weight_buffer_size": BUFFER}
    more["weight_transfer"] = "nccl"
    opts = options(path, n, fields).model_copy(update=more)
    terms = rank_on(opts, find_family(config, ""), config, Layout.from_options(opts, SIZES["num_hidden_layers"]), 0).gpu
    state = terms["weights"] + terms["gradients"] + terms["optimizer"] / 3  # its moments come with the first step
    assert found["state"] == pytest.approx(state, rel=1e-3)
    update = terms["weight update"] + terms["update buffers"]
    assert found["weight update"] == pytest.approx(update, rel=NEAR) and update > 1.2 * BUFFER
    assert found["digest"] == pytest.approx(terms["start"], rel=NEAR), "a directory's tensors are read one by one"
