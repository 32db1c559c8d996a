"""The quick start's task: sums of four digits whose answer is given as \\boxed{...}, and a small Qwen3 that knows
nothing yet.

    python examples/arithmetic.py --out DIR [--seed N]

Writes, the same for the same seed:
  DIR/model/         tokenizer (one character, one token), config.json, random weights (about 0.3 million)
  DIR/train.jsonl    {"prompt": [{"role": "user", "content": "3+8+5+9="}], "label": "25"}   (the shape of dapo-math-17k)
  DIR/heldout.jsonl  the same, of sums that are in no other file
  DIR/sft.jsonl      the same with a "response" to learn from.  Half of them work the answer out (`11,16,\\boxed{25}`), half
                     are guesses without working (`\\boxed{18}`), so a model that has learned from them is right in a third
                     of its answers, and has seen what would make it better.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import string
from collections.abc import Iterable
from pathlib import Path

TERMS = 4  #: digits in a sum
HELD_OUT = 256  #: sums that are never trained on
SFT_LINES = 6144
GUESSED = 0.5  #: share of the warm-up's answers that are guessed instead of worked out

Digits = tuple[int, ...]

SPECIAL = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|unk|>", "\\boxed{"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def sums(seed: int) -> tuple[list[Digits], list[Digits]]:
    """All sums in random order: (for training, held out)."""
    every = list(itertools.product(range(10), repeat=TERMS))
    random.Random(seed).shuffle(every)
    return every[HELD_OUT:], every[:HELD_OUT]


def prompt(digits: Digits) -> dict[str, object]:
    """One prompt with its label."""
    return {"prompt": [{"role": "user", "content": "+".join(map(str, digits)) + "="}], "label": str(sum(digits))}


def worked(digits: Digits) -> str:
    """The answer with its working: the sum so far after each digit but the last, as in `11,16,\\boxed{25}`."""
    *steps, total = itertools.accumulate(digits)
    return "".join(f"{step}," for step in steps[1:]) + f"\\boxed{{{total}}}"


def guessed(rng: random.Random) -> str:
    """An answer without working, and almost always wrong."""
    return f"\\boxed{{{sum(rng.randrange(10) for _ in range(TERMS))}}}"


def write_prompts(directory: Path, seed: int) -> None:
    """train.jsonl, heldout.jsonl and sft.jsonl."""
    train, held_out = sums(seed)
    rng = random.Random(seed + 1)
    answer = lambda digits: guessed(rng) if rng.random() < GUESSED else worked(digits)  # noqa: E731
    write_lines(directory / "train.jsonl", (prompt(d) for d in train))
    write_lines(directory / "heldout.jsonl", (prompt(d) for d in held_out))
    write_lines(directory / "sft.jsonl", (prompt(d) | {"response": answer(d)} for d in train[:SFT_LINES]))


def write_lines(path: Path, rows: Iterable[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_tokenizer(special=SPECIAL, characters=string.digits + "+=,}", markers=("<|user|>", "<|assistant|>")):
    """One character, one token; chat markers, \\boxed{ and what else is in `special` are single tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate([*special, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\\boxed\{|<call>|[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        unk_token="<|unk|>",
        additional_special_tokens=list(markers),
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(directory: Path, seed: int, tokenizer=None, experts: int = 0) -> None:
    """Tokenizer and a small Qwen3 with random weights and tied embeddings; with experts, a token goes to two of
    them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = tokenizer or make_tokenizer()
    sparse = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    config = AutoConfig.for_model(
        "qwen3_moe" if experts else "qwen3",
        **(sparse if experts else {}),
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.08,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--experts", type=int, default=0, help="of each layer: a mixture-of-experts model instead")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    write_prompts(args.out, args.seed)
    make_model(args.out / "model", args.seed, experts=args.experts)


if __name__ == "__main__":
    main()
