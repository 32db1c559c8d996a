"""What `verifiers` 0.4 is given of ours: a sandbox as its runtime, and a harness that needs no program in it.

Its own harnesses start a program in the runtime, with packages that it downloads, which asks the policy over a network:
a sandbox has none of that.  Its contract allows a harness whose loop runs in this process, if it asks at the endpoint
that it is given, and an agent that runs in a box which is lent to it.

Invariant: the policy's commands, and what a task runs to grade, run in the sandbox alone.  A sandbox that is lost is
remembered, for verifiers makes an error of its own of that.  Imported where verifiers 0.4 is installed.
"""

from __future__ import annotations

import json
from typing import Any, Literal

import aiohttp
from pydantic_config import BaseConfig
from verifiers.v1 import Harness, HarnessConfig, ProgramResult, Runtime
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import BaseRuntimeInfo

from hpcrl.rollout.samplers.bash_tool import BASH, NO_SUCH_TOOL, command_of, shown
from hpcrl.sandbox import Box, SandboxLost

TURNS = 32  #: of a response
SECONDS = 120.0  #: that one command may take


class BoxConfig(BaseConfig):
    """How verifiers names the runtime."""

    type: Literal["hpcrl"] = "hpcrl"


class BoxInfo(BoxConfig, BaseRuntimeInfo):
    """What a trace says of it."""


class BoxRuntime(Runtime):
    """A sandbox, lent to an agent.

    Attributes:
        lost: the error by which the sandbox was lost, None while it is not.
    """

    def __init__(self, box: Box, workdir: str, seconds: float) -> None:
        """Use a sandbox.

        Args:
            seconds: that a command of a task, such as its tests, may take.
        """
        super().__init__()
        self.config = BoxConfig()
        self.info = BoxInfo()
        self.box, self.workdir, self.seconds = box, workdir, seconds
        self.lost: SandboxLost | None = None

    async def start(self) -> None:
        """It has been started by its owner."""

    async def run(self, argv: list[str], env: dict[str, str]) -> ProgramResult:
        """Run words in the working directory."""
        try:
            done = await self.box.run(argv, self.seconds, env=self.process_env(env), cwd=self.workdir)
        except SandboxLost as error:
            self.lost = error
            raise
        more = f"[{done.limit or 'it took too long'}]" if done.limit or done.timed_out else ""
        return ProgramResult(done.code, done.stdout, done.stderr + more)

    async def _read(self, path: str, max_bytes: int | None = None) -> bytes:
        where = path if path.startswith("/") else f"{self.workdir}/{path}"
        data = await self.box.read(where)
        return data if max_bytes is None else data[:max_bytes]

    async def write(self, path: str, data: bytes) -> None:
        """Write a file, at a path relative to the working directory or not."""
        await self.box.write(path if path.startswith("/") else f"{self.workdir}/{path}", data)


class BoxHarness(Harness[HarnessConfig]):
    """The policy's turns, with a shell in the sandbox or without any tool."""

    APPENDS_SYSTEM_PROMPT = True
    NEEDS_CONTAINER = False

    def __init__(self, config: HarnessConfig, shell: bool) -> None:
        super().__init__(config)
        self.shell = shell

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: BoxRuntime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        """Ask the policy, run what it calls, until it calls nothing; verifiers says what is raised by its result."""
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        asked = {"model": ctx.model, **({"tools": [BASH]} if self.shell else {})}
        headers = {"Authorization": f"Bearer {secret}"}
        async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(None)) as http:
            for _ in range(TURNS):
                async with http.post(f"{endpoint}/chat/completions", json={**asked, "messages": messages}) as answer:
                    if answer.status != 200:  # also where a limit of the task's has ended the trace
                        return ProgramResult(1, "", (await answer.text())[-1000:])
                    said = (await answer.json())["choices"][0]["message"]
                messages.append(said)
                if not said.get("tool_calls"):
                    break
                messages += [await _answered(runtime, call) for call in said["tool_calls"]]
        return ProgramResult(0, "", "")


async def _answered(runtime: BoxRuntime, call: dict[str, Any]) -> dict[str, Any]:
    """The message that answers a call."""
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        arguments = None
    command = command_of(function["name"], arguments)
    text = NO_SUCH_TOOL
    if command is not None:
        try:
            text = shown(await runtime.box.run(command, SECONDS, env=runtime.process_env({}), cwd=runtime.workdir))
        except SandboxLost as error:
            runtime.lost = error
            raise
    return {"role": "tool", "tool_call_id": call["id"], "content": text}
