"""Published models: slime's flags for them (MODEL_ARGS), and their config.json, each written down by itself.

MODELS[name] is (flags, config.json, what of the flags is not about the model and left for Megatron).
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

# ---- flags

DENSE = (
    "--swiglu --use-rotary-position-embeddings --disable-bias-linear --normalization RMSNorm --group-query-attention"
)
SIZES = "num-layers hidden-size ffn-hidden-size num-attention-heads num-query-groups vocab-size".split()
UNTIED = " --untie-embeddings-and-output-weights"
QWEN3 = " --norm-epsilon 1e-06 --kv-channels 128 --qk-layernorm"
LLAMA = (
    " --max-position-embeddings 131072 --norm-epsilon 1e-05 --rotary-base 500000 --kv-channels 128 --use-rope-scaling"
)
GLM4 = (
    "--spec slime_plugins.models.glm4 get_glm_spec --norm-epsilon 1e-05 --rotary-base 10000 --post-self-attn-layernorm"
    f" --post-mlp-layernorm --rotary-interleaved --rotary-percent 0.5 --no-rope-fusion{UNTIED} "
)
MOE = (
    "--disable-bias-linear --group-query-attention --kv-channels 128 --normalization RMSNorm --position-embedding-type "
    f"rope --swiglu{UNTIED} --rotary-base 1000000 --moe-token-dispatcher-type alltoall --moe-router-topk 8 "
    "--moe-grouped-gemm --moe-router-dtype fp32 --moe-permute-fusion --moe-aux-loss-coeff 0"
)
QWEN3_MOE = (
    f"{MOE} --qk-layernorm --norm-epsilon 1e-06 --rotary-percent 1.0 --num-experts 128 --moe-router-score-function "
    "softmax --moe-token-drop-policy probs"
)
GLM4_MOE = (
    f"{MOE} --add-qkv-bias --rotary-percent 0.5 --moe-router-pre-softmax --moe-router-score-function sigmoid"
    " --moe-router-enable-expert-bias --moe-router-bias-update-rate 0 --moe-router-load-balancing-type seq_aux_loss"
)
MINIMAX = (
    "--disable-bias-linear --group-query-attention --kv-channels 128 --normalization RMSNorm --position-embedding-type "
    f"rope --swiglu{UNTIED} --norm-epsilon 1e-06 --rotary-base 5000000 --rotary-percent 0.5 --qk-layernorm "
    "--no-rope-fusion --attention-softmax-in-fp32 --num-experts 256 --moe-ffn-hidden-size 1536 --moe-router-topk 8 "
    "--moe-router-pre-softmax --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-load-balancing-type none --moe-token-dispatcher-type alltoall --moe-router-dtype fp32 "
    "--moe-aux-loss-coeff 0 --moe-grouped-gemm --moe-permute-fusion --moe-layer-freq [1]*62 "
    "--spec slime_plugins.models.minimax_m2 get_minimax_m2_layer_spec"
)
LATENT = (
    "--disable-bias-linear --normalization RMSNorm --position-embedding-type rope --swiglu"
    f"{UNTIED} --multi-latent-attention --kv-lora-rank 512 --qk-pos-emb-head-dim 64 --qk-layernorm --no-rope-fusion"
    " --moe-router-pre-softmax --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
    " --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0 --moe-router-bias-update-rate 0"
    " --moe-grouped-gemm --moe-router-dtype fp32 --moe-permute-fusion"
)
DEEPSEEK = (
    f"{LATENT} --qk-head-dim 128 --v-head-dim 128 --mscale 1.0 --mscale-all-dim 1.0 --attention-softmax-in-fp32"
    " --moe-token-dispatcher-type alltoall"
)
KIMI = (
    f"{DEEPSEEK} --q-lora-rank 1536 --kv-channels 64 --rotary-base 50000 --num-experts 384 --moe-ffn-hidden-size 2048"
    " --moe-shared-expert-intermediate-size 2048 --moe-router-topk 8 --moe-router-group-topk 1"
    " --moe-router-num-groups 1 --moe-router-topk-scaling-factor 2.827 --moe-layer-freq [0]*1+[1]*60"
)
MOE_REST = {
    "moe_token_dispatcher_type": "alltoall",
    "moe_grouped_gemm": True,
    "moe_router_dtype": "fp32",
    "moe_permute_fusion": True,
    "moe_aux_loss_coeff": 0,
}
QWEN3_MOE_REST = MOE_REST | {"moe_token_drop_policy": "probs"}
#: without --use-gated-attention, which is slime's own
HYBRID = (
    "--disable-bias-linear --qk-layernorm --group-query-attention --kv-channels 256 --normalization RMSNorm "
    "--apply-layernorm-1p --position-embedding-type rope --norm-epsilon 1e-06 --rotary-percent 0.25 --swiglu "
    "--rotary-base 10000000 --attention-output-gate --spec slime_plugins.models."
)
QWEN3_5 = f"{HYBRID}qwen3_5 get_qwen3_5_spec"
GATED_EXPERTS = (
    " --moe-ffn-hidden-size 512 --moe-shared-expert-intermediate-size 512 --moe-router-score-function softmax "
    "--moe-token-dispatcher-type alltoall --moe-grouped-gemm --moe-token-drop-policy probs --moe-router-dtype fp32 "
    f"--moe-permute-fusion --moe-aux-loss-coeff 0 --moe-shared-expert-gate{UNTIED}"
)
GLM4_MOE_REST = MOE_REST | {"moe_router_bias_update_rate": 0, "moe_router_load_balancing_type": "seq_aux_loss"}
LATENT_REST = {
    "apply_rope_fusion": False,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0,
    "moe_router_bias_update_rate": 0,
    "moe_grouped_gemm": True,
    "moe_router_dtype": "fp32",
    "moe_permute_fusion": True,
}
MINIMAX_REST = MOE_REST | {
    "apply_rope_fusion": False,
    "attention_softmax_in_fp32": True,
    "moe_router_load_balancing_type": "none",
}
DEEPSEEK_REST = LATENT_REST | {"attention_softmax_in_fp32": True, "moe_token_dispatcher_type": "alltoall"}


def flags(sizes: str, more: str) -> str:
    """sizes: layers, hidden, MLP, heads, key-value heads, vocabulary; more: the other flags."""
    return f"{more} " + " ".join(f"--{name} {size}" for name, size in zip(SIZES, sizes.split(), strict=True))


# ---- config.json


def config(
    model_type: str, sizes: str, epsilon: float, theta: float, positions: int, tied: bool, **more: Any
) -> Config:
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


def qwen3(sizes: str, tied: bool, theta: float = 1e6, positions: int = 40960) -> Config:
    return config("qwen3", sizes, 1e-6, theta, positions, tied, head_dim=128, attention_bias=False)


def qwen3_moe(sizes: str, moe_intermediate_size: int) -> Config:
    more = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": moe_intermediate_size}
    more |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return config("qwen3_moe", sizes, 1e-6, 1e6, 40960, False, head_dim=128, **more)


def llama(sizes: str, factor: float, tied: bool) -> Config:
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    return config("llama", sizes, 1e-5, 5e5, 131072, tied, head_dim=128, rope_scaling=scaling, mlp_bias=False)


def glm4(sizes: str, bias: bool) -> Config:
    more = {"head_dim": 128, "attention_bias": bias, "partial_rotary_factor": 0.5}
    return config("glm4", sizes, 1e-5, 1e4, 32768, False, **more)


def glm4_moe(sizes: str, experts: int, size: int, dense: int, factor: float, norms: bool) -> Config:
    more = {"n_routed_experts": experts, "moe_intermediate_size": size, "first_k_dense_replace": dense}
    more |= {"routed_scaling_factor": factor, "use_qk_norm": norms, "n_shared_experts": 1, "num_experts_per_tok": 8}
    more |= {"norm_topk_prob": True, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 1}
    more |= {"head_dim": 128, "attention_bias": True, "partial_rotary_factor": 0.5}
    return config("glm4_moe", sizes, 1e-5, 1e6, 131072, False, **more)


def latent_flags(sizes: str, more: str) -> str:
    """sizes: layers, hidden, MLP, heads, vocabulary; more: the other flags."""
    names = [name for name in SIZES if name != "num-query-groups"]
    return f"{more} " + " ".join(f"--{name} {size}" for name, size in zip(names, sizes.split(), strict=True))


def deepseek(
    model_type: str, sizes: str, epsilon: float, theta: float, positions: int, experts: str, factor: float, **more: Any
) -> Config:
    """experts: how many, chosen of them, size, shared ones, groups, best groups, dense layers."""
    names = "n_routed_experts num_experts_per_tok moe_intermediate_size n_shared_experts n_group topk_group"
    found = dict(zip([*names.split(), "first_k_dense_replace"], map(int, experts.split()), strict=True))
    own = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_layer_freq": 1}
    own |= {"routed_scaling_factor": factor, "norm_topk_prob": True, "attention_bias": False}
    own |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    return config(model_type, sizes, epsilon, theta, positions, False, **(found | own | more))


def yarn(factor: float, fast: float) -> dict[str, Any]:
    scaling = {"type": "yarn", "factor": factor, "beta_fast": fast, "beta_slow": 1.0, "mscale": 1.0}
    return scaling | {"mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}


def kimi_k2(epsilon: float, positions: int, factor: float) -> Config:
    sizes = "61 7168 18432 64 64 163840"
    more = {"q_lora_rank": 1536, "rope_scaling": yarn(factor, 1.0)}
    return deepseek("kimi_k2", sizes, epsilon, 5e4, positions, "384 8 2048 1 1 1 1", 2.827, **more)


def hybrid(model_type: str, sizes: str, values: int, tied: bool, **more: Any) -> Config:
    """A model with gated delta nets; values: heads of theirs."""
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    more |= {"head_dim": 256, "rope_parameters": rope, "attention_bias": False, "full_attention_interval": 4}
    more |= {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (int(sizes.split()[0]) // 4)}
    more |= {"linear_num_key_heads": 16, "linear_num_value_heads": values, "linear_conv_kernel_dim": 4}
    more |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    return config(model_type, sizes, 1e-6, 1e7, 262144, tied, **more)


def gated_experts(experts: int, chosen: int) -> Config:
    sizes = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
    return {"num_experts": experts, "num_experts_per_tok": chosen, **sizes}


MODELS: dict[str, tuple[str, Config, dict[str, Any]]] = {
    "Qwen2.5-0.5B": (
        flags("24 896 4864 14 2 151936", f"{DENSE} --add-qkv-bias --norm-epsilon 1e-06 --rotary-base 1000000"),
        config("qwen2", "24 896 4864 14 2 151936", 1e-6, 1e6, 32768, True),
        {},
    ),
    "Qwen2.5-1.5B": (  # without slime's --rotary-base 10000, which is that of Qwen2.5-Math
        flags("28 1536 8960 12 2 151936", f"{DENSE} --add-qkv-bias --norm-epsilon 1e-06"),
        config("qwen2", "28 1536 8960 12 2 151936", 1e-6, 1e6, 131072, True),
        {},
    ),
    "Qwen2.5-3B": (
        flags("36 2048 11008 16 2 151936", f"{DENSE} --add-qkv-bias --norm-epsilon 1e-06 --rotary-base 1000000"),
        config("qwen2", "36 2048 11008 16 2 151936", 1e-6, 1e6, 32768, True),
        {},
    ),
    "Qwen2.5-7B": (
        flags(
            "28 3584 18944 28 4 152064", f"{DENSE} --add-qkv-bias --norm-epsilon 1e-06 --rotary-base 1000000{UNTIED}"
        ),
        config("qwen2", "28 3584 18944 28 4 152064", 1e-6, 1e6, 131072, False),
        {},
    ),
    "Qwen2.5-32B": (
        flags(
            "64 5120 27648 40 8 152064", f"{DENSE} --add-qkv-bias --norm-epsilon 1e-05 --rotary-base 1000000{UNTIED}"
        ),
        config("qwen2", "64 5120 27648 40 8 152064", 1e-5, 1e6, 131072, False),
        {},
    ),
    "Qwen3-0.6B": (
        flags("28 1024 3072 16 8 151936", f"{DENSE}{QWEN3} --rotary-base 1000000"),
        qwen3("28 1024 3072 16 8 151936", True),
        {},
    ),
    "Qwen3-1.7B": (
        flags("28 2048 6144 16 8 151936", f"{DENSE}{QWEN3} --rotary-base 1000000"),
        qwen3("28 2048 6144 16 8 151936", True),
        {},
    ),
    "Qwen3-4B": (
        flags("36 2560 9728 32 8 151936", f"{DENSE}{QWEN3} --rotary-base 1000000"),
        qwen3("36 2560 9728 32 8 151936", True),
        {},
    ),
    "Qwen3-4B-Instruct-2507": (
        flags("36 2560 9728 32 8 151936", f"{DENSE}{QWEN3} --rotary-base 5000000"),
        qwen3("36 2560 9728 32 8 151936", True, theta=5e6, positions=262144),
        {},
    ),
    "Qwen3-8B": (
        flags("36 4096 12288 32 8 151936", f"{DENSE}{QWEN3} --rotary-base 1000000{UNTIED}"),
        qwen3("36 4096 12288 32 8 151936", False),
        {},
    ),
    "Qwen3-14B": (
        flags("40 5120 17408 40 8 151936", f"{DENSE}{QWEN3} --rotary-base 1000000{UNTIED}"),
        qwen3("40 5120 17408 40 8 151936", False),
        {},
    ),
    "Qwen3-32B": (
        flags("64 5120 25600 64 8 151936", f"{DENSE}{QWEN3} --rotary-base 1000000{UNTIED}"),
        qwen3("64 5120 25600 64 8 151936", False),
        {},
    ),
    "Qwen3-30B-A3B": (
        flags(
            "48 2048 6144 32 4 151936", f"{QWEN3_MOE} --moe-ffn-hidden-size 768 --moe-layer-freq [{','.join('1' * 48)}]"
        ),
        qwen3_moe("48 2048 6144 32 4 151936", 768),
        QWEN3_MOE_REST,
    ),
    "Qwen3-235B-A22B": (
        flags(
            "94 4096 12288 64 4 151936",
            f"{QWEN3_MOE} --moe-ffn-hidden-size 1536 --moe-layer-freq [{','.join('1' * 94)}]",
        ),
        qwen3_moe("94 4096 12288 64 4 151936", 1536),
        QWEN3_MOE_REST,
    ),
    "MiMo-7B-RL": (
        flags(
            "36 4096 11008 32 8 151680",
            f"{DENSE} --add-qkv-bias --norm-epsilon 1e-05 --rotary-base 640000 --max-position-embeddings 32768{UNTIED}",
        ),
        config(
            "mimo",
            "36 4096 11008 32 8 151680",
            1e-5,
            640000,
            32768,
            False,
            head_dim=128,
            attention_bias=True,
            num_nextn_predict_layers=1,
        ),
        {},
    ),
    "Qwen3-Next-80B-A3B": (
        flags(
            "48 2048 5120 16 2 151936",
            f"{HYBRID}qwen3_next get_qwen3_next_spec{GATED_EXPERTS} --moe-router-topk 10 --num-experts 512 "
            f"--moe-layer-freq [{','.join('1' * 48)}]",
        ),
        hybrid("qwen3_next", "48 2048 5120 16 2 151936", 32, False, norm_topk_prob=True, **gated_experts(512, 10)),
        QWEN3_MOE_REST,
    ),
    "Qwen3.5-0.8B": (
        flags("24 1024 3584 8 2 248320", QWEN3_5),
        hybrid("qwen3_5", "24 1024 3584 8 2 248320", 16, True),
        {},
    ),
    "Qwen3.5-27B": (
        flags("64 5120 17408 24 4 248320", f"{QWEN3_5}{UNTIED}"),
        hybrid("qwen3_5", "64 5120 17408 24 4 248320", 48, False, mtp_num_hidden_layers=1),
        {},
    ),
    "Qwen3.5-35B-A3B": (  # and Qwen3.6-35B-A3B
        flags(
            "40 2048 512 16 2 248320",
            f"{QWEN3_5}{GATED_EXPERTS} --moe-router-topk 8 --num-experts 256 --moe-layer-freq [1]*40",
        ),
        hybrid("qwen3_5_moe", "40 2048 512 16 2 248320", 32, False, **gated_experts(256, 8)),
        QWEN3_MOE_REST,
    ),
    "Llama-3.1-8B": (
        flags("32 4096 14336 32 8 128256", f"{DENSE}{LLAMA} --rotary-scaling-factor 8.0{UNTIED}"),
        llama("32 4096 14336 32 8 128256", 8.0, False),
        {},
    ),
    "Llama-3.2-3B": (
        flags("28 3072 8192 24 8 128256", f"{DENSE}{LLAMA} --rotary-scaling-factor 32.0"),
        llama("28 3072 8192 24 8 128256", 32.0, True),
        {},
    ),
    "GLM-4-9B-0414": (  # and GLM-Z1-9B-0414
        flags("40 4096 13696 32 2 151552", f"{GLM4}{DENSE} --add-qkv-bias"),
        glm4("40 4096 13696 32 2 151552", True),
        {"apply_rope_fusion": False},
    ),
    "GLM-4-32B-0414": (
        flags("64 6144 23040 48 8 151552", f"{GLM4}{DENSE} --max-position-embeddings 32768 --seq-length 32768"),
        glm4("64 6144 23040 48 8 151552", False),
        {"apply_rope_fusion": False},
    ),
    "GLM-4.5-Air": (
        flags(
            "46 4096 10944 96 8 151552",
            f"{GLM4_MOE} --moe-ffn-hidden-size 1408 --moe-shared-expert-intermediate-size 1408 --num-experts 128"
            " --moe-layer-freq [0]*1+[1]*45",
        ),
        glm4_moe("46 4096 10944 96 8 151552", 128, 1408, 1, 1.0, False),
        GLM4_MOE_REST,
    ),
    "GLM-4.5": (
        flags(
            "92 5120 12288 96 8 151552",
            f"{GLM4_MOE} --moe-ffn-hidden-size 1536 --moe-shared-expert-intermediate-size 1536 --num-experts 160"
            " --moe-layer-freq [0]*3+[1]*89 --moe-router-topk-scaling-factor 2.5 --qk-layernorm",
        ),
        glm4_moe("92 5120 12288 96 8 151552", 160, 1536, 3, 2.5, True),
        GLM4_MOE_REST,
    ),
    "MiniMax-M2": (  # and M2.5
        flags("62 3072 1536 48 8 200064", MINIMAX),
        config(
            "minimax_m2",
            "62 3072 1536 48 8 200064",
            1e-6,
            5e6,
            196608,
            False,
            head_dim=128,
            rotary_dim=64,
            num_local_experts=256,
            num_experts_per_tok=8,
            scoring_func="sigmoid",
            use_routing_bias=True,
            use_qk_norm=True,
            qk_norm_type="per_layer",
            shared_intermediate_size=0,
            sliding_window=None,
            quantization_config={
                "quant_method": "fp8",
                "fmt": "float8_e4m3fn",
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
                "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
            },
        ),
        MINIMAX_REST,
    ),
    "DeepSeek-R1": (
        latent_flags(
            "61 7168 18432 128 129280",
            f"{DEEPSEEK} --q-lora-rank 1536 --kv-channels 128 --norm-epsilon 1e-06 --rotary-scaling-factor 40"
            " --rotary-base 10000 --num-experts 256 --moe-ffn-hidden-size 2048 --moe-router-topk 8"
            " --moe-shared-expert-intermediate-size 2048 --moe-router-group-topk 4 --moe-router-num-groups 8"
            " --moe-router-topk-scaling-factor 2.5 --moe-layer-freq [0]*3+[1]*58",
        ),
        deepseek(
            "deepseek_v3",
            "61 7168 18432 128 128 129280",
            1e-6,
            1e4,
            163840,
            "256 8 2048 1 8 4 3",
            2.5,
            q_lora_rank=1536,
            rope_scaling=yarn(40, 32),
            num_nextn_predict_layers=1,
        ),
        DEEPSEEK_REST,
    ),
    "Moonlight-16B-A3B": (
        latent_flags(
            "27 2048 11264 16 163840",
            f"{DEEPSEEK} --kv-channels 128 --norm-epsilon 1e-05 --rotary-percent 1.0 --no-masked-softmax-fusion"
            " --rotary-scaling-factor 1 --rotary-base 50000 --num-experts 64 --moe-ffn-hidden-size 1408"
            " --moe-router-topk 6 --moe-shared-expert-intermediate-size 2816 --moe-router-group-topk 1"
            " --moe-router-num-groups 1 --moe-router-topk-scaling-factor 2.446 --moe-token-drop-policy probs"
            " --moe-layer-freq [0]*1+[1]*26",
        ),
        deepseek(
            "deepseek_v3",
            "27 2048 11264 16 16 163840",
            1e-5,
            5e4,
            8192,
            "64 6 1408 2 1 1 1",
            2.446,
            q_lora_rank=None,
            num_nextn_predict_layers=0,
        ),
        DEEPSEEK_REST | {"masked_softmax_fusion": False, "moe_token_drop_policy": "probs"},
    ),
    "Kimi-K2-Instruct": (
        latent_flags("61 7168 18432 64 163840", f"{KIMI} --norm-epsilon 1e-06 --rotary-scaling-factor 32.0"),
        kimi_k2(1e-6, 131072, 32.0),
        DEEPSEEK_REST,
    ),
    "Kimi-K2-Thinking": (
        latent_flags("61 7168 18432 64 163840", f"{KIMI} --norm-epsilon 1e-05 --rotary-scaling-factor 64.0"),
        kimi_k2(1e-5, 262144, 64.0),
        DEEPSEEK_REST,
    ),
    "GLM-4.7-Flash": (  # with slime's --add-qkv-bias, of which Megatron's attention has none here
        latent_flags(
            "47 2048 10240 20 154880",
            f"{LATENT} --qk-head-dim 192 --v-head-dim 256 --q-lora-rank 768 --kv-channels 192 --add-qkv-bias"
            " --rotary-base 1000000 --num-experts 64 --moe-ffn-hidden-size 1536 --moe-router-topk 4"
            " --moe-shared-expert-intermediate-size 1536 --moe-router-topk-scaling-factor 1.8"
            " --moe-layer-freq [0]*1+[1]*46",
        ),
        deepseek(
            "glm4_moe_lite",
            "47 2048 10240 20 20 154880",
            1e-5,
            1e6,
            202752,
            "64 4 1536 1 1 1 1",
            1.8,
            q_lora_rank=768,
            qk_nope_head_dim=192,
            v_head_dim=256,
            num_nextn_predict_layers=1,
        ),
        LATENT_REST,
    ),
}
