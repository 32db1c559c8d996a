"""A tokenizer that writes `ab` in one token, and a policy that says it in two: what is encoded again is not what was
said."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from hpcrl.errors import HpcrlError
from hpcrl.rollout.engines.completion import Completion, Sampling
from hpcrl.rollout.prompts.tokenizer import Tokenizer
from hpcrl.utils.sample_parts import ABORTED, COMPLETED, TRUNCATED, SampleStatus
from tests.support.tiny import CHAT, SPECIAL

LETTERS = ["a", "b", "c", "<", ">", "m", "o", "r", "e", "1", "+", "=", "\n", "user", "assistant", "ab"]


def make_model(path: Path, template: str = CHAT) -> Path:
    """The tokenizer, with a model's config."""
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Fast
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate([*SPECIAL, *LETTERS])}
    inner = Fast(models.WordLevel(words, unk_token="<|unk|>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"user|assistant|ab|[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    special = {"pad_token": "<|pad|>", "eos_token": "<|end|>", "unk_token": "<|unk|>"}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=inner, additional_special_tokens=["<|user|>", "<|assistant|>"], **special
    )
    fast.chat_template = template
    fast.save_pretrained(path)
    (path / "config.json").write_text(json.dumps({"vocab_size": 64, "max_position_embeddings": 256, "eos_token_id": 1}))
    return path


class Policy:
    """In the engines' place: says `ab` in two tokens, then ends; counts what it is asked."""

    def __init__(self, tokenizer: Tokenizer, say: Sequence[str] = ("a", "b")) -> None:
        ids = tokenizer._hf.convert_tokens_to_ids
        self.tokens = [ids(word) for word in say]
        self.end = ids("<|end|>")
        self.asked = []
        self.broken: HpcrlError | None = None
        self.status: SampleStatus | None = None
        self.ends: dict[int, int] = {}  #: number of a request (from 1) -> tokens after which it is ended early
        self.begun: list[list[int]] = []  #: what each request went on from

    async def complete(
        self,
        prompt: np.ndarray,
        sampling: Sampling,
        seed: int | None,
        version: int,
        begun: Completion | None = None,
        affinity: str | None = None,
    ) -> Completion:
        self.asked.append((prompt.tolist(), sampling, seed))
        self.begun.append([] if begun is None else begun.tokens.tolist())
        if self.broken:
            raise self.broken
        await asyncio.sleep(0.01)
        tokens = [*self.tokens, self.end][: sampling.max_tokens]
        count, whole = len(tokens), len(tokens) == len(self.tokens) + 1
        logprobs = -np.arange(1, count + 1, dtype=np.float32) / 8
        versions = np.full(count, version + len(self.asked) % 2, np.int32)
        status = self.status or (COMPLETED if whole else TRUNCATED)
        if begun is not None:
            there = len(begun.tokens)
            more = Completion(np.asarray(tokens[there:], np.int32), logprobs[there:], versions[there:], status)
            return replace(more, experts=self._chosen(prompt, count, sampling)).after(begun)
        if len(self.asked) in self.ends:
            count, status = self.ends[len(self.asked)], ABORTED
            tokens = tokens[:count]
            logprobs = logprobs[:count]
            versions = versions[:count]
        experts = self._chosen(prompt, count, sampling)
        return Completion(np.asarray(tokens, np.int32), logprobs, versions, status, experts)

    def _chosen(self, prompt: np.ndarray, count: int, sampling: Sampling) -> np.ndarray | None:
        """Where they are wanted, the experts of each token that was read: its position, and the request's number."""
        if sampling.routing is None or not count:
            return None
        rows = np.arange(len(prompt) + count - 1)
        return np.stack([rows, np.full(len(rows), len(self.asked))], 1)[:, None].astype(np.uint8)


def words(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    return tokenizer._hf.convert_ids_to_tokens(list(map(int, tokens)))
