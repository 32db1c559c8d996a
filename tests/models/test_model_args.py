"""slime's model flags (MODEL_ARGS), compared with config.json: right ones pass, each wrong one is named with both
values."""

from __future__ import annotations

from typing import Any

import pytest

from hpcrl.config import passthrough
from hpcrl.config.flags import parse_flags
from hpcrl.config.setting_names import gather_table
from hpcrl.errors import UsageError
from hpcrl.models.family import find_family
from hpcrl.models.model_args import check_model_args
from tests.support.published_models import MODELS


def facts(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    family = find_family(values, "x")
    sizes = {name: values[name] for name in ("vocab_size", "max_position_embeddings")}
    return family.transformer(values), {**family.gpt(values), **family.facts, **sizes}


def check(words: str, values: dict[str, Any]) -> dict[str, Any]:
    return check_model_args(parse_flags(words.split())[0].get("megatron", {}), *facts(values))


@pytest.mark.parametrize("model", MODELS)
def test_published_flags_agree_with_published_configs(model: str) -> None:
    words, values, rest = MODELS[model]
    assert check(words, values) == rest


@pytest.mark.parametrize("model", MODELS)
def test_flags_that_a_login_node_took_as_they_are(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Megatron is not installed its flags' names are not known; the trainer, where it is, reads them."""
    words, values, rest = MODELS[model]
    with monkeypatch.context() as bare:
        bare.setattr(passthrough, "settings", lambda table: None)
        bare.setattr(passthrough, "spellings", lambda table: {})
        given = parse_flags(words.split())[0].get("megatron", {})
    settled = gather_table("megatron", given, "[megatron]")
    assert (
        settled == parse_flags(words.split())[0].get("megatron", {}) == gather_table("megatron", settled, "[megatron]")
    )
    assert check_model_args(settled, *facts(values)) == rest


@pytest.mark.parametrize(
    ("model", "words", "text"),
    [
        ("Qwen2.5-0.5B", "--num-layers 36", "--num-layers 36: the model's config.json says 24"),
        ("Qwen2.5-0.5B", "--no-add-qkv-bias", "--no-add-qkv-bias: the model's config.json says True for add_qkv_bias"),
        ("Qwen2.5-0.5B", "--qk-layernorm", "--qk-layernorm: the model's config.json says False for qk_layernorm"),
        (
            "Qwen2.5-0.5B",
            "--untie-embeddings-and-output-weights",
            "--untie-embeddings-and-output-weights: the model's config",
        ),
        ("Qwen2.5-0.5B", "--num-experts 8", "--num-experts 8: the model's config.json says no such thing"),
        (
            "Qwen2.5-0.5B",
            "--use-rope-scaling",
            "--use-rope-scaling: the model's config.json says False for rope_scaling",
        ),
        ("Qwen2.5-0.5B", "--rotary-scaling-factor 8", "--rotary-scaling-factor 8.0: the model's config.json says 1.0"),
        ("Qwen2.5-0.5B", "--multi-latent-attention", "--multi-latent-attention: the model's config.json says False"),
        (
            "Qwen2.5-0.5B",
            "--max-position-embeddings 40000",
            "--max-position-embeddings 40000: .* says 32768 positions at most",
        ),
        ("Qwen2.5-0.5B", "--no-group-query-attention", "--no-group-query-attention: .* 2 key-value heads for 14 heads"),
        (
            "Qwen2.5-1.5B",
            "--rotary-base 10000",
            "--rotary-base 10000.0: the model's config.json says 1000000.0",
        ),  # slime's
        ("Qwen3-4B", "--kv-channels 80", "--kv-channels 80: the model's config.json says 128"),
        ("Qwen3-4B", "--vocab-size 152064", "--vocab-size 152064: the model's config.json says 151936"),
        ("Qwen3-4B", "--norm-epsilon 1e-5", "--norm-epsilon 1e-05: the model's config.json says 1e-06"),
        ("Qwen3-4B", "--rotary-base 10000", "--rotary-base 10000.0: the model's config.json says 1000000.0"),
        ("Qwen3-4B", "--normalization LayerNorm", "--normalization LayerNorm: the model's config.json says RMSNorm"),
        ("Qwen3-4B", "--position-embedding-type none", "--position-embedding-type none: .* says rope"),
        ("Qwen3-4B", "--num-query-groups 4", "--num-query-groups 4: the model's config.json says 8"),
        ("Qwen3-4B", "--post-mlp-layernorm", "--post-mlp-layernorm: the model's config.json says False"),
        ("Qwen3-30B-A3B", "--moe-router-topk 4", "--moe-router-topk 4: the model's config.json says 8"),
        ("Qwen3-30B-A3B", "--moe-layer-freq 2", r"--moe-layer-freq 2: the model's config.json says \[1\]\*48"),
        (
            "Qwen3-30B-A3B",
            "--moe-shared-expert-intermediate-size 768",
            "768: the model's config.json says no such thing",
        ),
        (
            "Llama-3.1-8B",
            "--rotary-scaling-factor 32",
            "--rotary-scaling-factor 32.0: the model's config.json says 8.0",
        ),
        ("GLM-4-32B-0414", "--rotary-percent 1.0", "--rotary-percent 1.0: the model's config.json says 0.5"),
        ("GLM-4-32B-0414", "--no-rotary-interleaved", "--no-rotary-interleaved: .* says True"),
        ("GLM-4-32B-0414", "--seq-length 65536", "--seq-length 65536: .* says 32768 positions at most"),
        ("GLM-4.5", "--moe-layer-freq [0]*1+[1]*91", r"--moe-layer-freq \[0\]\*1\+\[1\]\*91: the model's config"),
        ("GLM-4.5", "--moe-layer-freq [0]*3+x", r"--moe-layer-freq \[0\]\*3\+x: .* says \[0\]\*3\+\[1\]\*89"),
        ("GLM-4.5", "--moe-router-topk-scaling-factor 1.0", "--moe-router-topk-scaling-factor 1.0: .* says 2.5"),
        ("GLM-4.5", "--moe-router-num-groups 8", "--moe-router-num-groups 8: .* says no such thing"),
    ],
)
def test_a_wrong_flag_is_named_with_both_values(model: str, words: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        check(words, MODELS[model][1])


OTHERWISE = [
    "--moe-router-num-groups 1",
    "--max-position-embeddings 4096",
    "--moe-layer-freq ([0]*3)+([1]*89)",
    "--moe-layer-freq [0,0,0,1]+([1]*4+[1])*17+[1]*3",
]


@pytest.mark.parametrize("words", OTHERWISE)
def test_other_ways_to_say_the_same(words: str) -> None:
    assert check(words, MODELS["GLM-4.5"][1]) == {}


@pytest.mark.parametrize("said", ["4", "([1]*3+[0]*1)*12", "[1,1,1,0]*12"])
def test_linear_attention_by_period_or_list(said: str) -> None:
    assert check(f"--linear-attention-freq {said}", MODELS["Qwen3-Next-80B-A3B"][1]) == {}
    for wrong in ("3", "[1]*48"):
        with pytest.raises(UsageError, match="--linear-attention-freq .* config.json says"):
            check(f"--linear-attention-freq {wrong}", MODELS["Qwen3-Next-80B-A3B"][1])
    with pytest.raises(UsageError, match="no such thing"):
        check(f"--linear-attention-freq {said}", MODELS["Qwen3-4B"][1])


def test_what_says_nothing_of_the_model_is_left() -> None:
    given = {"recompute_granularity": "full", "attention_backend": "flash"}
    assert check_model_args(given, *facts(MODELS["Qwen3-4B"][1])) == given
