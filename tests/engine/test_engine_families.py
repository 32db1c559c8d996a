"""Every model family in a real engine: after a live update it computes what transformers computes, and nothing is left
out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hpcrl.convert.to_fp8 import convert
from hpcrl.engines.http import HttpError
from hpcrl.errors import HpcrlError, UsageError
from hpcrl.weights.fp8 import Scheme, quantized
from hpcrl.weights.sender import Differs
from tests.support.engines import CLOSE, LONG, SMALL, Engines, Pairs, Reference, Side, connected, raw_push
from tests.support.forked_engines import Nursery
from tests.support.fp8 import dequantize
from tests.support.tiny import make_family

pytestmark = pytest.mark.vllm


@pytest.fixture
def side(request: pytest.FixtureRequest, nursery: Nursery, tmp_path: Path) -> Iterator[Side]:
    """A fresh engine for the family that the test's parameter names, and the sender to it; every update is compared."""
    name, tied, fields = request.param
    model = make_family(tmp_path / "model", name, tied, **fields)
    engines = nursery.engines(tmp_path / "run", model, check_weight_update_equal=True, update_weight_buffer_size=SMALL)
    side = Side(engines, model)
    yield side
    side.close()
    assert engines.stop() == [0]


DENSE = [
    (name, tied, {})
    for name, tied in [("qwen2", True), ("llama", False), ("qwen3", True), ("qwen3", False), ("glm4", False)]
]
#: the second: an intermediate size that vLLM pads, two dense layers, and sizes that are no powers of two
ODD = {
    "hidden_size": 96,
    "intermediate_size": 72,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "num_hidden_layers": 3,
}
ODD |= {"moe_intermediate_size": 40, "head_dim": 64, "first_k_dense_replace": 2, "n_shared_experts": 2}
SPARSE = [("qwen3_moe", False, {}), ("glm4_moe", False, ODD), ("deepseek_v3", False, {}), ("glm4_moe_lite", False, {})]


def label(case: tuple[str, bool, dict[str, object]]) -> str:
    return f"{case[0]}{'-tied' if case[1] else ''}"


def check_updates(side: Side) -> None:
    """Log-probs before and after two updates; what the engine shows is all that the checkpoint has."""
    fleet = side.sender.fleet
    assert fleet is not None
    [[manifest]] = fleet.call("asking", "hpcrl_manifest")
    sent = {name for name, _ in side.reference.pairs()}
    assert {name for name, held in manifest["tensors"].items() if held["same_as"] is None} == sent
    assert not manifest["opaque"]
    assert not manifest["unseen"]
    assert side.distance() <= CLOSE
    side.push(side.reference.step(11))
    assert side.distance() <= CLOSE
    assert side.distance(LONG) <= CLOSE
    side.push(side.reference.step(12))
    assert side.distance(LONG) <= CLOSE, "a prefix was kept from before the update"


def check_omissions(side: Side, name: str) -> None:
    """An update without one tensor is refused by the sender and by the engine, which goes on with its old weights."""
    pairs = [(n, tensor) for n, tensor in side.reference.pairs() if n != name]
    with pytest.raises(HpcrlError, match=f"has not exported 1 tensors of the engines,.*{name}"):
        side.push(pairs)
    changed = [(n, tensor + 1) for n, tensor in pairs]
    with pytest.raises(HttpError, match=f"1 tensors are missing,.*{name}"):
        raw_push(side.engines, changed)
    with pytest.raises(HttpError, match=f"the model has no {name}x"):
        raw_push(side.engines, [*changed, (f"{name}x", torch.zeros(3))])
    assert side.distance() <= CLOSE


@pytest.mark.parametrize("side", DENSE, indirect=True, ids=map(label, DENSE))
def test_dense_families_after_updates(side: Side) -> None:
    check_updates(side)
    check_omissions(side, "model.layers.1.self_attn.k_proj.weight")


@pytest.mark.parametrize("side", SPARSE, indirect=True, ids=map(label, SPARSE))
def test_sparse_families_after_updates(side: Side) -> None:
    check_updates(side)
    last = side.reference.model.config.num_hidden_layers - 1
    check_omissions(side, f"model.layers.{last}.mlp.experts.5.up_proj.weight")
    if (bias := f"model.layers.{last}.mlp.gate.e_score_correction_bias") in dict(side.reference.pairs()):
        check_omissions(side, bias)
        check_bias(side, bias)
    else:  # the other model's experts are padded, where stock vLLM fails aloud
        check_stale(side)
    check_used(side, f"model.layers.{last}.mlp.experts.")


def test_a_gated_delta_net_after_an_update(nursery: Nursery, tmp_path: Path) -> None:
    """vLLM's CPU build computes it in bf16 alone: the update is compared bit for bit, log-probs as near as that is."""
    model = make_family(tmp_path / "model", "qwen3_next")
    settings = {"enable_prefix_caching": False, "enable_chunked_prefill": True}  # with neither it did not start
    values = {"bf16": True, "deterministic_mode": False, "vllm": settings, "update_weight_buffer_size": SMALL}
    engines = nursery.engines(tmp_path / "run", model, check_weight_update_equal=True, **values)
    side = Side(engines, model)
    pairs = side.reference.step(11)
    before = side.distance()
    side.push(pairs)
    assert side.distance() < 0.1 < before
    side.close()
    assert engines.stop() == [0]


def check_bias(side: Side, name: str) -> None:
    """The router's correction bias, a buffer in transformers, reaches the router: it alone changes what is computed."""
    bias = side.reference.model.get_buffer(name)
    bias += torch.linspace(-2, 2, len(bias))  # other experts win
    assert side.distance() > 1e-3
    side.push(side.reference.pairs())
    assert side.distance() <= CLOSE


def check_stale(side: Side) -> None:
    """Without our repair vLLM multiplies with experts that it has not arranged; the comparison names them."""
    fleet = side.sender.fleet
    assert fleet is not None
    fleet.call("breaking", "break_experts")
    with pytest.raises(Differs, match=r"after the update \d+.*not what was sent:.*experts\.\d+\..*not resumed"):
        side.push(side.reference.step(13))
    fleet.call("mending", "mend_experts")


def check_used(side: Side, prefix: str) -> None:
    """The engine multiplies with the experts that it was sent, and not with what it had before."""
    side.push([(name, -tensor if name.startswith(prefix) else tensor) for name, tensor in side.reference.pairs()])
    assert side.distance() > 1e-3, "the engine does not use the experts"
    side.push(side.reference.pairs())
    assert side.distance() <= CLOSE


def test_two_workers_take_their_experts(tmp_path: Path) -> None:
    """Tensor parallelism, in processes that vLLM starts itself (the nursery has one worker)."""
    model = make_family(tmp_path / "model", "qwen3_moe")
    workers = {"rollout_num_gpus": 2, "rollout_num_gpus_per_engine": 2}
    engines = Engines(
        tmp_path / "run", model, check_weight_update_equal=True, update_weight_buffer_size=SMALL, **workers
    )
    try:
        side = Side(engines, model)
        held = [
            worker["tensors"]["model.layers.1.mlp.experts.5.down_proj.weight"] for worker in side.sender.manifests[0]
        ]
        assert [part["columns"] for part in held] == [[0, 16], [16, 16]]
        assert side.distance() <= CLOSE
        side.push(side.reference.step(31))
        assert side.distance(LONG) <= CLOSE
        side.close()
    finally:
        assert engines.stop() == [0]


# ---- an engine with FP8 weights


def test_fp8_weights_are_quantised_on_the_fly(nursery: Nursery, tmp_path: Path) -> None:
    """An engine with FP8 weights gets them quantised on the fly."""
    wide = make_family(tmp_path / "wide", "qwen3")
    convert(wide, tmp_path / "fp8", Scheme("block", (16, 32)))
    engines = nursery.engines(tmp_path / "run", tmp_path / "fp8", update_weight_buffer_size=SMALL)
    side = Side(engines, wide)
    side.reference.back_to(rounded(side.reference.pairs(), side))
    assert side.distance() <= CLOSE
    for seed in (21, 22):
        side.reference = Reference(wide)
        new = side.reference.step(seed)
        metrics = side.push(new)
        assert metrics["perf/update_weights_bytes"] < 0.5 * sum(t.nbytes for _, t in new)
        assert side.distance() > 1e-3, "the engine computes with wide weights"
        side.reference.back_to(rounded(new, side))
        assert side.distance(LONG) <= CLOSE
    check_wide_is_refused(side, new)
    assert side.distance() <= CLOSE
    checked = engines.options.model_copy(update={"check_weight_update_equal": True})
    with pytest.raises(
        UsageError, match="--check-weight-update-equal cannot look into model.layers.0.self_attn.qkv_proj"
    ):
        connected(engines, checked)
    side.close()
    assert engines.stop() == [0]


def check_wide_is_refused(side: Side, pairs: Pairs) -> None:
    """By the sender and by the engine: without a scale the numbers would mean nothing."""
    scheme = side.sender.scheme
    assert side.sender.update is not None
    coded = list(quantized(iter(pairs), scheme))
    name = "model.layers.1.self_attn.v_proj.weight_scale_inv"
    partial = [(n, t) for n, t in coded if n != name]
    side.sender.update.scheme = None
    with pytest.raises(HpcrlError, match="_proj.weight is float32, the engines need float8_e4m3fn"):
        side.push(pairs)
    with pytest.raises(HpcrlError, match=f"has not exported 1 tensors of the engines,.*{name}"):
        side.push(partial)
    side.sender.update.scheme = scheme
    with pytest.raises(
        HttpError, match=r"_proj.weight is float32\[\d+, \d+\], the model needs float8_e4m3fn\[\d+, \d+\]"
    ):
        raw_push(side.engines, pairs)
    with pytest.raises(HttpError, match=f"1 tensors are missing,.*{name}"):
        raw_push(side.engines, partial)


def rounded(pairs: Pairs, side: Side) -> Pairs:
    """What is left of tensors that went through FP8."""
    scheme = side.sender.scheme
    assert scheme is not None
    assert scheme.chosen is not None
    return [(n, dequantize(*scheme.quantize(n, t), scheme.block) if n in scheme.chosen else t) for n, t in pairs]
