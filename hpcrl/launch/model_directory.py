"""What the directory of --hf-checkpoint must hold, and which fields of its config.json hpcrl knows.

Invariant: a field that is not known is refused by name, since what it changes would be missing in training.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcrl.config.custom_functions import listed
from hpcrl.config.options import Options
from hpcrl.errors import DataError, UsageError
from hpcrl.models.family import Config, Family
from hpcrl.models.files.config_json import CONFIG, read_config
from hpcrl.models.files.safetensors_files import AGAIN, INDEX, read_index
from hpcrl.utils.shipped_files import SHIPPED

#: fields of config.json that every family knows: it carries them over, refuses what it does not implement, or they say
#: nothing of the numbers; and those that it knows of a model with experts, latent attention, gated delta nets
KNOWN = {
    "": "_attn_implementation _name_or_path architectures attention_bias attention_dropout attn_implementation "
    "auto_map bos_token_id chunk_size_feed_forward dtype eos_token_id head_dim hidden_act hidden_size id2label "
    "image_token_id initializer_range intermediate_size is_encoder_decoder label2id layer_types "
    "max_position_embeddings max_window_layers mlp_bias model_type num_attention_heads num_hidden_layers "
    "num_key_value_heads num_nextn_predict_layers output_attentions output_hidden_states pad_token_id "
    "partial_rotary_factor pretraining_tp problem_type quantization_config return_dict rms_norm_eps rope_parameters "
    "rope_scaling rope_theta sliding_window text_config tie_word_embeddings torch_dtype transformers_version "
    "unsloth_fixed unsloth_version use_cache use_sliding_window video_token_id vision_config "
    "vision_end_token_id vision_start_token_id vocab_size",
    "num_moe_experts": "aux_loss_alpha decoder_sparse_step ep_size first_k_dense_replace mlp_layer_types "
    "mlp_only_layers moe_intermediate_size moe_layer_freq n_group n_routed_experts n_shared_experts norm_topk_prob "
    "num_experts num_experts_per_tok num_local_experts output_router_logits routed_scaling_factor router_aux_loss_coef "
    "router_jitter_noise scoring_func seq_aux shared_expert_intermediate_size topk_group topk_method use_qk_norm",
    "multi_latent_attention": "kv_lora_rank q_lora_rank qk_head_dim qk_nope_head_dim qk_rope_head_dim rope_interleave "
    "v_head_dim",
    "linear_attention_freq": "attn_output_gate full_attention_interval linear_conv_kernel_dim linear_key_head_dim "
    "linear_num_key_heads linear_num_value_heads linear_value_head_dim mamba_ssm_dtype mtp_num_hidden_layers "
    "mtp_use_dedicated_embeddings",
}
#: how the names of architectures that generate text end
GENERATES = ("ForCausalLM", "ForConditionalGeneration")
#: one of these files holds a tokenizer
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model", "tokenizer_config.json")


def check_fields(config: Config, family: Family, fields: Mapping[str, Any]) -> None:
    """Raise DataError for a field of config.json that the family does not know, or a model that generates no text.

    A field that is null, false, 0 or empty is off.

    Args:
        fields: `family.transformer` of it.
    """
    built = config.get("architectures")
    if isinstance(built, list) and built and not any(str(name).endswith(GENERATES) for name in built):
        raise DataError(
            f"{', '.join(map(str, built))} generates no text", "give a model of architecture ...ForCausalLM"
        )
    known = {*family.knows, *" ".join(names for part, names in KNOWN.items() if not part or fields.get(part)).split()}
    if strange := sorted(name for name, value in config.items() if value and name not in known):
        raise DataError(
            f"config.json of this {family.model_type} model has {', '.join(strange)}, which hpcrl does not know",
            "training would ignore it: use another model, or remove it if it changes nothing",
        )


def check_model_files(path: str) -> None:
    """Raise UsageError unless --hf-checkpoint has a config.json, and with weights every file of their index and a
    tokenizer; config.json alone describes a model that is elsewhere."""
    directory = Path(path)
    try:
        read_config(directory)
        files = sorted(set((read_index(directory) or {}).values()))
    except DataError as error:
        raise UsageError(error.what, error.hint) from None
    if absent := [name for name in files if not (directory / name).is_file()]:
        raise UsageError(f"--hf-checkpoint {path} lacks {listed(absent)}, which {INDEX} names", AGAIN)
    held = {file.suffix for file in directory.iterdir()}
    if ".safetensors" not in held and held & {".bin", ".pt", ".pth"}:
        raise UsageError(f"--hf-checkpoint {path} holds no safetensors", "save its weights with save_pretrained again")
    if ".safetensors" in held and not any((directory / name).is_file() for name in TOKENIZERS):
        raise UsageError(f"--hf-checkpoint {path} holds no tokenizer ({', '.join(TOKENIZERS)})", AGAIN)


def shipped_config(directory: str | None) -> Path | None:
    """The directory of the config.json that hpcrl ships of a model of this name, where `directory` is not here."""
    path = Path(directory or "")
    place = SHIPPED / "examples" / "configs" / path.name
    return place if path.name and not path.exists() and (place / CONFIG).is_file() else None


def with_shipped_config(options: Options) -> Options:
    """The options with that directory for --hf-checkpoint, which a note says; as they are where there is none."""
    place = shipped_config(options.hf_checkpoint)
    if place is None:
        return options
    said = f"{options.hf_checkpoint} is not here: taken is the config.json of {place.name} that hpcrl ships"
    print(f"hpcrl: note: {said}", file=sys.stderr)
    return options.model_copy(update={"hf_checkpoint": str(place)})
