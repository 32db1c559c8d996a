"""How responses are sampled: what the options ask for, and the noise of each sample.

Invariant: where log-probs are wanted they are those that the trainer computes: of the whole distribution at the
sampling temperature.  top-p, top-k and min-p cut what is sampled from, not what the log-probs are of
(`config/rules/sampling.py` refuses what no engine can answer so).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from hpcrl.config.options import Options
from hpcrl.models.files.config_json import read_config
from hpcrl.models.routing import Routing, find_routing
from hpcrl.rollout.prompts.tokenizer import Tokenizer
from hpcrl.transport.token_frames import EXPERTS


@dataclass(frozen=True)
class Sampling:
    """How to sample.

    Attributes:
        max_tokens: of a response at most.
        min_tokens: before which nothing stops it.
        logprobs: whether they are wanted; top_p in (0, 1], top_k -1 or at least 1, min_p in [0, 1]: which tokens are
            sampled from, by default all.
        skip_special_tokens: leave special tokens out of the text (that stop strings are looked for in, and that rewards
            read).
        evaluation: its requests are not ended by `Generator.abort`.
        routing: of a model whose choice of experts is wanted.
    """

    temperature: float
    max_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    logprobs: bool = True
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    skip_special_tokens: bool = False
    evaluation: bool = False
    routing: Routing | None = None

    @classmethod
    def from_options(cls, options: Options, tokenizer: Tokenizer, evaluation: bool = False) -> Sampling:
        """As the options ask for in training; a held-out set says what it has otherwise (`evaluator.sampling_of`).

        The model's end-of-sequence ids always stop: an engine may know but one of them.
        """
        stops = tuple(sorted({*options.rollout_stop_token_ids, *tokenizer.eos_ids}))
        replays = options.use_rollout_routing_replay and not evaluation
        return cls(
            options.rollout_temperature,
            options.rollout_max_response_len,
            tuple(options.rollout_stop),
            stops,
            logprobs=not evaluation,
            top_p=options.rollout_top_p,
            top_k=options.rollout_top_k,
            skip_special_tokens=options.rollout_skip_special_tokens,
            evaluation=evaluation,
            routing=find_routing(options, read_config(tokenizer.directory)) if replays else None,
        )

    def params(self, max_tokens: int, begun: int = 0) -> dict[str, Any]:
        """vLLM's SamplingParams, without the seed.

        Args:
            max_tokens: that are still to come.
            begun: tokens that are there.
        """
        params: dict[str, Any] = {
            "n": 1,
            "temperature": self.temperature,
            "max_tokens": max_tokens,
            "stop_token_ids": list(self.stop_token_ids),
            "detokenize": bool(self.stop),
        }
        if self.stop:
            params |= {"stop": list(self.stop), "skip_special_tokens": self.skip_special_tokens}
            params["spaces_between_special_tokens"] = False
        if self.top_p < 1:
            params["top_p"] = self.top_p
        if self.top_k > 0:
            params["top_k"] = self.top_k
        if self.min_p > 0:
            params["min_p"] = self.min_p
        if self.repetition_penalty != 1:
            params["repetition_penalty"] = self.repetition_penalty
        if self.min_tokens > begun:
            params["min_tokens"] = self.min_tokens - begun
        if self.logprobs:
            params["logprobs"] = 0  # of the sampled token alone
        if self.routing is not None:
            params["extra_args"] = {EXPERTS: True}
        return params


def seed_of(*parts: object) -> int:
    """A seed in [0, 2**63) that depends on `parts` alone, whatever the process or machine (BLAKE2b of their text)."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
