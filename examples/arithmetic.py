"""The quick start's task: sums of four digits whose answer is given as \\boxed{...}, and a small Qwen3 that knows
nothing yet.

    python examples/arithmetic.py --out DIR [--seed N] [--bytes]
    python examples/arithmetic.py --answers RUN/grpo      # how the answers of each evaluation are made

Writes, the same for the same seed:
  DIR/model/         tokenizer (one character, one token), config.json, random weights (about 0.3 million); the tokenizer
                     knows digits and a few signs, and with --bytes any text
  DIR/train.jsonl    {"prompt": [{"role": "user", "content": "3+8+5+9="}], "label": "25"}   (the shape of dapo-math-17k)
  DIR/heldout.jsonl  the same, of sums that are in no other file
  DIR/sft.jsonl      the same with a "response" to learn from.  Half of them work the answer out (`11,16,\\boxed{25}`), half
                     are guesses without working (`\\boxed{18}`), so a model that has learned from them is right in a third
                     of its answers, and has seen what would make it better.

With --guessed 0 --slips 0.2 all of them are worked out, and one step in five adds a wrong digit: the style is there, the
numbers have to become right.
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


def sums(seed: int, apart: bool = False) -> tuple[list[Digits], list[Digits]]:
    """All sums in random order: (for training, held out).

    apart: no held-out sum has its digits, in whatever order, in a sum for training.
    """
    every = list(itertools.product(range(10), repeat=TERMS))
    random.Random(seed).shuffle(every)
    held_out = every[:HELD_OUT]
    if not apart:
        return every[HELD_OUT:], held_out
    digits: set[Digits] = set()
    while sum(tuple(sorted(d)) in digits for d in every) < HELD_OUT:
        digits.add(tuple(sorted(every[len(digits)])))
    held_out = [d for d in every if tuple(sorted(d)) in digits]
    return [d for d in every if tuple(sorted(d)) not in digits], held_out[:HELD_OUT]


def prompt(digits: Digits) -> dict[str, object]:
    """One prompt with its label."""
    return {"prompt": [{"role": "user", "content": "+".join(map(str, digits)) + "="}], "label": str(sum(digits))}


def slipped(digits: Digits, rng: random.Random, slips: float) -> Digits:
    """The digits as somebody adds them who takes another for each but the first with the probability `slips`."""
    return (digits[0], *(rng.randrange(10) if rng.random() < slips else digit for digit in digits[1:]))


def worked(digits: Digits) -> str:
    """The answer with its working: the sum so far after each digit but the last, as in `11,16,\\boxed{25}`."""
    *steps, total = itertools.accumulate(digits)
    return "".join(f"{step}," for step in steps[1:]) + f"\\boxed{{{total}}}"


def guessed(rng: random.Random) -> str:
    """An answer without working, and almost always wrong."""
    return f"\\boxed{{{sum(rng.randrange(10) for _ in range(TERMS))}}}"


def write_prompts(
    directory: Path, seed: int, guesses: float = GUESSED, slips: float = 0.0, apart: bool = False
) -> None:
    """train.jsonl, heldout.jsonl and sft.jsonl."""
    train, held_out = sums(seed, apart)
    rng = random.Random(seed + 1)
    answer = lambda digits: guessed(rng) if rng.random() < guesses else worked(slipped(digits, rng, slips))  # noqa: E731
    write_lines(directory / "train.jsonl", (prompt(d) for d in train))
    write_lines(directory / "heldout.jsonl", (prompt(d) for d in held_out))
    write_lines(directory / "sft.jsonl", (prompt(d) | {"response": answer(d)} for d in train[:SFT_LINES]))


def write_lines(path: Path, rows: Iterable[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_tokenizer(
    special=SPECIAL,
    characters=string.digits + "+=,}",
    markers=("<|user|>", "<|assistant|>"),
    whole=r"\\boxed\{|<call>",
):
    """One character, one token; chat markers, \\boxed{ and what else is in `special` are single tokens, of which
    `whole` finds those that are no chat markers."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: number for number, token in enumerate([*special, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{whole}|[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return with_chat(tokenizer, markers)


def make_byte_tokenizer():
    """One byte of UTF-8, one token: a tokenizer that knows any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|unk|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*special, *letters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return with_chat(tokenizer, ("<|user|>", "<|assistant|>"))


def with_chat(tokenizer, markers):
    """The tokenizer for transformers, with the names of its special tokens and a chat template."""
    from transformers import PreTrainedTokenizerFast

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


def given_directory(doc: str | None) -> argparse.Namespace:
    """--out, which is made, and --seed: the command of a task that a small model learns with tools."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    return args


def answers(stage: Path) -> str:
    """A table of a stage's evaluations: the share of answers that are worked out, and how many of both kinds are
    right."""
    files = {
        int(path.stem.rpartition("heldout-")[2]): path for path in (stage / "samples").glob("eval-heldout-*.jsonl")
    }
    lines = ["after rollout  worked out  of these right  of the others right"]
    for number, path in sorted(files.items()):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        kinds = [[row["reward"] for row in rows if ("," in row["response"]) is kind] for kind in (True, False)]
        right = ["-" if not rewards else f"{sum(rewards) / len(rewards):.3f}" for rewards in kinds]
        share = len(kinds[0]) / max(len(rows), 1)
        lines.append(f"{number if number >= 0 else 'none':>13}  {share:>10.3f}  {right[0]:>14}  {right[1]:>19}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, metavar="DIR", help="where the task is written")
    what.add_argument("--answers", type=Path, metavar="STAGE", help="of a run's stage: how its answers are made")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--experts", type=int, default=0, help="of each layer: a mixture-of-experts model instead")
    parser.add_argument("--guessed", type=float, default=GUESSED, help="share of guesses in sft.jsonl (%(default)s)")
    parser.add_argument("--slips", type=float, default=0.0, help="share of wrong steps in a working (%(default)s)")
    parser.add_argument("--bytes", action="store_true", help="a tokenizer that knows any text: one byte, one token")
    parser.add_argument("--apart", action="store_true", help="no order of a held-out sum's digits is trained on")
    args = parser.parse_args()
    if args.answers:
        print(answers(args.answers))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    write_prompts(args.out, args.seed, args.guessed, args.slips, args.apart)
    tokenizer = make_byte_tokenizer() if args.bytes else None
    make_model(args.out / "model", args.seed, tokenizer, args.experts)


if __name__ == "__main__":
    main()
