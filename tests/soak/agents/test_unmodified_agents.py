"""Agents as their registries have them ask the endpoint: mini-swe-agent, started as docs/customise.md starts it, and
Anthropic's client.

AGENTS=/path/to/an/environment/bin make soak SOAK=unmodified_agents

An environment in which `pip install mini-swe-agent anthropic` was run (last seen with 2.4.6 and 2.14.0, litellm
1.110.2), which is not that of hpcrl: these want other versions of its packages.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.documents.texts import python_files
from tests.support.asked_endpoint import FORMS, AskedEndpoint, asked, form_model, spoken
from tests.support.runs import POLICY, Run, all_gone, metrics, recipe
from tests.support.tiny import make_model
from tests.support.two_ways import Policy

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.soak,
    pytest.mark.skipif("AGENTS" not in os.environ, reason="AGENTS names no folder with mini-swe-agent's mini"),
]
DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
CALLS = {
    "hermes": '<tool_call>{"name": "bash", "arguments": {"command": "%s"}}</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=bash>\n<parameter=command>\n%s\n</parameter>\n</function>\n</tool_call>",
    "glm4_moe": "<tool_call>bash\n<arg_key>command</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.bash:0<|tool_call_argument_begin|>"
    '{"command": "%s"}<|tool_call_end|><|tool_calls_section_end|>',
}
CLIENT = """
import anthropic

client = anthropic.Anthropic(max_retries=0)
schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
asked = {"model": "policy", "max_tokens": 2000, "tools": [{"name": "add", "input_schema": schema}], "system": "Add."}
messages = [{"role": "user", "content": "1+1"}]
for turn in range(3):
    if turn:
        with client.messages.stream(messages=messages, **asked) as stream:
            said = stream.get_final_message()
    else:
        said = client.messages.create(messages=messages, **asked)
    text, call = said.content
    assert (text.text, call.input, said.stop_reason) == ("Well.", {"a": 1, "b": "x y"}, "tool_use")
    told = {"type": "tool_result", "tool_use_id": call.id, "content": "3"}
    messages += [{"role": "assistant", "content": said.content}, {"role": "user", "content": [told]}]
try:
    client.messages.create(messages=messages, extra_body={"temperature": 0.1}, **asked)
except anthropic.BadRequestError as error:
    assert "temperature" in str(error)
else:
    raise SystemExit("another temperature was taken")
"""


@pytest.fixture(scope="module", autouse=True)
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The page's functions as modules, and the agents' programs in PATH."""
    folder = tmp_path_factory.mktemp("agents")
    for name, text in python_files("customise"):
        (folder / f"{name}.py").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PATH", os.environ["AGENTS"], prepend=os.pathsep)
        yield folder


class Worker(Policy):
    """Says one turn after another, the last of them ever after."""

    def __init__(self, turns: list[Policy]) -> None:
        self.__dict__.update(turns[0].__dict__)
        self.turns = [turn.tokens for turn in turns]

    async def complete(self, *given: Any) -> Any:
        self.tokens = self.turns[min(len(self.asked), len(self.turns) - 1)]
        return await super().complete(*given)


@pytest.mark.parametrize("form", sorted(CALLS))
def test_mini_swe_agent_solves_a_task(form: str, tmp_path: Path) -> None:
    """As the page starts it: it runs the calls of two turns, which are one conversation with the sampled tokens."""
    tokenizer = form_model(tmp_path, form)
    turns = [
        spoken(tokenizer, f"Now. {CALLS[form] % command}", FORMS[form].end)
        for command in ("echo hello > made.txt; ls", DONE)
    ]

    async def work(found: AskedEndpoint) -> None:
        sample = SimpleNamespace(prompt="Make made.txt.", label="made.txt", reward=None)
        args = SimpleNamespace(base_url=f"{found.url}/v1", api_key=found.key)
        await asyncio.wait_for(importlib.import_module("swe_agent").solve(args, sample, {}), 300)
        [dialogue] = found.session.dialogues
        trajectory = dialogue.trajectory
        response = zip(trajectory.tokens[len(trajectory.prompt) :], trajectory.loss_mask, strict=True)
        said = [token for token, mask in response if mask]
        assert said == [*turns[0].tokens, turns[0].end, *turns[1].tokens, turns[1].end]
        assert sample.reward == 1

    asked(tokenizer, work, Worker(turns))


@pytest.mark.parametrize("form", sorted(FORMS))
def test_anthropics_client_reads_both(form: str, tmp_path: Path) -> None:
    """Three turns, whole and streamed, are one conversation."""
    tokenizer = form_model(tmp_path, form)

    async def work(found: AskedEndpoint) -> None:
        env = os.environ | {"ANTHROPIC_BASE_URL": found.url, "ANTHROPIC_API_KEY": found.key}
        python = str(Path(os.environ["AGENTS"]) / "python")
        process = await asyncio.create_subprocess_exec(python, "-c", CLIENT, env=env)
        assert await asyncio.wait_for(process.wait(), 100) == 0
        [dialogue] = found.session.dialogues
        assert sum(dialogue.trajectory.loss_mask) == 3 * (len(found.policy.tokens) + 1)

    asked(tokenizer, work, spoken(tokenizer, FORMS[form].said, FORMS[form].end))


def test_mini_swe_agent_trains_three_steps(agent: Path, tmp_path: Path) -> None:
    """A random model writes no calls, so each request of it is a conversation, and the trainer finds the engine's
    log-probs of all."""
    make_model(tmp_path / "model", vocab_size=128, max_position_embeddings=8192)
    rows = [{"prompt": f"Make {name}.txt.", "label": f"{name}.txt"} for name in "abcdef"]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {
        "num_rollout": 3,
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 2,
        "label_key": "label",
        "rollout_max_response_len": 24,
        "rollout_max_context_len": 8192,
        "max_tokens_per_gpu": 8192,
        "custom_generate_function_path": f"{agent}/swe_agent.py:solve",
        "run_dir": str(tmp_path / "run"),
    }
    values = {name: value for name, value in (POLICY | own).items() if name != "custom_rm_path"}
    begun = Run(recipe(tmp_path, tmp_path, **values), root=tmp_path / "run")
    status, out = begun.end(560)
    assert status == 0, out + begun.logs()
    steps = metrics(tmp_path / "run")
    assert list(steps) == [0, 1, 2]
    assert all(row["train/train_rollout_logprob_abs_diff"] <= 1e-5 for row in steps.values())
    files = sorted((tmp_path / "run" / "samples").glob("*.jsonl"))
    found = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert found and not [row["grading_error"] for row in found if row.get("grading_error")]
    assert all_gone(tmp_path / "run", [])
