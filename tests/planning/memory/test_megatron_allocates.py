"""The estimate against what Megatron allocates: bytes of weights, gradients, optimizer states and activations, counted
on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.options import Options
from hpcrl.models.family import LayerKind, find_family
from hpcrl.planning.formulas.activations import layer_bytes
from hpcrl.planning.formulas.parameters import Layout
from hpcrl.planning.formulas.training_memory import rank_on
from tests.support.published_models import config
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.process

DENSE = config("qwen3", "4 256 640 8 4 2050", 1e-6, 1e6, 2048, True, head_dim=32, attention_bias=False)
MOE = config(
    "glm4_moe", "4 256 640 8 4 2050", 1e-5, 1e6, 2048, False, head_dim=32, attention_bias=True, partial_rotary_factor=0.5,
    n_routed_experts=8, moe_intermediate_size=192, first_k_dense_replace=1, routed_scaling_factor=1.0, use_qk_norm=True,
    n_shared_experts=1, num_experts_per_tok=2, norm_topk_prob=True, n_group=1, topk_group=1,
)  # fmt: skip
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
SP2 = {**TP2, "sequence_parallel": True}
PLAIN = {"megatron": {"use_distributed_optimizer": False, "grad_reduce_in_fp32": False}}
VPP2 = {"num_virtual_stages_per_pipeline_rank": 2}
EP2 = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}

#: layout, the same for all of its cases -> [(model, options)], each over two ranks
CASES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "tp2": [("dense", SP2), ("dense", {**TP2, "bf16": False})],
    "tp2 ep2": [("moe", SP2 | EP2)],
    "pp2": [
        ("dense", PP2),
        ("moe", {**PP2, **PLAIN}),
        ("dense", {**PP2, "megatron": {"num_layers_in_first_pipeline_stage": 1}}),
    ],
    "pp2 vpp2": [("dense", {**PP2, **VPP2}), ("moe", {**PP2, **VPP2})],
    "dp2": [("dense", {}), ("dense", PLAIN), ("dense", {"bf16": False}), ("moe", {})],
    "ep2": [("moe", EP2)],
}
NEAR = 0.10  #: relative


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, fields in (("dense", DENSE), ("moe", MOE)):
        found[name] = tmp_path_factory.mktemp(name)
        (found[name] / "config.json").write_text(json.dumps(fields))
    return found


def measured(every: list[Options]) -> list[dict[str, Any]]:
    """On a rank: bytes of weights, gradients and optimizer states of each model, and its pipeline stage."""
    from hpcrl.trainer import parallel_state
    from hpcrl.trainer.megatron import model

    ranks, found = None, []
    for opts in every:
        policy = model.build(opts, ranks or parallel_state.initialize(opts))
        ranks = policy.ranks
        found.append({"stage": int(ranks.last_stage and not ranks.first_stage), **bytes_of(policy)})
    return found


def bytes_of(policy: Any) -> dict[str, int]:
    import torch

    buffers = [buffer for chunk in policy.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    parameters = {id(p): p for chunk in policy.chunks for p in chunk.parameters()}
    policy.optimizer.step()  # which makes Adam's moments
    states = {}
    for leaf in getattr(policy.optimizer, "chained_optimizers", [policy.optimizer]):
        inner = leaf.optimizer
        own = [p for group in inner.param_groups for p in group["params"]] if leaf.config.bf16 else []
        tensors = [
            *own,
            *(t for state in inner.state.values() for t in state.values() if torch.is_tensor(t) and t.numel() > 1),
        ]
        states |= {id(t): t.numel() * t.element_size() for t in tensors}
    return {
        "weights": sum(p.numel() * p.element_size() for p in parameters.values()),
        "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
        "optimizer": sum(states.values()),
    }


@pytest.mark.parametrize("layout", CASES)
def test_estimated_sizes(models: dict[str, Path], layout: str) -> None:
    """Weights, gradients and optimizer are as large as estimated."""
    every = [
        Options(**{"hf_checkpoint": str(models[name]), "actor_num_gpus_per_node": 2, "lr": 1e-6} | fields)
        for name, fields in CASES[layout]
    ]
    for case, (opts, *found) in enumerate(zip(every, *run_ranks(2, measured, every, timeout=240), strict=True)):
        fields = json.loads(Path(opts.hf_checkpoint or "", "config.json").read_text())
        for rank in found:
            terms = rank_on(opts, find_family(fields, ""), fields, Layout.from_options(opts, 4), rank["stage"])
            for name in ("weights", "gradients", "optimizer"):
                error = terms.gpu[name] / rank[name] - 1
                assert abs(error) <= NEAR, (
                    f"{layout} {CASES[layout][case]}: {name} {terms.gpu[name]} for {rank[name]}, {error:+.1%}"
                )
    assert len(every) == len(CASES[layout])


TOKENS = 512
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def kept(every: dict[int, Options]) -> dict[str, float]:
    """On a rank: bytes that one layer's forward pass keeps, by what is recomputed: the difference of models of two
    lengths."""
    from hpcrl.trainer import parallel_state
    from hpcrl.trainer.megatron import model

    ranks, found = None, {}
    for name, recompute in RECOMPUTE.items():
        by_length = {}
        for layers, opts in every.items():
            policy = model.build(
                opts.model_copy(update={"megatron": recompute}), ranks or parallel_state.initialize(opts)
            )
            ranks, by_length[layers] = policy.ranks, saved_bytes(policy)
        short, long = sorted(by_length)
        found[name] = (by_length[long] - by_length[short]) / (long - short)
    return found


def saved_bytes(policy: Any) -> int:
    """Storages that the decoder's forward pass saves, without its weights."""
    import torch

    from tests.trainer.megatron.test_model_parity import pack

    module = policy.module
    stored = {}
    alive = []
    weights = {p.untyped_storage().data_ptr() for p in policy.model.parameters()}

    def note(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            stored[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # so that no other takes its place
        return tensor

    packed = pack([torch.ones(TOKENS, dtype=torch.int64)], 1, 0)[1]
    module.train()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        hidden = torch.randn(TOKENS, 1, policy.config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        rotary = module.rotary_pos_emb(TOKENS, packed_seq=True)
        module.decoder(hidden_states=hidden, attention_mask=None, rotary_pos_emb=rotary, packed_seq_params=packed)
    return sum(stored.values())


@pytest.mark.parametrize(("name", "config", "sparse"), [("dense", DENSE, False), ("moe", MOE, True)])
def test_activations_that_a_layer_keeps(
    models: dict[str, Path], tmp_path: Path, name: str, config: Any, sparse: bool
) -> None:
    """With full recomputation a layer's input alone, which the CPU keeps as a GPU does; without, the CPU's norms and
    attention keep copies in fp32 that fused ones do not, so that the formula is a lower bound here."""
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    every = {
        n: Options(hf_checkpoint=str(path), actor_num_gpus_per_node=1, lr=1e-6)
        for n, path in ((4, models[name]), (2, tmp_path))
    }
    (found,) = run_ranks(1, kept, every, timeout=120)
    fields = find_family(config, "").transformer(config)
    whole = TOKENS * layer_bytes(fields, Layout.from_options(every[4], 4), LayerKind(sparse), 2, frozenset(), 2)
    assert found["full"] == pytest.approx(TOKENS * fields["hidden_size"] * 2, rel=NEAR)
    assert whole <= found["none"] <= 4 * whole
