"""Custom generate functions as users write them, good and bad; they run in processes of their own."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from hpcrl.rollout.samplers.conversation import Conversation
from hpcrl.sample import Sample
from hpcrl.sandbox import sandbox
from hpcrl.sandbox.pool import default_pool

AGENT = """
import httpx, json, os, sys
url, key, task = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], sys.argv[1]
http = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=60)
messages = [{"role": "user", "content": task}]
for turn in range(2):
    answer = http.post("/chat/completions", json={"model": "any", "messages": messages, "temperature": 1})
    answer.raise_for_status()
    messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "more"}]
"""


async def two_turns(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Two turns with a tool's answer between them; graded by itself: 1 if the tool was told of what was said
    exactly."""
    talk = Conversation(args, sample, sampling_params)
    first = await talk.turn(max_new_tokens=4)
    talk.tell_messages({"role": "user", "content": f"<{first.text}>"})
    await talk.turn(max_new_tokens=4)
    found = talk.sample()
    found.reward = float(sample.response_index)
    found.metadata["evaluation"] = args.evaluation
    return found


async def long_turns(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Two turns of 20 tokens with some of a tool's between them; the response's number is its reward."""
    talk = Conversation(args, sample, sampling_params)
    await talk.turn(max_new_tokens=20)
    talk.tell(list(range(30, 45)))
    await talk.turn(max_new_tokens=20)
    found = talk.sample()
    found.reward = float(sample.response_index)
    return found


async def fans_out(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """Two conversations for even responses, one for odd ones; no reward of its own."""
    talks = [Conversation(args, sample, sampling_params) for _ in range(2 - sample.response_index % 2)]
    await asyncio.gather(*(talk.turn(max_new_tokens=3) for talk in talks))
    return [talk.sample() for talk in talks]


async def names_parts(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """Two samples with numbers of the function's own, whose reward is the run's matter."""
    talks = [Conversation(args, sample, sampling_params) for _ in range(2)]
    await asyncio.gather(*(talk.turn(max_new_tokens=3) for talk in talks))
    found = [talk.sample() for talk in talks]
    for number, made in enumerate(found):
        made.rewards = {"turns": 2.0 + number}
    return found


async def at_the_engine(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """What a function of slime's becomes: exact tokens, by hand."""
    turn = await args.engine.generate(args.prompt_tokens, sampling_params)
    sample.tokens = [*args.prompt_tokens, *turn.tokens]
    sample.response_length = len(turn.tokens)
    sample.loss_mask = [1] * len(turn.tokens)
    sample.rollout_log_probs = turn.logprobs
    sample.versions = turn.versions
    sample.response = turn.text
    sample.reward = 1
    return sample


async def cuts_its_answer(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """The policy's answer without its last token."""
    found = await at_the_engine(args, sample, sampling_params)
    found.response_length -= 1
    for name in ("tokens", "loss_mask", "rollout_log_probs", "versions"):
        setattr(found, name, getattr(found, name)[:-1])
    return found


async def invents_tokens(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """An answer behind another prompt than it was asked for with."""
    found = await at_the_engine(args, sample, sampling_params)
    found.tokens = [*found.tokens[:1], found.tokens[0], *found.tokens[1:]]
    return found


async def an_agent(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> None:
    """A program that knows nothing of hpcrl."""
    env = os.environ | {"OPENAI_BASE_URL": args.base_url, "OPENAI_API_KEY": args.api_key}
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", AGENT, args.messages[-1]["content"], env=env)
    assert await process.wait() == 0
    sample.reward = 0.5


async def troubled(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample | None:
    """What the label says goes wrong, in the first response of a group; the others are good."""
    kind = sample.label if sample.response_index == 0 else ""
    if kind == "raise":
        raise LookupError("no such tool")
    if kind == "hang":
        await asyncio.sleep(3600)
    if kind == "block":
        time.sleep(3600)
    if kind == "die":
        os._exit(3)
    if kind == "none":
        return None
    if kind == "number":
        return 7  # type: ignore[return-value]
    found = await at_the_engine(args, sample, sampling_params)
    if kind == "short":
        found.rollout_log_probs = found.rollout_log_probs[:-1]
    if kind == "temperature":
        await args.engine.generate(args.prompt_tokens, {"temperature": 0.1})
    if kind == "long":
        found.response_length += 1
    if kind == "nan":
        found.reward = float("nan")
    if kind == "object":
        found.metadata = {"made by": object()}
    found.remove_sample = sample.response_index == 1
    return found


async def two(args: Any, sample: Sample) -> Sample:
    return sample


def plain(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    return sample


_calls: dict[int, int] = {}


async def loses_its_sandbox(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Its sandboxes' watchers are killed in the first call of response 1, and in every call of response 0; what it raises
    then is an error of its own."""
    _calls[sample.response_index] = _calls.get(sample.response_index, 0) + 1
    async with sandbox() as box:
        found = await at_the_engine(args, sample, sampling_params)
        if sample.response_index == 0 or _calls[sample.response_index] == 1:
            for line in default_pool()._lines:
                if line.pid:  # else it is being made
                    os.kill(line.pid, signal.SIGKILL)
        try:
            found.response = (await box.run("echo from the box")).stdout
        except Exception as error:
            raise RuntimeError("the tool failed") from error
    found.metadata["calls"] = _calls[sample.response_index]
    return found


async def graded_in_a_sandbox(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """What its sandbox counts: odd tokens, and one more, so that no reward is 0; once there is no file `held` in the
    directory of the run's own any more, next to which it says that it waits."""
    found = await at_the_engine(args, sample, sampling_params)
    held = Path(args.run_dir).parent / "held"
    async with sandbox() as box:
        await box.write("tokens", "\n".join(map(str, found.tokens[len(args.prompt_tokens) :])))
        if held.exists():
            (held.parent / "live" / f"{sample.group_index}-{sample.response_index}").touch()
        while held.exists():
            assert (await box.run("sleep 5")).ok
        counted = await box.run("n=1; for t in $(cat tokens); do n=$((n + t % 2)); done; echo $n; hostname >&2")
    found.reward = float(counted.stdout)
    return found


async def by_label(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Any:
    """The function that the label names."""
    return await globals()[sample.label](args, sample, sampling_params)
