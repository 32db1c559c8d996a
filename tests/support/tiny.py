"""A Hugging Face model that fits in a test: character-level tokenizer and a random Qwen3 of some 0.1 M parameters.

    make_model(directory, tied=True) -> directory

Nothing is downloaded.  The matrices are drawn three times wider than usual, so that next-token distributions are far
from uniform and a wrong weight shows in the log-probs.
"""

from __future__ import annotations

import json
import shutil
import string
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|unk|>")


def make_tokenizer(vocab_size: int = 128) -> PreTrainedTokenizerFast:
    """One printable character, one token; the rest of the vocabulary is filled up with unused tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = [c for c in string.printable if c not in "\r\x0b\x0c"]
    names = [*SPECIAL, *characters]
    names += [f"<|extra_{i}|>" for i in range(len(names), vocab_size)]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        unk_token="<|unk|>",
        additional_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    fast.chat_template = CHAT
    return fast


def make_model(directory: str | Path, tied: bool = True, seed: int = 0, vocab_size: int = 128, **config: Any) -> Path:
    """Save tokenizer, config and fp32 weights of a tiny random Qwen3 in `directory`; returns it.

    config: fields of Qwen3Config that replace the defaults below.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    directory = Path(directory)
    tokenizer = make_tokenizer(vocab_size)
    fields: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(Qwen3Config(**(fields | config))).float()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1:
                    parameter.mul_(3.0)
                elif "norm" in name:  # not all ones: a mixed-up norm would not show
                    parameter.uniform_(0.8, 1.2)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


#: a delta net below softmax attention
DELTA_NET = {
    "head_dim": 32,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,  # the least that vLLM computes with on a CPU
    "linear_value_head_dim": 64,
}

#: what makes a tiny model of each family differ from the common fields of `make_family`
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"num_attention_heads": 2, "num_key_value_heads": 1},  # vLLM on the CPU wants heads of 32 columns or more
    "llama": {"head_dim": 32},
    "qwen3": {"head_dim": 32},
    "glm4": {"head_dim": 32, "attention_bias": True, "partial_rotary_factor": 0.5},
    "qwen3_next": {
        **DELTA_NET,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3_5_text": DELTA_NET,
    "qwen3_5_moe_text": {
        **DELTA_NET,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe": {"head_dim": 32, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2},
    "minimax_m2": {
        "head_dim": 32,
        "rotary_dim": 16,
        "intermediate_size": 32,  # of an expert
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
    },
    "glm4_moe": {
        "head_dim": 32,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": True,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": True,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 512,  # vLLM's kernel for CPUs knows 512 and 64 alone
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": True,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
    "glm4_moe_lite": {
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "topk_method": "noaux_tc",
        "rms_norm_eps": 1e-6,  # transformers has it in the two inner norms whatever the config says
    },
}


def make_family(directory: str | Path, name: str, tied: bool = False, seed: int = 0, **config: Any) -> Path:
    """Save tokenizer, config and fp32 weights of a tiny random model of one family (a key of FAMILIES); returns
    `directory`.

    config: fields that replace the defaults.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = make_tokenizer()
    fields: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fields |= FAMILIES[name] | config
        if kinds := fields.get("layer_types"):  # repeated for as many layers as there are
            fields["layer_types"] = [kinds[layer % len(kinds)] for layer in range(fields["num_hidden_layers"])]
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **fields)).float()
        with torch.no_grad():
            for key, parameter in [*model.named_parameters(), *model.named_buffers()]:
                if key.endswith("bias"):  # of linear layers, and e_score_correction_bias, a buffer
                    parameter.normal_(0, 0.2)
                elif parameter.dim() > 1:
                    parameter.mul_(3.0)
                elif "norm" in key:  # not all ones: a mixed-up norm would not show
                    parameter.add_(torch.empty_like(parameter).uniform_(-0.2, 0.2))  # some are zero-centred
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return Path(directory)


def with_images(text: Path, directory: Path) -> Path:
    """The published form of a Qwen3.5 of text in `directory`, which is returned: its settings in text_config, its
    tensors under language_model, experts stacked, and with tensors of a vision part and of a layer for further tokens.
    """
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(text, directory)
    config = json.loads((text / "config.json").read_text())
    kind = config["model_type"].removesuffix("_text")
    whole = {
        "model_type": kind,
        "architectures": [f"Qwen3_5{'Moe' if 'moe' in kind else ''}ForConditionalGeneration"],
        "text_config": config,
        "tie_word_embeddings": config["tie_word_embeddings"],
    }
    (directory / "config.json").write_text(json.dumps(whole))
    tensors = load_file(text / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    for layer in range(config["num_hidden_layers"]):
        experts = f"model.language_model.layers.{layer}.mlp.experts"
        for stack, parts in {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.items():
            rows = [
                torch.cat([renamed.pop(f"{experts}.{expert}.{part}.weight") for part in parts])
                for expert in range(config.get("num_experts", 0))
            ]
            if rows:
                renamed[f"{experts}.{stack}"] = torch.stack(rows)
    more = {"model.visual.blocks.0.attn.qkv.weight": torch.ones(2), "mtp.fc.weight": torch.ones(2)}
    save_file(renamed | more, directory / "model.safetensors")
    return directory
