"""`slime.rollout.sglang_rollout`: the state of a process that generates, and slime's own way to make a response.

Invariant: one `GenerateState` in a process, which loads the model's tokenizer once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hpcrl.rollout.samplers.conversation import TEXT
from hpcrl.rollout.slime_names.graders import async_rm, batched_async_rm
from hpcrl.rollout.slime_names.helpers import SingletonMeta, load_processor, load_tokenizer
from hpcrl.rollout.slime_names.http import post
from hpcrl.sample import Sample
from hpcrl.utils.sample_parts import ABORTED, TRUNCATED


class GenerateState(metaclass=SingletonMeta):
    """What calls of a process share.

    Attributes:
        tokenizer: transformers'.
        processor: None: models here read text alone.
        semaphore: as many at once as the engines take.
        sampling_params: as the options say.
        aborted: never true: a request of a response that ended early gets an error.
    """

    def __init__(self, args: Any) -> None:
        self.args = args
        self.tokenizer = load_tokenizer(args.hf_checkpoint)
        self.processor = load_processor(args.hf_checkpoint)
        self.semaphore = asyncio.Semaphore(args.sglang_server_concurrency * max(args.num_engines, 1))
        self.sampling_params: dict[str, Any] = {
            "temperature": args.rollout_temperature,
            "top_p": args.rollout_top_p,
            "top_k": args.rollout_top_k,
            "max_new_tokens": args.rollout_max_response_len,
            "stop": args.rollout_stop,
            "stop_token_ids": args.rollout_stop_token_ids,
            **TEXT,
            "skip_special_tokens": args.rollout_skip_special_tokens,
        }
        self.dp_rank = 0
        self.reset()

    @contextmanager
    def dp_rank_context(self) -> Iterator[int]:
        """The engines choose among their parts themselves."""
        yield self.dp_rank

    def reset(self) -> None:
        """Nothing is waited for."""
        self.remaining_batch_size = 0
        self.pendings: set[Any] = set()
        self.aborted = False


def get_model_url(args: Any, model_name: str, endpoint: str = "/generate") -> str:
    """Where a model is asked: there is the policy alone."""
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}{endpoint}"


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """What an engine says to the prompt, behind what there is of the response."""
    asked = list(sample.tokens) or GenerateState(args).tokenizer.encode(sample.prompt, add_special_tokens=False)
    room = sampling_params["max_new_tokens"] - sample.response_length
    if room < 1:
        sample.status = TRUNCATED
        return sample
    params = sampling_params | {"max_new_tokens": room}
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    answer = await post(url, {"input_ids": asked, "sampling_params": params, "return_logprob": True})
    sample.tokens = asked
    said = answer["meta_info"].get("output_token_logprobs", [])
    sample.append_response_tokens(
        args,
        tokens=[token for _, token, *_ in said],
        log_probs=[logprob for logprob, *_ in said],
        meta_info=answer["meta_info"],
        text=answer["text"],
    )
    return sample


async def generate_and_rm(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample:
    """A response with its reward."""
    async with GenerateState(args).semaphore:
        made = await generate(args, sample, sampling_params)
    if made.status is not ABORTED and made.reward is None and not args.group_rm:
        made.reward = await async_rm(args, made)
    return made


async def generate_and_rm_group(
    args: Any, group: list[Sample], sampling_params: dict[str, Any], evaluation: bool = False
) -> list[Sample]:
    """The responses of a group with their rewards."""
    made = await asyncio.gather(*(generate_and_rm(args, each, dict(sampling_params), evaluation) for each in group))
    if args.group_rm:
        for sample, reward in zip(made, await batched_async_rm(args, made), strict=True):
            sample.reward = reward
    return made


def as_vllm_has_them(sampling_params: dict[str, Any]) -> dict[str, Any]:
    """Sampling parameters of slime's as vLLM spells them."""
    found = {"max_tokens": sampling_params["max_new_tokens"], "logprobs": 1}
    found |= {name: sampling_params[name] for name in ("temperature", "top_p")}
    if sampling_params.get("top_k") not in (None, 0):
        found["top_k"] = sampling_params["top_k"]
    if sampling_params.get("stop"):
        found |= {"stop": sampling_params["stop"], "include_stop_str_in_output": True}
    if sampling_params.get("stop_token_ids"):
        found["stop_token_ids"] = sampling_params["stop_token_ids"]
    if sampling_params.get("skip_special_tokens") is not None:
        found["skip_special_tokens"] = sampling_params["skip_special_tokens"]
    return found
