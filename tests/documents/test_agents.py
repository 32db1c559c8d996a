"""docs/agents.md: its agent solves a task in real boxes, its limits are the defaults, and its names are there."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcrl.sandbox
from hpcrl.config.options import Options
from hpcrl.rollout.samplers.trajectory import Turn
from hpcrl.sandbox import Box, BoxLimits, BoxProcess, BoxResult, SandboxPool, sandbox
from hpcrl.sandbox.harbor.rows import TaskRows
from hpcrl.sandbox.pool import default_pool
from tests.documents.texts import python_files
from tests.support.able import needs
from tests.support.asked_samples import args_of, asked_sample
from tests.support.harbor_tasks import write_task

PAGE = Path(__file__).parents[2] / "docs" / "agents.md"
pytestmark = [pytest.mark.process, needs("namespaces")]


class Scripted:
    """In the place of the tokenizer and the engine: says given texts one after another, and notes what it is told."""

    eos_ids = frozenset((1,))

    def __init__(self, texts: list[str]) -> None:
        self.texts = list(texts)
        self.told: list[str] = []

    async def generate(self, tokens: Any, params: dict[str, Any]) -> Turn:
        ids = np.asarray([7, 1], np.int32)
        zeros = np.zeros(2, np.int32)
        return Turn(ids, np.full(2, -0.5, np.float32), zeros, "stop", self.texts.pop(0))

    def render(self, messages: list[dict[str, Any]], generation: bool, tools: Any = None) -> str:
        self.told += [str(message["content"]) for message in messages if message["role"] == "tool"]
        return "".join(f"{message['content']}|" for message in messages)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        return [np.asarray([1, 50], np.int32) for _ in texts]

    def decode(self, tokens: Any) -> str:
        return "-".join(map(str, tokens.tolist()))


def played(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    texts: list[str],
    agent: str = "shell_agent",
    metadata: dict[str, Any] | None = None,
) -> tuple[Any, list[str]]:
    """An agent of the page where the policy says these texts: its sample, and what it was told."""
    name, code = next((name, code) for name, code in python_files("agents") if name == agent)
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    policy = Scripted(texts)
    args = args_of(Options(rollout_max_response_len=64), policy, "sum the numbers")
    files = {"files": {"data/numbers": "3\n4\n5\n"}, "check": "[ $(cat answer.txt) = 12 ]"}
    asked = asked_sample("sum the numbers", metadata=metadata or files)

    async def play() -> Any:
        try:
            return await module.generate(args, asked, {"max_new_tokens": 64})
        finally:
            await default_pool().close()

    return asyncio.run(asyncio.wait_for(play(), 120)), policy.told


def test_the_agent_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files stay between its commands, what they say comes back, and what it left is graded."""
    texts = [
        "cat data/numbers; cd nowhere",
        "s=0; for n in $(cat data/numbers); do s=$((s+n)); done; echo $s > answer.txt",
    ]
    found, told = played(tmp_path, monkeypatch, [*texts, "DONE"])
    assert found.reward == 1.0 and told[0].startswith("3\n4\n5\n") and told[0].endswith("[exit 1]")
    assert told[-1] == "[exit 0]"


def test_what_the_policy_breaks_is_not_graded_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that it has put in the way of the check are in its own box alone."""
    texts = [
        "mkdir -p bin; printf '#!/bin/sh\\necho 12' > bin/cat; chmod +x bin/cat; ln -s /etc/passwd answer.txt",
        "DONE",
    ]
    assert played(tmp_path, monkeypatch, texts)[0].reward == 0.0


def test_an_agent_of_harbors_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's script that is run once, at a task: its verifier says the reward."""
    write_task(tmp_path / "tasks" / "sum")
    metadata = TaskRows(tmp_path / "tasks")[0]["metadata"]
    for text, reward in (("echo 12 > sum.txt", 1.0), ("echo 1 > /logs/verifier/reward.txt", 0.0)):
        assert played(tmp_path, monkeypatch, [text], "script_agent", metadata)[0].reward == reward


def test_limits_and_names_of_the_page() -> None:
    text = PAGE.read_text()
    table = text[text.index("## Limits") : text.index("Memory and processes")]
    named = re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `")))
    assert sorted(named) == sorted(field.name for field in dataclasses.fields(BoxLimits))
    shown = BoxLimits()
    assert (shown.memory, shown.disk, shown.output) == (1 << 30, 256 << 20, 1 << 20)
    assert f"{shown.inodes:,}" in table and f"| {shown.processes} |" in table and f"| {shown.seconds:g} a" in table
    assert f"| {shown.cpu} s" in table and f"| {shown.files} open" in table
    for name in re.findall(r"`(BoxResult|BoxLimits|SandboxPool|SandboxLost|Unconfined)", text):
        assert getattr(hpcrl.sandbox, name)
    for name in ("code", "stdout", "stderr", "stdout_cut", "stderr_cut", "timed_out", "limit", "ok"):
        assert f"`{name}`" in text and hasattr(BoxResult, name)
    assert all(hasattr(Box, name) for name in ("run", "start", "write", "read", "listing", "reset", "layered"))
    assert all(hasattr(BoxProcess, name) for name in ("write", "read", "wait", "kill"))
    assert all(hasattr(SandboxPool, name) for name in ("box", "prepare", "counts", "close"))


def test_variables_and_places_of_the_page() -> None:
    async def look() -> tuple[str, str]:
        async with sandbox() as box:
            found = (
                await box.run("env | cut -d= -f1 | grep -vE '^(_|PWD|SHLVL|OLDPWD)$' | sort; pwd; echo $HOME")
            ).stdout
        await default_pool().close()
        return found, PAGE.read_text()

    found, text = asyncio.run(asyncio.wait_for(look(), 120))
    *names, where, home = found.split()
    assert all(f"`{name}`" in text for name in names) and len(names) == 4
    assert where == home == "/work"
