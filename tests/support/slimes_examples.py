"""slime's own examples, run as they are from a checkout at SLIME_CHECKOUT, with stand-ins for what they reach outside.

The examples are retool, search-r1, tau-bench, strands_sglang and multi_agent: another for each group.  Stand-ins: the
sandbox, the search server, tau-bench with its user, the agent framework strands with its client of SGLang's router;
and files of the examples' own that a checkout lacks.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
from slime.utils.misc import load_function
from slime.utils.types import Sample

_STRANDS = "examples.strands_sglang.generate_with_strands"
EXAMPLES = {
    "retool": ("generate_with_retool.generate", "generate_with_retool.reward_func"),
    "search-r1": ("generate_with_search.generate", "generate_with_search.reward_func"),
    "tau-bench": ("generate_with_tau.generate", ""),
    "strands_sglang": (f"{_STRANDS}.generate", f"{_STRANDS}.reward_func"),
    "multi_agent": ("examples.multi_agent.rollout_with_multi_agents.generate_with_multi_agents", ""),
}


def module(name: str, always: bool = True, **values: Any) -> None:
    """A module in the place of one from outside; its packages are made with it.

    Args:
        always: also where there is one.
    """
    if not always and importlib.util.find_spec(name) is not None:
        return
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        full = ".".join(parts[:depth])
        if full not in sys.modules:
            made = sys.modules[full] = ModuleType(full)
            made.__path__ = []
    vars(sys.modules[name]).update(values)


# ---- retool's sandbox, search-r1's server


class Registry:
    """Tools of which one answers everything."""

    def get_tool_specs(self) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": "code_interpreter"}}]

    async def execute_tool(self, name: str, arguments: dict[str, Any]) -> str:
        return f"{name}: 4"


async def local_search(url: str, query: str, top_k: int, proxy: Any = None) -> list[dict[str, Any]]:
    return [{"document": {"contents": f'"{query}"\nfour'}}] * top_k


def compute_score_em(solution_str: str, ground_truth: dict[str, Any], **more: Any) -> float:
    return float(any(target in solution_str for target in ground_truth["target"]))


# ---- tau-bench


class Environment:
    """A shop whose user has two things to say."""

    tools_info: list[Any] = []  # noqa: RUF012
    wiki = "Be brief."

    def reset(self, task_index: int = 0) -> SimpleNamespace:
        self.left = 2
        return SimpleNamespace(observation=f"Hello {task_index}", info=Info())

    def step(self, action: SimpleNamespace) -> SimpleNamespace:
        self.left -= 1
        return SimpleNamespace(observation="Yes?", reward=0.5, done=not self.left, info=Info())


class Info:
    def model_dump(self) -> dict[str, Any]:
        return {"task": "stub"}


class ToolCallingAgent:
    def __init__(self, tools_info: Any, wiki: str, model: str, provider: str, temperature: float = 0.0) -> None:
        self.tools_info, self.wiki, self.temperature = tools_info, wiki, temperature


class RunConfig(SimpleNamespace):
    agent_strategy, temperature = "tool-calling", 1.0


class Adapter:
    """Takes whatever the policy says for text."""

    def parse_response_to_openai_format(self, response: str) -> dict[str, Any]:
        return {"success": True, "parsed_result": {"normal_text": response, "calls": []}}


# ---- strands


class Tokens:
    """What strands' client of SGLang keeps of a conversation."""

    def __init__(self) -> None:
        self.segments: list[list[int]] = []
        self.loss_mask: list[int] = []
        self.logprobs: list[float] = []

    @property
    def initial_prompt_length(self) -> int:
        return len(self.segments[0])

    @property
    def token_ids(self) -> list[int]:
        return [token for segment in self.segments for token in segment]

    def add(self, tokens: list[int], trained: int, logprobs: list[float]) -> None:
        self.segments.append(tokens)
        self.loss_mask += [trained] * len(tokens)
        self.logprobs += logprobs


class Client:
    def __init__(self, args: Any, timeout: float) -> None:
        self.url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"


class Model:
    def __init__(self, tokenizer: Any, client: Client, tool_parser: Any, sampling_params: dict[str, Any]) -> None:
        self.tokenizer, self.client, self.params = tokenizer, client, sampling_params
        self.rollout = Tokens()

    async def turn(self, text: str) -> None:
        """What the policy says behind a text, over HTTP and not slime's `post`."""
        told = self.tokenizer.encode(text, add_special_tokens=False)
        self.rollout.add(told, 0, [0.0] * len(told))
        body = {
            "input_ids": self.rollout.token_ids,
            "sampling_params": self.params,
            "return_logprob": True,
            "stream": False,
        }
        async with httpx.AsyncClient(timeout=120) as http:
            answer = (await http.post(f"{self.client.url}/generate", json=body)).raise_for_status().json()
        said = answer["meta_info"]["output_token_logprobs"]
        self.rollout.add([item[1] for item in said], 1, [item[0] for item in said])

    def format_request_messages(self, messages: list[Any], system: Any) -> list[Any]:
        return messages

    def reset(self) -> None:
        self.rollout = Tokens()


class Agent:
    def __init__(self, model: Model, system_prompt: str, hooks: list[Any], **more: Any) -> None:
        self.model, self.system, self.hooks, self.messages = model, system_prompt, hooks, []

    async def invoke_async(self, prompt: str) -> None:
        await self.model.turn(f"{self.system}\n{prompt}")
        self.hooks[0].tool_iter_count += 1
        self.messages.append({"role": "tool", "content": "4"})
        await self.model.turn("\n4\n")

    def cleanup(self) -> None: ...


class Limiter:
    def __init__(self, max_tool_iters: int) -> None:
        self.tool_iter_count = self.tool_call_count = 0


def stand_in() -> None:
    """Put them into their places, and find the examples."""
    root = Path(os.environ["SLIME_CHECKOUT"])
    sys.path[:0] = [str(root), *(str(root / "examples" / name) for name in EXAMPLES)]
    once = asyncio.Semaphore(8)
    module("tool_sandbox", SEMAPHORE=once, TOOL_CONFIGS={"max_turns": 3, "max_tool_calls": 2}, tool_registry=Registry())
    module("local_search_server", local_search=local_search)
    module("qa_em_format", always=False, compute_score_em=compute_score_em)
    module("tau_bench.envs", get_env=lambda **given: Environment())
    module("tau_bench.types", RunConfig=RunConfig, Action=SimpleNamespace)
    module("tau_bench.agents.base", Agent=object)
    tool_calling = {"RESPOND_ACTION_NAME": "respond", "ToolCallingAgent": ToolCallingAgent}
    module("tau_bench.agents.tool_calling_agent", **tool_calling)
    module("sglang_tool_parser", parse_tools=lambda response, tools, kind: {"normal_text": response, "calls": []})
    module("openai_tool_adapter", always=False, create_openai_adapter=lambda **given: Adapter())
    module("strands", Agent=Agent, tool=lambda function: function)
    module("strands_sglang", SGLangModel=Model, ToolLimiter=Limiter, get_client_from_slime_args=Client)
    module("strands_sglang.tool_parsers", HermesToolParser=object)


stand_in()


# ---- what the run calls


def example_of(sample: Sample) -> str:
    return list(EXAMPLES)[(sample.group_index or 0) % len(EXAMPLES)]


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    """One of the examples makes the response."""
    name = example_of(sample)
    if name == "tau-bench":
        sample.prompt = str(sample.group_index)
    function: Callable[..., Any] = load_function(EXAMPLES[name][0])
    return await function(args, sample, sampling_params)


async def reward(args: Any, sample: Any, **more: Any) -> Any:
    """The example's own reward, and a little for length so that the rewards of a group differ."""
    if isinstance(sample, list):
        return [await reward(args, each) for each in sample]
    name = example_of(sample)
    if name == "search-r1":
        sample.label = {"ground_truth": {"target": [sample.label]}}
    more_for_length = 0.01 * (len(sample.response) % 7)
    if not EXAMPLES[name][1]:
        return more_for_length
    found = await load_function(EXAMPLES[name][1])(args, sample)
    return (found["score"] if isinstance(found, dict) else found) + more_for_length
