"""Functions as users of slime write them, which run as they are."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import httpx
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.rm_hub import async_rm, batched_async_rm
from slime.rollout.rm_hub.math_dapo_utils import compute_score
from slime.rollout.sglang_rollout import GenerateState, get_model_url
from slime.rollout.sglang_rollout import generate as one_turn
from slime.utils.http_utils import post
from slime.utils.misc import load_function
from slime.utils.types import Sample

URLS: list[str] = []  #: the first that was made, kept as some functions do


async def tool_user(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Two turns by token ids, with what a tool says between them."""
    state = GenerateState(args)
    assert sample.status is Sample.Status.PENDING and not sample.tokens and sample.loss_mask is None
    URLS.append(f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate")
    prompt = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    sample.tokens, mask = list(prompt), []
    sample.loss_mask = mask
    for turn in range(2):
        payload = {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True}
        async with state.semaphore:
            output = await post(URLS[0], payload)
        meta = output["meta_info"]
        if meta["finish_reason"]["type"] == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        said = meta["output_token_logprobs"]
        sample.append_response_tokens(
            args,
            tokens=[item[1] for item in said],
            log_probs=[item[0] for item in said],
            meta_info=meta,
            text=output["text"],
        )
        if not turn:
            tool = state.tokenizer("more", add_special_tokens=False)["input_ids"]
            sample.append_response_tokens(args, tokens=tool, trainable=False, text="more")
    assert mask is sample.loss_mask, "slime grows the lists that a function holds"
    sample.turns, sample.handle = 2, object()
    return sample


async def by_text(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """One turn by text, over a client of its own, without log-probs: they are found."""
    url = get_model_url(args, "actor")
    async with httpx.AsyncClient(timeout=60) as client:
        answer = await client.post(url, json={"text": sample.prompt, "sampling_params": sampling_params})
        output = answer.raise_for_status().json()
    assert "output_token_logprobs" not in output["meta_info"]
    prompt = GenerateState(args).tokenizer.encode(sample.prompt, add_special_tokens=False)
    sample.tokens = prompt + output["output_ids"]
    sample.response, sample.response_length = output["text"], len(output["output_ids"])
    sample.status = Sample.Status.COMPLETED
    sample.reward = 1
    return sample


async def encoded_again(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Trains on the tokens of the text, which are others than those that were sampled."""
    sample = await by_text(args, sample, sampling_params)
    tokenizer = GenerateState(args).tokenizer
    again = tokenizer.encode(sample.response, add_special_tokens=False)
    if sample.label.endswith("/some"):
        again = sample.tokens[-sample.response_length :] + again
    sample.tokens = tokenizer.encode(sample.prompt, add_special_tokens=False) + again
    sample.response_length, sample.loss_mask = len(again), [1] * len(again)
    return sample


async def _agent(args: Any, prompt: str) -> None:
    sample = deepcopy(args.sample)
    sample.prompt = prompt
    sample.tokens = args.state.tokenizer.encode(prompt, add_special_tokens=False)
    made = await one_turn(args, sample, dict(args.params))
    args.found.append(made)


async def agents(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> list[Sample]:
    """Several agents of one response, which share a copy of args and grade each other."""
    args.params = sampling_params
    args = deepcopy(args)
    args.sample, args.found, args.state = sample, [], GenerateState(args)
    work = load_function(f"{__name__}._agent")
    await asyncio.gather(*(work(args, text) for text in (f"{sample.prompt}a", f"{sample.prompt}b")))
    for made, graded in zip(args.found, await batched_async_rm(args, args.found), strict=True):
        made.reward = 0.5 * (graded["score"] if isinstance(graded, dict) else graded)
    return args.found


async def vllms(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """As vime's ask: vLLM's own route and names."""
    from vime.rollout.vllm_rollout import _build_inference_sampling_params
    from vime.utils.types import Sample as Same

    assert Same is Sample
    prompt = GenerateState(args).tokenizer.encode(sample.prompt, add_special_tokens=False)
    url = f"http://{args.vllm_router_ip}:{args.vllm_router_port}/inference/v1/generate"
    params = _build_inference_sampling_params(sampling_params)
    output = await post(url, {"model": args.hf_checkpoint, "token_ids": prompt, "sampling_params": params})
    choice = output["choices"][0]
    sample.tokens = prompt
    sample.append_response_tokens(
        args,
        tokens=choice["token_ids"],
        log_probs=[item["logprob"] for item in choice["logprobs"]["content"]],
        meta_info={"finish_reason": {"type": choice["finish_reason"]}},
    )
    sample.reward = 1.0
    return sample


async def refused(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Asks for what the run does not do."""
    url = get_model_url(args, "actor")
    return await post(url, {"text": "1", "sampling_params": sampling_params | {"temperature": 0.1}})


async def by_label(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Any:
    """The function that the label names."""
    return await globals()[sample.label.partition("/")[0]](args, sample, sampling_params)


async def in_turn(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Any:
    """Another function for each group."""
    every = (tool_user, by_text, agents, vllms)
    return await every[sample.group_index % len(every)](args, sample, sampling_params)


# ---- rewards, filters, hooks


async def reward(args: Any, sample: Any, **more: Any) -> Any:
    """Reads what the function that made the sample has set on it.  As with slime, it may be given several."""
    if isinstance(sample, list):
        return [await reward(args, each) for each in sample]
    if not isinstance(sample, Sample):
        raise TypeError("no sample of slime's")
    result = compute_score(sample.response + "Answer: 4", "4")
    return result | {"score": result["score"] + getattr(sample, "turns", 0)}


async def group_reward(args: Any, samples: list[Sample], **more: Any) -> list[float]:
    return [float(isinstance(sample, Sample)) + await async_rm(args.again, sample) for sample in samples]


def differs(args: Any, samples: list[Sample], **more: Any) -> DynamicFilterOutput:
    rewards = [sample.get_reward_value(args) for sample in samples]
    return DynamicFilterOutput(keep=max(rewards) > min(rewards), reason="all_same")


def newest_first(args: Any, rollout_id: int, buffer: list[list[Sample]], num_samples: int) -> list[list[Sample]]:
    """A buffer filter: takes from the end, and drops the groups whose first sample says so."""
    buffer[:] = [group for group in buffer if not group[0].metadata.get("old")]
    return [buffer.pop() for _ in range(min(num_samples, len(buffer)))]


class Proxy:
    """As web frameworks have them: raises whatever it is asked outside of a request."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("outside of a request")


PROXY = Proxy()


def centred(args: Any, samples: list[Sample], **more: Any) -> tuple[list[float], list[float]]:
    """Rewards as slime's post processing returns them."""
    raw = [sample.get_reward_value(args) for sample in samples]
    return raw, [value - sum(raw) / len(raw) for value in raw]


def remove_truncated(args: Any, data: list[list[Sample]]) -> None:
    """A sample filter."""
    for sample in (sample for group in data for sample in group):
        sample.remove_sample = sample.status is Sample.Status.TRUNCATED
        sample.metadata["seen"] = sample.effective_response_length


def copied(args: Any, sample: Sample, *, rollout_id: int, evaluation: bool) -> Sample:
    """A hook that changes a copy."""
    made = deepcopy(sample)
    made.reward, made.remove_sample, made.loss_mask = 2.0, True, None
    return made


def in_time(function: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper that is not async."""

    @functools.wraps(function)
    def wrapper(*given: Any, **by_name: Any) -> Any:
        return asyncio.wait_for(function(*given, **by_name), 60)

    return wrapper


@in_time
async def limited(args: Any, sample: Sample, *, rollout_id: int, evaluation: bool) -> None:
    """A hook that takes a while."""
    await asyncio.sleep(0)
    sample.reward, sample.remove_sample, sample.loss_mask = 2.0, True, None


def scored(args: Any, sample: Sample, *, rollout_id: int, evaluation: bool) -> None:
    """A hook that edits a reward which is an object."""
    sample.reward["acc"] = -5.0


def sees_none(args: Any, sample: Sample) -> float:
    """A reward that tells whether there was one before."""
    return float(sample.reward is None)
