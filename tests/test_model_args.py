"""slime's model flags (MODEL_ARGS), compared with config.json: right ones pass, each wrong one is named with both values."""

from __future__ import annotations

from typing import Any

import pytest

from hpcrl.errors import UsageError
from hpcrl.flags import parse_flags
from hpcrl.models.family import find
from hpcrl.models.flags import check_model_args

QWEN2 = (
    "--swiglu --num-layers 24 --hidden-size 896 --ffn-hidden-size 4864 --num-attention-heads 14"
    " --use-rotary-position-embeddings --disable-bias-linear --add-qkv-bias --normalization RMSNorm --norm-epsilon 1e-06"
    " --rotary-base 1000000 --group-query-attention --num-query-groups 2 --vocab-size 151936"
)
QWEN3 = (
    "--swiglu --num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32 --group-query-attention"
    " --num-query-groups 8 --use-rotary-position-embeddings --disable-bias-linear --normalization RMSNorm"
    " --norm-epsilon 1e-06 --rotary-base 1000000 --vocab-size 151936 --kv-channels 128 --qk-layernorm"
)
QWEN3_MOE = (
    "--disable-bias-linear --qk-layernorm --group-query-attention --num-attention-heads 32 --num-query-groups 4"
    " --kv-channels 128 --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --normalization RMSNorm"
    " --position-embedding-type rope --norm-epsilon 1e-06 --rotary-percent 1.0 --swiglu"
    " --untie-embeddings-and-output-weights --vocab-size 151936 --rotary-base 1000000 --moe-ffn-hidden-size 768"
    " --moe-router-score-function softmax --moe-token-dispatcher-type alltoall --moe-router-topk 8"
    f" --moe-layer-freq [{','.join('1' * 48)}] --num-experts 128 --moe-grouped-gemm --moe-token-drop-policy probs"
    " --moe-router-dtype fp32 --moe-permute-fusion --moe-aux-loss-coeff 0"
)
LLAMA = (
    "--swiglu --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention"
    " --num-query-groups 8 --max-position-embeddings 131072 --use-rotary-position-embeddings --disable-bias-linear"
    " --normalization RMSNorm --norm-epsilon 1e-05 --rotary-base 500000 --vocab-size 128256 --kv-channels 128"
    " --use-rope-scaling --rotary-scaling-factor 8.0 --untie-embeddings-and-output-weights"
)
GLM4 = (
    "--spec slime_plugins.models.glm4 get_glm_spec --swiglu --num-layers 64 --hidden-size 6144 --ffn-hidden-size 23040"
    " --num-attention-heads 48 --max-position-embeddings 32768 --seq-length 32768 --use-rotary-position-embeddings"
    " --disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-05 --rotary-base 10000 --group-query-attention"
    " --num-query-groups 8 --vocab-size 151552 --post-self-attn-layernorm --post-mlp-layernorm --rotary-interleaved"
    " --rotary-percent 0.5 --no-rope-fusion --untie-embeddings-and-output-weights"
)
GLM4_MOE = (
    "--disable-bias-linear --qk-layernorm --group-query-attention --num-attention-heads 96 --num-query-groups 8"
    " --kv-channels 128 --num-layers 92 --hidden-size 5120 --ffn-hidden-size 12288 --add-qkv-bias --normalization RMSNorm"
    " --position-embedding-type rope --rotary-percent 0.5 --swiglu --untie-embeddings-and-output-weights"
    " --vocab-size 151552 --rotary-base 1000000 --moe-ffn-hidden-size 1536 --moe-shared-expert-intermediate-size 1536"
    " --moe-router-pre-softmax --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
    " --moe-router-bias-update-rate 0 --moe-router-load-balancing-type seq_aux_loss --moe-token-dispatcher-type alltoall"
    " --moe-router-topk 8 --moe-router-topk-scaling-factor 2.5 --moe-layer-freq [0]*3+[1]*89 --num-experts 160"
    " --moe-grouped-gemm --moe-router-dtype fp32 --moe-permute-fusion --moe-aux-loss-coeff 0"
)


def config(model_type: str, sizes: str, epsilon: float, theta: float, positions: int, tied: bool, **more: Any) -> dict[str, Any]:
    """What the published config.json says; sizes: layers, hidden, MLP, heads, key-value heads, vocabulary."""
    names = "num_hidden_layers hidden_size intermediate_size num_attention_heads num_key_value_heads vocab_size".split()
    return {
        "model_type": model_type,
        "rms_norm_eps": epsilon,
        "rope_theta": theta,
        "max_position_embeddings": positions,
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        **dict(zip(names, map(int, sizes.split()), strict=True)),
        **more,
    }


SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
#: name -> (flags, config.json, what is left for Megatron)
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Qwen2.5-0.5B": (QWEN2, config("qwen2", "24 896 4864 14 2 151936", 1e-6, 1e6, 32768, True), {}),
    "Qwen3-4B": (
        QWEN3,
        config("qwen3", "36 2560 9728 32 8 151936", 1e-6, 1e6, 40960, True, head_dim=128, attention_bias=False),
        {},
    ),
    "Qwen3-30B-A3B": (
        QWEN3_MOE,
        config(
            "qwen3_moe",
            "48 2048 6144 32 4 151936",
            1e-6,
            1e6,
            40960,
            False,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        ),
        {
            "moe_token_dispatcher_type": "alltoall",
            "moe_grouped_gemm": True,
            "moe_token_drop_policy": "probs",
            "moe_router_dtype": "fp32",
            "moe_permute_fusion": True,
            "moe_aux_loss_coeff": 0,
        },
    ),
    "Llama-3.1-8B": (
        LLAMA,
        config("llama", "32 4096 14336 32 8 128256", 1e-5, 5e5, 131072, False, rope_scaling=SCALING, mlp_bias=False),
        {},
    ),
    "GLM-4-32B": (
        GLM4,
        config(
            "glm4",
            "64 6144 23040 48 8 151552",
            1e-5,
            1e4,
            32768,
            False,
            head_dim=128,
            attention_bias=False,
            partial_rotary_factor=0.5,
        ),
        {"apply_rope_fusion": False},
    ),
    "GLM-4.5": (
        GLM4_MOE,
        config(
            "glm4_moe",
            "92 5120 12288 96 8 151552",
            1e-5,
            1e6,
            131072,
            False,
            head_dim=128,
            attention_bias=True,
            use_qk_norm=True,
            partial_rotary_factor=0.5,
            n_routed_experts=160,
            n_shared_experts=1,
            num_experts_per_tok=8,
            moe_intermediate_size=1536,
            first_k_dense_replace=3,
            routed_scaling_factor=2.5,
            norm_topk_prob=True,
            n_group=1,
            topk_group=1,
            num_nextn_predict_layers=1,
        ),
        {
            "moe_router_bias_update_rate": 0,
            "moe_router_load_balancing_type": "seq_aux_loss",
            "moe_token_dispatcher_type": "alltoall",
            "moe_grouped_gemm": True,
            "moe_router_dtype": "fp32",
            "moe_permute_fusion": True,
            "moe_aux_loss_coeff": 0,
        },
    ),
}


def facts(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    family = find(values, "x")
    sizes = {name: values[name] for name in ("vocab_size", "max_position_embeddings")}
    return family.transformer(values), {**family.gpt(values), **family.facts, **sizes}


def check(words: str, values: dict[str, Any]) -> dict[str, Any]:
    return check_model_args(parse_flags(words.split())[0].get("megatron", {}), *facts(values))


@pytest.mark.parametrize("model", MODELS)
def test_published_flags_agree_with_published_configs(model: str) -> None:
    words, values, rest = MODELS[model]
    assert check(words, values) == rest


@pytest.mark.parametrize("model", MODELS)
def test_flags_are_understood_as_megatron_spells_them(model: str) -> None:
    """Without the command line: as names of flags with values, a switch as True."""
    words, values, rest = MODELS[model]
    given: dict[str, Any] = {}
    for part in words.replace("--spec slime_plugins.models.glm4 get_glm_spec ", "").removeprefix("--").split(" --"):
        name, _, value = part.partition(" ")
        given[name] = value or True
    assert check_model_args(given, *facts(values)).keys() == {
        "no-rope-fusion" if name == "apply_rope_fusion" else name.replace("_", "-") for name in rest
    }


@pytest.mark.parametrize(
    ("model", "words", "text"),
    [
        ("Qwen2.5-0.5B", "--num-layers 36", "--num-layers 36: the model's config.json says 24"),
        ("Qwen2.5-0.5B", "--no-add-qkv-bias", "--no-add-qkv-bias: the model's config.json says True for add_qkv_bias"),
        ("Qwen2.5-0.5B", "--qk-layernorm", "--qk-layernorm: the model's config.json says False for qk_layernorm"),
        ("Qwen2.5-0.5B", "--untie-embeddings-and-output-weights", "--untie-embeddings-and-output-weights: the model's config"),
        ("Qwen2.5-0.5B", "--num-experts 8", "--num-experts 8: the model's config.json says no such thing"),
        ("Qwen2.5-0.5B", "--use-rope-scaling", "--use-rope-scaling: the model's config.json says False for rope_scaling"),
        ("Qwen2.5-0.5B", "--rotary-scaling-factor 8", "--rope-scaling-factor 8.0: the model's config.json says 1.0"),
        ("Qwen2.5-0.5B", "--multi-latent-attention", "--multi-latent-attention: the model's config.json says False"),
        ("Qwen2.5-0.5B", "--max-position-embeddings 40000", "--max-position-embeddings 40000: .* says 32768 positions at most"),
        ("Qwen2.5-0.5B", "--no-group-query-attention", "--no-group-query-attention: .* 2 key-value heads for 14 heads"),
        ("Qwen3-4B", "--kv-channels 80", "--kv-channels 80: the model's config.json says 128"),
        ("Qwen3-4B", "--vocab-size 152064", "--vocab-size 152064: the model's config.json says 151936"),
        ("Qwen3-4B", "--norm-epsilon 1e-5", "--norm-epsilon 1e-05: the model's config.json says 1e-06"),
        ("Qwen3-4B", "--rotary-base 10000", "--rotary-base 10000.0: the model's config.json says 1000000.0"),
        ("Qwen3-4B", "--normalization LayerNorm", "--normalization LayerNorm: the model's config.json says RMSNorm"),
        ("Qwen3-4B", "--position-embedding-type none", "--position-embedding-type none: .* says rope"),
        ("Qwen3-4B", "--num-query-groups 4", "--num-query-groups 4: the model's config.json says 8"),
        ("Qwen3-4B", "--post-mlp-layernorm", "--post-mlp-layernorm: the model's config.json says False"),
        ("Qwen3-4B", "--mtp-num-layers 1", "--mtp-num-layers 1: the model's config.json says no such thing"),
        ("Qwen3-30B-A3B", "--moe-router-topk 4", "--moe-router-topk 4: the model's config.json says 8"),
        ("Qwen3-30B-A3B", "--moe-layer-freq 2", r"--moe-layer-freq 2: the model's config.json says \[1\]\*48"),
        ("Qwen3-30B-A3B", "--moe-shared-expert-intermediate-size 768", "768: the model's config.json says no such thing"),
        ("Llama-3.1-8B", "--rotary-scaling-factor 32", "--rope-scaling-factor 32.0: the model's config.json says 8.0"),
        ("GLM-4-32B", "--rotary-percent 1.0", "--rotary-percent 1.0: the model's config.json says 0.5"),
        ("GLM-4-32B", "--no-rotary-interleaved", "--no-rotary-interleaved: .* says True"),
        ("GLM-4-32B", "--seq-length 65536", "--seq-length 65536: .* says 32768 positions at most"),
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


def test_what_says_nothing_of_the_model_is_left() -> None:
    given = {"recompute_granularity": "full", "attention-backend": "flash"}
    assert check_model_args(given, *facts(MODELS["Qwen3-4B"][1])) == given
