"""Tasks of a taskset of the `verifiers` package, version 0.4, as prompts; and an agent that works at them in a sandbox.

    python examples/verifiers/taskset.py TASKSET [--args JSON] [--shell] [--image DIR] > tasks.jsonl
    --custom-generate-function-path taskset.generate

The package's own harnesses download programs and ask the policy over a network, which a sandbox does not have.  So the
harness here runs its loop in this process: it asks at hpcrl's endpoint, and runs the policy's commands, and what a task
runs to grade, in the sandbox alone.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import secrets
from functools import cache
from typing import Any, Literal

import aiohttp
import verifiers.v1 as vf
from pydantic_config import BaseConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import BaseRuntimeInfo

from hpcrl.rollout.samplers.bash_tool import BASH, NO_SUCH_TOOL, command_of, shown
from hpcrl.sandbox import Box, SandboxLost, sandbox

KEY = "verifiers"  #: of a prompt's metadata: {"taskset": its id, "args": of its config, "shell", "image", "data"}
TURNS = 32  #: of a response
COMMAND_SECONDS, TASK_SECONDS = 120.0, 600.0  #: that a command of the policy may take, and one of the task


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> None:
    """Have an agent work at the task; its reward and metrics are the sample's."""
    asked = sample.metadata[KEY]
    taskset = load(asked["taskset"], json.dumps(asked["args"]))
    kind = type(taskset).task_type()
    task = kind(kind.data_type().model_validate(asked["data"]), taskset.config.task)
    variable = f"HPCRL_POLICY_{secrets.token_hex(8)}"  # the package takes keys by a variable's name alone
    os.environ[variable] = args.api_key
    client = vf.EvalClientConfig(base_url=args.base_url, api_key_var=variable)
    params = {"max_tokens": sampling_params["max_new_tokens"], "stop": sampling_params["stop"] or None}
    sampling = vf.SamplingConfig(**{name: value for name, value in params.items() if value})
    # the runtime that is named is never started: the sandbox is lent
    never = {"runtime": vf.SubprocessConfig(), "harness": {"id": "null"}}
    agent = vf.make_agent(vf.AgentConfig(model="policy", client=client, sampling=sampling, **never))
    agent.harness = BoxHarness(agent.harness.config)
    agent.harness.tools = {"tools": [BASH]} if asked["shell"] else {}
    try:
        async with sandbox(asked["image"]) as box:
            runtime = BoxRuntime(box)
            trace = await agent.run(task, runtime=runtime)
    finally:
        del os.environ[variable]
    if runtime.lost:
        raise runtime.lost
    if not trace.ok:
        raise RuntimeError(f"{trace.stop_condition}: {trace.errors}")
    sample.reward = float(trace.reward)
    sample.rewards = {name: float(value) for name, value in trace.metrics.items() if math.isfinite(value)}


@cache
def load(taskset: str, args: str) -> Any:
    """A taskset by its id, and the JSON of its config."""
    if vf.environment_class(taskset, "") is not vf.SingleAgentEnv:
        raise SystemExit(f"{taskset} has an environment of its own; tasks of one agent are run here")
    return vf.load_taskset(vf.taskset_config_type(taskset)(id=taskset, **json.loads(args)))


class BoxConfig(BaseConfig):
    """How verifiers names the runtime."""

    type: Literal["hpcrl"] = "hpcrl"


class BoxInfo(BoxConfig, BaseRuntimeInfo):
    """What a trace says of it."""


class BoxRuntime(vf.Runtime):
    """A sandbox, lent to an agent.

    Attributes:
        lost: the error by which the sandbox was lost, of which verifiers makes one of its own.
    """

    def __init__(self, box: Box) -> None:
        super().__init__()
        self.config, self.info = BoxConfig(), BoxInfo()
        self.box = box
        self.lost: SandboxLost | None = None

    async def start(self) -> None:
        """It has been started by its owner."""

    async def call(self, command: str | list[str], seconds: float, env: dict[str, str]) -> Any:
        """Run a command of the policy's or the task's."""
        try:
            return await self.box.run(command, seconds, env=self.process_env(env))
        except SandboxLost as error:
            self.lost = error
            raise

    async def run(self, argv: list[str], env: dict[str, str]) -> vf.ProgramResult:
        done = await self.call(argv, TASK_SECONDS, env)
        more = f"[{done.limit or 'it took too long'}]" if done.limit or done.timed_out else ""
        return vf.ProgramResult(done.code, done.stdout, done.stderr + more)

    async def _read(self, path: str, max_bytes: int | None = None) -> bytes:
        return (await self.box.read(path))[:max_bytes]

    async def write(self, path: str, data: bytes) -> None:
        await self.box.write(path, data)


class BoxHarness(vf.Harness[vf.HarnessConfig]):
    """The policy's turns, with a shell in the sandbox or without any tool."""

    APPENDS_SYSTEM_PROMPT = True
    NEEDS_CONTAINER = False
    tools: dict[str, Any]

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_):  # type: ignore[no-untyped-def]
        """Ask the policy, run what it calls, until it calls nothing."""
        messages = _messages(*self.resolve_prompt(data))
        asked = {"model": ctx.model, "messages": messages} | self.tools
        timeout, key = aiohttp.ClientTimeout(None), {"Authorization": f"Bearer {secret}"}
        async with aiohttp.ClientSession(headers=key, timeout=timeout) as http:
            for _ in range(TURNS):
                async with http.post(f"{endpoint}/chat/completions", json=asked) as answer:
                    if answer.status != 200:  # also where a limit of the task's has ended the trace
                        return vf.ProgramResult(1, "", (await answer.text())[-1000:])
                    said = (await answer.json())["choices"][0]["message"]
                messages.append(said)
                if not said.get("tool_calls"):
                    break
                messages += [await _answered(runtime, call) for call in said["tool_calls"]]
        return vf.ProgramResult(0, "", "")


async def _answered(runtime: BoxRuntime, call: dict[str, Any]) -> dict[str, Any]:
    """The message that answers a call."""
    command = command_of(call["function"]["name"], json.loads(call["function"]["arguments"]))
    text = NO_SUCH_TOOL if command is None else shown(await runtime.call(command, COMMAND_SECONDS, {}))
    return {"role": "tool", "tool_call_id": call["id"], "content": text}


def _messages(system: str | None, prompt: Any) -> list[dict[str, Any]]:
    """A task's prompt as a chat."""
    text = isinstance(prompt, str)
    chat = [{"role": "user", "content": prompt}] if text else [message_to_wire(said) for said in prompt or []]
    return [{"role": "system", "content": system}] * bool(system) + chat


def main() -> None:
    """Print a line of a prompt file for every task."""
    parser = argparse.ArgumentParser(description="Print the tasks of a taskset as lines of a prompt file.")
    parser.add_argument("taskset", help="its id, as verifiers 0.4 loads it")
    parser.add_argument("--args", type=json.loads, default={}, help="JSON object of its config")
    parser.add_argument("--shell", action="store_true", help="the agent has a shell in its sandbox")
    parser.add_argument("--image", default="system", help="of its sandbox: an unpacked root file system")
    asked = vars(parser.parse_args())
    for task in load(asked["taskset"], json.dumps(asked["args"])):
        data = task.data
        if data.prompt is None or (data.image and asked["image"] == "system"):
            raise SystemExit(f"not served: a task without a prompt, or one of the image {data.image} without --image")
        metadata = {KEY: asked | {"data": data.model_dump(mode="json")}}
        print(json.dumps({"prompt": _messages(data.system_prompt, data.prompt), "metadata": metadata}))


if __name__ == "__main__":
    main()
