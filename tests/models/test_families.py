"""Model families: found by file, read from config.json, refusing what they do not implement."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import hpcrl.models
from hpcrl.config.options import Options
from hpcrl.errors import DataError, UsageError
from hpcrl.models import deepseek_v3, family, glm4, glm4_moe, llama, mimo, qwen2, qwen3, qwen3_moe
from hpcrl.models.shared import mtp

CONFIG = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "rms_norm_eps": 1e-6,
    "vocab_size": 100,
    "tie_word_embeddings": True,
}


def test_a_family_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = Path(qwen3.__file__).read_text().replace('model_type="qwen3"', 'model_type="toy"')
    (tmp_path / "toy_family.py").write_text(text)
    monkeypatch.setattr(hpcrl.models, "__path__", [*hpcrl.models.__path__, str(tmp_path)])
    assert family.registry().keys() >= {"qwen3", "toy"}
    assert family.find_family(CONFIG | {"model_type": "toy"}, "somewhere").model_type == "toy"
    sys.modules.pop("hpcrl.models.toy_family")


def test_an_unknown_model_type_names_the_known_ones() -> None:
    with pytest.raises(DataError, match="somewhere: model type 'gpt9' is not supported; supported: .*qwen3"):
        family.find_family({"model_type": "gpt9"}, "somewhere")


def test_an_architecture_under_another_name() -> None:
    """As early files of MiniMax-M2 have it."""
    early = {"model_type": "minimax", "architectures": ["MiniMaxM2ForCausalLM"]}
    with pytest.raises(DataError, match="'minimax' is not supported.*minimax_m2.*set model_type") as error:
        family.find_family(early, "somewhere")
    assert '"minimax_m2" in config.json' in error.value.hint
    with pytest.raises(DataError, match="supported: .*qwen3"):
        family.find_family(early | {"architectures": ["MiniMaxForCausalLM"]}, "somewhere")


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
    ],
)
def test_rope_theta_of_old_and_new_configs(fields: dict) -> None:
    assert qwen3.FAMILY.gpt(CONFIG | fields)["rotary_base"] == 5e5
    assert family.rope(CONFIG | fields)["kind"] == "default"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"attention_bias": True}, "attention_bias = True"),
        ({"use_sliding_window": True}, "use_sliding_window = True"),
        ({"hidden_act": "relu"}, "hidden_act = 'relu'.*'silu'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_type = 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type = 'linear'"),
        ({"hidden_size": None}, "lacks hidden_size"),
    ],
)
def test_what_a_family_does_not_implement_is_refused(fields: dict, text: str) -> None:
    with pytest.raises(DataError, match=text):
        qwen3.FAMILY.transformer(CONFIG | fields)


def test_head_size_without_head_dim() -> None:
    config = {k: v for k, v in CONFIG.items() if k != "head_dim"}
    assert qwen3.transformer(CONFIG)["kv_channels"] == 24
    assert qwen2.transformer(config | {"model_type": "qwen2"})["kv_channels"] == 16
    with pytest.raises(
        DataError, match="lacks head_dim"
    ):  # transformers' own default has nothing to do with hidden size
        qwen3.transformer(config)


@pytest.mark.parametrize("tied", [True, False])
def test_names_of_all_layers_and_of_tied_embeddings(tied: bool) -> None:
    config = CONFIG | {"tie_word_embeddings": tied}
    rules = dict(qwen3.FAMILY.tensors(config))
    assert rules["decoder.layers.1.mlp.linear_fc2.weight"].hf == ("model.layers.1.mlp.down_proj.weight",)
    assert "decoder.layers.2.mlp.linear_fc2.weight" not in rules
    assert rules["output_layer.weight"].hf == (("model.embed_tokens.weight",) if tied else ("lm_head.weight",))
    assert qwen3.FAMILY.ignores("lm_head.weight", config) == tied


def test_helpers_are_no_families() -> None:
    known = {
        "qwen2",
        "qwen3",
        "llama",
        "glm4",
        "qwen3_moe",
        "glm4_moe",
        "deepseek_v3",
        "kimi_k2",
        "glm4_moe_lite",
        "mimo",
        "minimax_m2",
        "qwen3_next",
        "qwen3_5",
        "qwen3_5_text",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
    }
    assert set(family.registry()) == known


# ---- norms over all heads

MINIMAX = {**CONFIG, "model_type": "minimax_m2", "head_dim": 16, "rotary_dim": 8, "num_local_experts": 8}
MINIMAX |= {"num_experts_per_tok": 2, "scoring_func": "sigmoid", "use_routing_bias": True}


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"scoring_func": None}, "lacks scoring_func"),
        ({"use_routing_bias": False}, "use_routing_bias"),
        ({"qk_norm_type": "per_head"}, "qk_norm_type"),
        ({"shared_intermediate_size": 64}, "shared_intermediate_size"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok = 1"),
    ],
)
def test_minimax_settings_that_are_refused(more: dict[str, Any], told: str) -> None:
    found = family.registry()["minimax_m2"]
    assert found.gpt(MINIMAX)["rotary_percent"] == 0.5
    with pytest.raises(DataError, match=told):
        found.transformer(MINIMAX | more)


# ---- multi-head latent attention

LATENT = CONFIG | {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
YARN = {"type": "yarn", "factor": 8, "original_max_position_embeddings": 64}


def test_absent_groups_of_experts() -> None:
    """n_group null is one group, as if it were not there."""
    assert deepseek_v3.transformer(LATENT | {"n_group": None, "topk_group": None}) == deepseek_v3.transformer(LATENT)


def test_yarn_scales_as_transformers_do() -> None:
    """Without both scales cos and sin grow by m(1), scores by m(mscale_all_dim)^2."""

    def scales(**more: float) -> tuple[float, float]:
        fields = deepseek_v3.transformer(LATENT | {"rope_scaling": YARN | more})
        assert (fields["rope_type"], fields["rotary_scaling_factor"]) == ("yarn", 8.0)
        return fields["mscale"], fields["mscale_all_dim"]

    assert scales() == (1.0, 0.0)
    assert scales(mscale=1.0) == (1.0, 0.0)
    assert scales(mscale=0.7, mscale_all_dim=0.9) == (0.7, 0.9)
    assert deepseek_v3.transformer(LATENT)["rope_type"] == "rope"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"attention_bias": True}, "attention_bias = True"),
        ({"rope_interleave": False}, "rope_interleave = False"),
        ({"num_key_value_heads": 2}, "num_key_value_heads = 2"),
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ({"scoring_func": None}, "lacks scoring_func"),
        ({"topk_method": "greedy"}, "topk_method = 'greedy'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ({"kv_lora_rank": None}, "lacks kv_lora_rank"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type = 'linear'"),
        ({"rope_scaling": YARN | {"truncate": False}}, "truncate = False"),
        ({"rope_scaling": YARN | {"attention_factor": 2.0}}, "attention_factor = 2.0"),
        ({"rope_scaling": YARN | {"mscale_all_dim": 1.0}}, "mscale_all_dim = 1.0"),
        ({"rope_scaling": YARN | {"mscale": 0.7}}, "mscale = 0.7"),
        ({"rope_scaling": YARN | {"mscale": 0, "mscale_all_dim": 0}}, "mscale = 0"),
        ({"model_type": "glm4_moe_lite", "first_k_dense_replace": None}, "lacks first_k_dense_replace"),
        ({"model_type": "glm4_moe_lite", "mlp_layer_types": ["sparse", "sparse"]}, "mlp_layer_types"),
    ],
)
def test_latent_settings_that_are_refused(change: dict[str, object], told: str) -> None:
    config = LATENT | change
    with pytest.raises(DataError, match=told):
        family.find_family(config, "x").transformer(config)


# ---- Llama's rotary scaling

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_llama_3_scaling_is_carried_over() -> None:
    config = CONFIG | {"model_type": "llama", "rope_scaling": LLAMA3}
    assert llama.transformer(config)["qk_layernorm"] is False
    found = llama.gpt(config)
    assert (found["rope_scaling"], found["rope_scaling_factor"], found["rotary_base"]) == (True, 32.0, 500000.0)
    assert "rope_scaling" not in llama.gpt(CONFIG)


@pytest.mark.parametrize(
    "fields", [{"low_freq_factor": 2.0}, {"original_max_position_embeddings": 4096}, {"factor": None}]
)
def test_scaling_that_megatron_has_fixed_is_refused(fields: dict) -> None:
    with pytest.raises(DataError, match=next(iter(fields))):
        llama.gpt(CONFIG | {"model_type": "llama", "rope_scaling": LLAMA3 | fields})


# ---- experts

QWEN3_MOE = CONFIG | {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [3],
}
GLM4_MOE = CONFIG | {
    "model_type": "glm4_moe",
    "num_hidden_layers": 3,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "attention_bias": True,
    "use_qk_norm": False,
    "num_nextn_predict_layers": 1,
    "n_group": 1,
    "topk_group": 1,
}


def test_only_layers_with_experts_have_them() -> None:
    assert qwen3_moe.transformer(QWEN3_MOE)["moe_layer_freq"] == [0, 1, 0, 0]
    rules = dict(qwen3_moe.FAMILY.tensors(QWEN3_MOE))
    rule = rules["decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight"]
    assert (rule.hf, rule.expert) == (("model.layers.1.mlp.experts.3.down_proj.weight",), 3)
    assert rules["decoder.layers.1.mlp.experts.linear_fc2.weight3"].hf == rule.hf  # Transformer Engine's name
    assert rules["decoder.layers.0.mlp.linear_fc2.weight"].expert is None
    names = {name for rule in rules.values() for name in rule.hf}
    assert "model.layers.1.mlp.down_proj.weight" not in names
    assert "model.layers.0.mlp.experts.0.down_proj.weight" not in names
    assert "model.layers.1.mlp.experts.4.down_proj.weight" not in names


def test_number_of_experts_key() -> None:
    """The key of the number of experts in old and new configs."""
    new = {k: v for k, v in QWEN3_MOE.items() if k != "num_experts"} | {"num_local_experts": 4}
    assert qwen3_moe.transformer(new) == qwen3_moe.transformer(QWEN3_MOE)
    with pytest.raises(DataError, match="lacks num_experts"):
        qwen3_moe.transformer(new | {"num_local_experts": None})


def test_absent_norms_and_biases() -> None:
    """Norms and biases that a model lacks are not expected."""
    names = {name for _, rule in glm4_moe.FAMILY.tensors(GLM4_MOE) for name in rule.hf}
    assert "model.layers.0.self_attn.q_proj.bias" in names
    assert "model.layers.0.self_attn.q_norm.weight" not in names
    other = GLM4_MOE | {"attention_bias": False, "use_qk_norm": True}
    names = {name for _, rule in glm4_moe.FAMILY.tensors(other) for name in rule.hf}
    assert "model.layers.0.self_attn.q_proj.bias" not in names
    assert "model.layers.0.self_attn.q_norm.weight" in names


def test_layers_behind_the_last_are_ignored() -> None:
    ignores = glm4_moe.FAMILY.ignores
    assert ignores("model.layers.3.eh_proj.weight", GLM4_MOE)
    assert not ignores("model.layers.2.eh_proj.weight", GLM4_MOE)
    assert not ignores("model.layers.4.eh_proj.weight", GLM4_MOE)
    assert not ignores("model.layers.3.eh_proj.weight", GLM4_MOE | {"num_nextn_predict_layers": 0})


@pytest.mark.parametrize(
    ("config", "fields", "text"),
    [
        (QWEN3_MOE, {"num_experts_per_tok": 1}, "num_experts_per_tok = 1; it must be from 2 to 4"),
        (QWEN3_MOE, {"num_experts_per_tok": 5}, "num_experts_per_tok = 5"),
        (QWEN3_MOE, {"mlp_only_layers": [0, 1, 2, 3]}, "no layer with experts"),
        (GLM4_MOE, {"n_group": 4, "topk_group": 2}, "n_group = 4, topk_group = 2, num_experts_per_tok = 2"),
        (GLM4_MOE, {"n_group": 3, "topk_group": 1}, "n_group = 3"),
        (GLM4_MOE, {"norm_topk_prob": False}, "norm_topk_prob = False"),
        (GLM4_MOE, {"n_shared_experts": 0}, "n_shared_experts = 0"),
        (GLM4_MOE, {"routed_scaling_factor": None}, "lacks routed_scaling_factor"),
    ],
)
def test_unsupported_routing_is_refused(config: dict, fields: dict, text: str) -> None:
    """Routing that Megatron does otherwise is refused."""
    with pytest.raises(DataError, match=text):
        family.find_family(config, "x").transformer(config | fields)


def test_layers_that_predict_further_tokens() -> None:
    """Only where they are asked for; GLM-4.5's is numbered behind the last, MiMo's by itself."""
    few = {name for _, rule in glm4_moe.FAMILY.tensors(GLM4_MOE) for name in rule.hf}
    more = {name for _, rule in glm4_moe.FAMILY.tensors(GLM4_MOE, 1) for name in rule.hf} - few
    assert {"model.layers.3.shared_head.norm.weight", "model.layers.3.mlp.experts.7.down_proj.weight"} < more
    assert all(glm4_moe.FAMILY.ignores(name, GLM4_MOE) for name in more), "without them a file may hold them"
    for tied, head in ((False, "lm_head.weight"), (True, "model.embed_tokens.weight")):
        copied = glm4_moe.FAMILY.copied(GLM4_MOE | {"tie_word_embeddings": tied}, 1)
        assert copied["model.layers.3.shared_head.head.weight"] == head
    config = CONFIG | {"model_type": "mimo", "attention_bias": True, "num_nextn_predict_layers": 1}
    rules = dict(mimo.FAMILY.tensors(config, 1))
    assert rules["mtp.layers.0.eh_proj.weight"].kind == "column_swapped"
    assert rules["mtp.layers.0.transformer_layer.mlp.linear_fc2.weight"].hf == (
        "model.mtp_layers.0.mlp.down_proj.weight",
    )
    with pytest.raises(DataError, match="attention_bias = False"):
        mimo.transformer(config | {"attention_bias": False})


@pytest.mark.parametrize(
    ("name", "change", "asked", "text"),
    [
        ("qwen3", {}, 1, "--mtp-num-layers 1: .* has no layers"),
        (
            "qwen3",
            {"num_nextn_predict_layers": 1},
            1,
            "--mtp-num-layers 1: .* layers of a qwen3 .* it trains those of deepseek_v3, glm4_moe, glm4_moe_lite, mimo",
        ),
        ("glm4_moe", {"num_nextn_predict_layers": 0}, 1, "--mtp-num-layers 1: .* has no layers"),
        ("glm4_moe", {}, 2, "--mtp-num-layers 2: 1 is the most"),
    ],
)
def test_layers_that_a_model_has_not(name: str, change: dict, asked: int, text: str) -> None:
    config = (GLM4_MOE if name == "glm4_moe" else CONFIG) | change
    with pytest.raises(UsageError, match=text):
        mtp.check_heads(Options(mtp_num_layers=asked), family.registry()[name], config)


@pytest.mark.parametrize(
    ("vllm", "change", "by"),
    [
        ({"quantization": "fp8"}, {}, "--vllm-quantization fp8"),
        ({}, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config of"),
        ({"speculative_config": {"quantization": "fp8"}}, {}, '"quantization": "fp8"'),
    ],
)
def test_quantised_layers_to_draft_with(vllm: dict, change: dict, by: str) -> None:
    drafts = {"method": "mtp", "num_speculative_tokens": 1} | vllm.get("speculative_config", {})
    asked = Options(mtp_num_layers=1, vllm=vllm | {"speculative_config": drafts})
    with pytest.raises(UsageError, match=f"do not bring quantised.*{by}.*--hf-checkpoint in BF16"):
        mtp.check_heads(asked, glm4_moe.FAMILY, GLM4_MOE | change)
    mtp.check_heads(Options(mtp_num_layers=1, vllm=vllm), glm4_moe.FAMILY, GLM4_MOE | change)


def test_groups_of_experts() -> None:
    grouped = GLM4_MOE | {"n_group": 4, "topk_group": 1}
    assert glm4_moe.transformer(grouped)["moe_router_num_groups"] == 4
    assert glm4_moe.transformer(GLM4_MOE)["moe_router_num_groups"] is None


# ---- slime's --spec


@pytest.mark.parametrize("plugins", ["slime_plugins", "vime_plugins"])
def test_a_spec_names_its_family(plugins: str) -> None:
    words = [f"{plugins}.models.glm4", "get_glm_spec"]
    assert family.named_by_spec(words) == ["glm4"]
    family.check_spec(words, {"model_type": "glm4"})
    family.check_spec([], {"model_type": "qwen3"})
    with pytest.raises(UsageError, match=r"--spec .*get_glm_spec is a glm4 model, config\.json says 'qwen3'"):
        family.check_spec(words, {"model_type": "qwen3"})


def test_an_unknown_spec_names_the_known_ones() -> None:
    assert family.named_by_spec(["my.module", "spec"]) == []
    with pytest.raises(UsageError, match="--spec my.module spec names no model.*slime_plugins"):
        family.check_spec(["my.module", "spec"], {"model_type": "glm4"})


def test_glm4_norms_and_fused_gate_up() -> None:
    """GLM-4 has norms on both sides and one gate-and-up projection."""
    config = CONFIG | {"model_type": "glm4", "attention_bias": False}
    rules = dict(glm4.FAMILY.tensors(config))
    assert rules["decoder.layers.0.mlp.linear_fc1.weight"].kind == "fused_gate_up"
    assert rules["decoder.layers.1.mlp_bda.norm.weight"].hf == ("model.layers.1.post_mlp_layernorm.weight",)
    assert glm4.gpt(config)["rotary_percent"] == 0.5  # transformers' default for it
    with pytest.raises(DataError, match="lacks attention_bias"):  # whose default has changed between releases
        glm4.transformer({k: v for k, v in config.items() if k != "attention_bias"})


# ---- every number that is carried over


def test_softmax_over_the_chosen_experts() -> None:
    """norm_topk_prob says whether the weights of the chosen add up to 1: then Megatron's softmax comes after the
    choice."""
    for norm, before in ((True, False), (False, True)):
        found = qwen3_moe.transformer(QWEN3_MOE | {"norm_topk_prob": norm})
        assert found["moe_router_pre_softmax"] is before
        assert found["moe_router_score_function"] == "softmax"


def test_layers_with_experts_by_period() -> None:
    """Every so-many-th layer, counted from 1, but for those that are named."""
    for period, plain, wanted in (
        (1, [], [1, 1, 1, 1, 1, 1]),
        (2, [], [0, 1, 0, 1, 0, 1]),
        (3, [], [0, 0, 1, 0, 0, 1]),
        (1, [0, 4], [0, 1, 1, 1, 0, 1]),
        (2, [3], [0, 1, 0, 0, 0, 1]),
    ):
        config = QWEN3_MOE | {"num_hidden_layers": 6, "decoder_sparse_step": period, "mlp_only_layers": plain}
        assert qwen3_moe.transformer(config)["moe_layer_freq"] == wanted
    for dense, wanted in ((0, [1, 1, 1]), (1, [0, 1, 1]), (2, [0, 0, 1])):
        assert glm4_moe.transformer(GLM4_MOE | {"first_k_dense_replace": dense})["moe_layer_freq"] == wanted


def test_numbers_of_experts() -> None:
    """Widths, shared experts, scale and groups, each from its own setting."""
    config = GLM4_MOE | {
        "moe_intermediate_size": 40,
        "n_shared_experts": 3,
        "routed_scaling_factor": 1.75,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 4,
    }
    found = glm4_moe.transformer(config)
    assert (found["moe_ffn_hidden_size"], found["moe_shared_expert_intermediate_size"]) == (40, 120)
    assert (found["num_moe_experts"], found["moe_router_topk"]) == (8, 4)
    assert found["moe_router_topk_scaling_factor"] == 1.75
    assert (found["moe_router_num_groups"], found["moe_router_group_topk"]) == (4, 2)
    assert found["moe_router_score_function"] == "sigmoid" and found["moe_router_enable_expert_bias"] is True
    assert glm4_moe.transformer(GLM4_MOE | {"attention_bias": False, "use_qk_norm": True})["add_qkv_bias"] is False
    with pytest.raises(DataError, match="topk_group = 1"):
        glm4_moe.transformer(config | {"topk_group": 1})


def test_numbers_of_a_plain_decoder() -> None:
    """Heads, groups, widths, epsilon and rotary settings, each from its own setting."""
    config = CONFIG | {"rope_theta": 123.0, "rms_norm_eps": 3e-5}
    found = qwen3.transformer(config)
    assert (found["num_layers"], found["hidden_size"], found["ffn_hidden_size"]) == (2, 64, 96)
    assert (found["num_attention_heads"], found["num_query_groups"], found["kv_channels"]) == (4, 2, 24)
    assert found["layernorm_epsilon"] == 3e-5
    assert qwen3.FAMILY.gpt(config)["rotary_base"] == 123.0
    assert qwen3.FAMILY.gpt(config)["rotary_percent"] == 1.0
    without = {k: v for k, v in config.items() if k not in ("num_key_value_heads", "tie_word_embeddings", "rope_theta")}
    assert qwen3.transformer(without)["num_query_groups"] == 4
    assert qwen3.FAMILY.gpt(without)["share_embeddings_and_output_weights"] is False
    assert qwen3.FAMILY.gpt(without)["rotary_base"] == 10000.0
    assert qwen3.FAMILY.gpt(config)["share_embeddings_and_output_weights"] is True


def test_share_of_a_head_that_is_rotated() -> None:
    """Half of it in GLM-4.5, unless config.json says another share, in its old place or in the new."""
    for fields, share in (
        ({}, 0.5),
        ({"partial_rotary_factor": 0.25}, 0.25),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.75}}, 0.75),
    ):
        assert glm4_moe.FAMILY.gpt(GLM4_MOE | fields)["rotary_percent"] == share
