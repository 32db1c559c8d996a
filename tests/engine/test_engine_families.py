"""Every model family in a real engine: after a live update it computes what transformers computes, and nothing is left
out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcrl.engine.membership.http import HttpError
from hpcrl.errors import HpcrlError, UsageError
from hpcrl.models.convert.to_fp8 import convert
from hpcrl.models.files.fp8 import Scheme, quantized
from hpcrl.weights.sender import Differs
from tests.support.engines import (
    CLOSE,
    LONG,
    PROMPT,
    SMALL,
    Engines,
    Pairs,
    Reference,
    Side,
    Trainer,
    generate,
    raw_push,
)
from tests.support.forked_engines import Nursery
from tests.support.fp8 import dequantize
from tests.support.tiny import make_family, with_images

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
    with pytest.raises(HpcrlError, match=f"1 tensors of the engines,.*{name}"):
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


ROUNDED = 2.0  #: distance of an engine in bf16 from fp32, at most, in those of transformers in bf16
#: an update without one of these shows in the log-probs; that of a decay alone would not
SHOWING = ("in_proj_ba.weight", "in_proj_b.weight", "conv1d.weight", "linear_attn.out_proj.weight", "q_proj.weight")
SHOWING += ("experts.down_proj", "lm_head.weight")


def answers(side: Side) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts with the engine's responses of 64 tokens each."""
    address = side.engines.address()
    return [(prompt, generate(address, prompt, 64, seed=seed)) for prompt in (PROMPT, LONG) for seed in (0, 1)]


def rounding(reference: Reference, found: list[tuple[list[int], dict[str, Any]]]) -> tuple[float, float]:
    """How far the engine's log-probs are from fp32, over how far those of transformers in bf16 are: (on average, within
    which 19 of 20 tokens are); the last one's router may have two experts a rounding apart.
    """
    low = reference.in_bf16()
    wide, rounded = (
        torch.tensor([x for prompt, answer in found for x in model.logprobs(prompt, answer["token_ids"])])
        for model in (reference, low)
    )
    engine = (torch.tensor([x for _, answer in found for x in answer["logprobs"]]) - wide).abs()
    own = (rounded - wide).abs()
    return float(engine.mean() / own.mean()), float(engine.quantile(0.95) / own.quantile(0.95))


def check_near(side: Side) -> list[tuple[list[int], dict[str, Any]]]:
    found = answers(side)
    mean, most = rounding(side.reference, found)
    assert mean <= ROUNDED and most <= ROUNDED, f"{mean:.2f} and {most:.2f} of what transformers loses"
    return found


def check_rounding(side: Side, old: Mapping[str, torch.Tensor]) -> None:
    """The engine is as near to fp32 as bf16 lets transformers be, and would not be with one old tensor."""
    found = check_near(side)
    state = side.reference.model.state_dict()
    planted = [name for name in state if "layers.1." not in name and name.endswith(SHOWING)]
    for name in [*planted, "model.layers.1.self_attn.q_proj.weight"]:
        new = state[name].clone()
        state[name].copy_(old[name])
        mean, _ = rounding(side.reference, found)
        state[name].copy_(new)
        assert mean > ROUNDED, f"{name}: {mean:.2f}"


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_gated_delta_nets_after_an_update(nursery: Nursery, tmp_path: Path, kind: str) -> None:
    """vLLM's CPU build computes them in bf16 alone: the update is compared bit for bit, log-probs as near as that is."""
    with updated_in_bf16(nursery, tmp_path, kind) as (side, old):
        check_rounding(side, old)


#: of all other families; with sizes that vLLM's kernels for AMX take, and with odd ones
ROUNDABLE = [*DENSE, *SPARSE, ("qwen3_moe", False, ODD), ("qwen2", False, {"hidden_size": 96, "intermediate_size": 72})]


@pytest.mark.soak
@pytest.mark.parametrize("case", ROUNDABLE, ids=[f"{label(case)}{'-odd' if case[2] else ''}" for case in ROUNDABLE])
def test_families_in_bf16(nursery: Nursery, tmp_path: Path, case: tuple[str, bool, dict[str, Any]]) -> None:
    """What a processor has for bf16 (AMX, AVX-512) takes other kernels, each with its own packed copy."""
    with updated_in_bf16(nursery, tmp_path, case[0], tied=case[1], **case[2]) as (side, _):
        check_near(side)


@contextmanager
def updated_in_bf16(
    nursery: Nursery, tmp_path: Path, kind: str, **fields: Any
) -> Iterator[tuple[Side, Mapping[str, torch.Tensor]]]:
    """An engine after an update, compared bit for bit, and the tensors from before."""
    model = make_family(tmp_path / "model", kind, **fields)
    values = {"bf16": True, "deterministic_mode": False, "vllm": {}, "update_weight_buffer_size": SMALL}
    engines = nursery.engines(tmp_path / "run", model, check_weight_update_equal=True, **values)
    side = Side(engines, model)
    old = {name: tensor.clone() for name, tensor in side.reference.model.state_dict().items()}
    pairs = side.reference.step(11)
    assert rounding(side.reference, answers(side))[0] > ROUNDED, "the engine has what no update has brought"
    side.push(pairs)
    yield side, old
    side.close()
    assert engines.stop() == [0]


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_text_part_of_a_published_model(nursery: Nursery, tmp_path: Path, kind: str) -> None:
    """Of files with a vision part the engine holds the model of text, and takes its tensors by the files' names."""
    text = make_family(tmp_path / "text", f"{kind}_text")
    model = with_images(text, tmp_path / kind)
    values = {"bf16": True, "vllm": {}, "update_weight_buffer_size": SMALL, "check_weight_update_equal": True}
    engines = nursery.engines(tmp_path / "run", model, without_weights=True, **values)
    side = Side(engines, text)
    pairs = [(n.replace("model.", "model.language_model.", 1), t) for n, t in side.reference.step(11)]
    assert {name for name, held in side.sender.manifests[0][0]["tensors"].items() if held["same_as"] is None} == {
        name for name, _ in pairs
    }
    side.push(pairs)
    check_near(side)
    side.close()
    assert engines.stop() == [0]


def test_experts_of_other_names_after_updates(nursery: Nursery, tmp_path: Path) -> None:
    """MiniMax-M2, whose choice of experts vLLM's CPU build does not compute: what the engine holds is compared bit for
    bit with what was sent, and nothing may be missing."""
    model = make_family(tmp_path / "model", "minimax_m2")
    engines = nursery.engines(tmp_path / "run", model, check_weight_update_equal=True, update_weight_buffer_size=SMALL)
    side = Side(engines, model)
    for seed in (11, 12):
        side.push(side.reference.step(seed))
    for lacking in ("experts.5.w3.weight", "self_attn.q_norm.weight", "e_score_correction_bias"):
        pairs = [(n, tensor) for n, tensor in side.reference.pairs() if not n.endswith(f"1.block_sparse_moe.{lacking}")]
        pairs = [(n, tensor) for n, tensor in pairs if not n.endswith(f"1.{lacking}")]
        with pytest.raises(HpcrlError, match=f"1 tensors of the engines,.*1.*{lacking}"):
            side.push(pairs)
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
    with pytest.raises(Differs, match=r"after the update \d+.*not what was sent:.*experts\.\d+\."):
        side.push(side.reference.step(13))
    fleet.call("mending", "mend_experts")


def check_used(side: Side, prefix: str) -> None:
    """The engine multiplies with the experts that it was sent, and not with what it had before."""
    side.push([(name, -tensor if name.startswith(prefix) else tensor) for name, tensor in side.reference.pairs()])
    assert side.distance() > 1e-3, "the engine does not use the experts"
    side.push(side.reference.pairs())
    assert side.distance() <= CLOSE


#: of a family that two workers share: settings, a tensor that is cut, and the rows and columns that each has of it
PAIRS: dict[str, tuple[dict[str, Any], str, list[Any]]] = {
    "qwen3_moe": ({}, "model.layers.1.mlp.experts.5.down_proj.weight", [([[0, 64]], [0, 16]), ([[0, 64]], [16, 16])]),
    "deepseek_v3": ({}, "model.layers.0.self_attn.kv_b_proj.weight", [([[0, 128]], None), ([[128, 128]], None)]),
    "qwen3_next": (
        {"bf16": True, "vllm": {}},
        "model.layers.0.linear_attn.conv1d.weight",
        [([[0, 64], [128, 64], [256, 128]], None), ([[64, 64], [192, 64], [384, 128]], None)],
    ),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_two_workers_take_their_parts(tmp_path: Path, kind: str) -> None:
    """Tensor parallelism, in processes that vLLM starts itself (the nursery has one worker)."""
    settings, cut, parts = PAIRS[kind]
    model = make_family(tmp_path / "model", kind)
    workers = {"rollout_num_gpus": 2, "rollout_num_gpus_per_engine": 2, "update_weight_buffer_size": SMALL}
    engines = Engines(tmp_path / "run", model, check_weight_update_equal=True, **workers, **settings)
    try:
        side = Side(engines, model)
        old = {name: tensor.clone() for name, tensor in side.reference.model.state_dict().items()}
        held = [worker["tensors"][cut] for worker in side.sender.manifests[0]]
        assert [(part["rows"], part["columns"]) for part in held] == parts
        assert not any(worker["opaque"] for worker in side.sender.manifests[0])
        if "bf16" not in settings:
            assert side.distance() <= CLOSE
        side.push(side.reference.step(31))
        if "bf16" in settings:
            check_rounding(side, old)
        else:
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
        UsageError, match="--check-weight-update-equal cannot compare model.layers.0.self_attn.qkv_proj"
    ):
        Trainer(engines, checked)
    side.close()
    assert engines.stop() == [0]


#: sizes that hold whole blocks, of which vLLM's kernel takes rows by 32 and columns by 128
BLOCKS = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 8, "num_key_value_heads": 4}
EXPERTS = {"hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 128}
CODED = {
    "qwen3": BLOCKS | {"head_dim": 32},
    "qwen3_moe": BLOCKS | EXPERTS | {"head_dim": 32},
    "deepseek_v3": EXPERTS | {"q_lora_rank": 128},
}


@pytest.mark.soak
@pytest.mark.parametrize("kind", CODED)
def test_fp8_by_vllms_own_kernel(tmp_path: Path, kind: str) -> None:
    """On a processor with AMX, in bf16: what the engine was sent is what it computes with, but for the codes' rounding."""
    if not torch.cpu._is_amx_tile_supported():
        pytest.skip("this processor has no AMX")
    wide = make_family(tmp_path / "wide", kind, **CODED[kind])
    convert(wide, tmp_path / "fp8", Scheme("block", (128, 128)))
    engines = Engines(tmp_path / "run", tmp_path / "fp8", bf16=True, update_weight_buffer_size=SMALL, vllm={})
    try:
        side = Side(engines, wide)
        for seed in (21, 22):
            side.reference = Reference(wide)
            new = side.reference.step(seed)
            before, _ = rounding(side.reference, answers(side))
            side.push(new)
            if kind == "qwen3":
                side.reference.back_to(rounded(new, side))
                check_near(side)
            else:
                after, _ = rounding(side.reference, answers(side))
                assert after < before / 5, f"{after:.1f} after {before:.1f}"
        side.close()
    finally:
        assert engines.stop() == [0]


def check_wide_is_refused(side: Side, pairs: Pairs) -> None:
    """By the sender and by the engine: without a scale the numbers would mean nothing."""
    scheme = side.sender.scheme
    assert side.sender.update is not None
    coded = list(quantized(iter(pairs), scheme))
    name = "model.layers.1.self_attn.v_proj.weight_scale_inv"
    partial = [(n, t) for n, t in coded if n != name]
    side.sender.update.scheme = side.sender.update.plan = None
    with pytest.raises(HpcrlError, match="_proj.weight is not quantised, .* float8_e4m3fn"):
        side.push(pairs)
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
