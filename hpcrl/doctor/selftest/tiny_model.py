"""The self-test's own models and prompts: Qwen3 of any size, dense or with experts, with random weights, made without a
network or transformers.

Invariant: the same bytes for the same arguments.  The matrices are drawn wide, so that next-token distributions are far
from uniform and a wrong weight shows in the log-probs.
"""

from __future__ import annotations

import importlib.util
import json
import string
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SPECIAL = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|unk|>")
CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WIDE = 0.9  #: standard deviation of the matrices, times the root of the hidden size
VOCABULARY = 128
#: sizes that flash attention, tensor cores and vLLM take
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def make_model(directory: Path, seed: int = 0, **sizes: Any) -> Path:
    """config.json, weights and, where the package for it is installed, the tokenizer in `directory`; returns it.

    Args:
        sizes: in place of CONFIG's.
    """
    import torch
    from safetensors.torch import save_file

    config = write_config(directory, **sizes)
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config["torch_dtype"])
    tensors = {name: tensor.to(dtype) for name, tensor in _tensors(generator, config)}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    if importlib.util.find_spec("tokenizers") is not None:
        _write_tokenizer(directory, config["vocab_size"])
    return directory


def write_config(directory: Path, **sizes: Any) -> dict[str, Any]:
    """config.json alone; returns what it holds."""
    config = CONFIG | sizes
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    return config


def parameters(config: dict[str, Any]) -> tuple[int, int]:
    """(how many a layer has, how many all else has)."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    attention = 2 * hidden * head * (config["num_attention_heads"] + config["num_key_value_heads"])
    return attention + 3 * hidden * inner + 2 * (hidden + head), 2 * config["vocab_size"] * hidden + hidden


def _tensors(generator: torch.Generator, config: dict[str, Any]) -> Any:
    """(name, tensor) of every weight, under Hugging Face's names of a Qwen3."""
    import torch

    hidden = config["hidden_size"]
    inner = config["intermediate_size"]
    head = config["head_dim"]
    queries = config["num_attention_heads"] * head
    keys = config["num_key_value_heads"] * head
    experts = config.get("num_experts", 0)
    wide = WIDE / hidden**0.5
    matrix = lambda *shape: wide * torch.randn(*shape, generator=generator)  # noqa: E731
    norm = lambda size: 0.8 + 0.4 * torch.rand(size, generator=generator)  # noqa: E731  (not all ones: a mix-up would not show)
    yield "model.embed_tokens.weight", matrix(config["vocab_size"], hidden)
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        for name, rows, columns in (
            ("self_attn.q_proj", queries, hidden),
            ("self_attn.k_proj", keys, hidden),
            ("self_attn.v_proj", keys, hidden),
            ("self_attn.o_proj", hidden, queries),
            *([("mlp.gate", experts, hidden)] if experts else []),
        ):
            yield f"{layer}.{name}.weight", matrix(rows, columns)
        for part in [f"mlp.experts.{expert}" for expert in range(experts)] or ["mlp"]:
            width = config["moe_intermediate_size"] if experts else inner
            for name, rows, columns in (("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)):
                yield f"{layer}.{part}.{name}_proj.weight", matrix(rows, columns)
        for name, size in (("input_layernorm", hidden), ("post_attention_layernorm", hidden)):
            yield f"{layer}.{name}.weight", norm(size)
        for name in ("q_norm", "k_norm"):
            yield f"{layer}.self_attn.{name}.weight", norm(head)
    yield "model.norm.weight", norm(hidden)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", matrix(config["vocab_size"], hidden)


def _write_tokenizer(directory: Path, size: int) -> None:
    """One printable character, one token; the rest of the vocabulary is filled up."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    names = [*SPECIAL, *(c for c in string.printable if c not in "\r\x0b\x0c")]
    names += [f"<|extra_{i}|>" for i in range(len(names), size)]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<|unk|>"))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT,
        "pad_token": "<|pad|>",
        "eos_token": "<|end|>",
        "unk_token": "<|unk|>",
        "additional_special_tokens": ["<|user|>", "<|assistant|>"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 20,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def make_prompts(file: Path, count: int = 64, length: int = 0) -> Path:
    """Sums, with their answers as labels.

    Args:
        length: tokens that a prompt has at least, of which the first are spaces.
    """
    sums = [(f"{f'{i}+{i % 7}=':>{length}}", str(i + i % 7)) for i in range(count)]
    rows = [{"prompt": [{"role": "user", "content": content}], "label": label} for content, label in sums]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
