"""The quick start's task: sums whose answer is given as \\boxed{...}, and a small Qwen3 that knows nothing yet.

    python examples/arithmetic.py --out DIR [--seed N]

Writes, the same for the same seed:
  DIR/model/         tokenizer (one character, one token), config.json, random weights (about half a million)
  DIR/train.jsonl    {"prompt": [{"role": "user", "content": "38+54="}], "label": "92"}   (the shape of dapo-math-17k)
  DIR/heldout.jsonl  the same, of sums that are in no other file
  DIR/sft.jsonl      the same with "response": "\\boxed{92}", for supervised fine-tuning
"""

from __future__ import annotations

import argparse
import json
import random
import string
from collections.abc import Iterable
from pathlib import Path

LARGEST = 99  #: the largest number in a sum
HELD_OUT = 256  #: sums that nobody trains on
SFT_LINES = 6144

SPECIAL = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|unk|>", "\\boxed{"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def sums(seed: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """All sums in random order: (for training, held out)."""
    pairs = [(a, b) for a in range(LARGEST + 1) for b in range(LARGEST + 1)]
    random.Random(seed).shuffle(pairs)
    return pairs[HELD_OUT:], pairs[:HELD_OUT]


def line(a: int, b: int, response: bool = False) -> dict[str, object]:
    """One prompt with its label, and the full response if asked for."""
    row: dict[str, object] = {"prompt": [{"role": "user", "content": f"{a}+{b}="}], "label": str(a + b)}
    return row | {"response": f"\\boxed{{{a + b}}}"} if response else row


def write_prompts(directory: Path, seed: int) -> None:
    """train.jsonl, heldout.jsonl and sft.jsonl."""
    train, held_out = sums(seed)
    write_lines(directory / "train.jsonl", (line(a, b) for a, b in train))
    write_lines(directory / "heldout.jsonl", (line(a, b) for a, b in held_out))
    write_lines(directory / "sft.jsonl", (line(a, b, response=True) for a, b in train[:SFT_LINES]))


def write_lines(path: Path, rows: Iterable[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_tokenizer():
    """One character, one token; chat markers and \\boxed{ are single tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = string.digits + "+-*=} "
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\\boxed\{|[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        unk_token="<|unk|>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(directory: Path, seed: int) -> None:
    """Tokenizer and a small Qwen3 with random weights and tied embeddings."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = make_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).float().save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    write_prompts(args.out, args.seed)
    make_model(args.out / "model", args.seed)


if __name__ == "__main__":
    main()
