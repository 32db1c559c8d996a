"""The shipped agent of Harbor's tasks: a policy that says given texts works in a real box and is judged there."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.options import Options
from hpcrl.rollout.samplers.harbor_agent import generate
from hpcrl.rollout.worker_messages import LOST, failure_of
from hpcrl.sandbox import BoxResult, SandboxLost
from hpcrl.sandbox.harbor.rows import TaskRows
from hpcrl.sandbox.pool import default_pool
from tests.documents.test_agents import Scripted
from tests.support.able import needs
from tests.support.asked_samples import args_of, asked_sample
from tests.support.harbor_tasks import TOML, write_task

pytestmark = [pytest.mark.process, needs("namespaces")]


def call(command: str) -> str:
    return f'I run it.\n<tool_call>\n{{"name": "bash", "arguments": {{"command": "{command}"}}}}\n</tool_call>'


def played(folder: Path, texts: list[str]) -> tuple[Any, list[str]]:
    """The sample of a policy that says these texts, and what it was told."""
    policy = Scripted(texts)
    policy.template = "<tool_call>"  # type: ignore[attr-defined]
    options = Options(rollout_max_response_len=512)
    args = args_of(options, policy)
    asked = asked_sample(metadata=TaskRows(folder)[0]["metadata"])

    async def play() -> Any:
        try:
            return await generate(args, asked, {"max_new_tokens": 512})
        finally:
            await default_pool().close()

    return asyncio.run(asyncio.wait_for(play(), 120)), list(dict.fromkeys(policy.told))


def test_a_task_is_worked_at(tmp_path: Path) -> None:
    """Files stay between commands; what they print comes back and is not learned from; the verdict is the reward."""
    write_task(tmp_path / "sum")
    found, told = played(
        tmp_path, [call("cat data/*"), call("echo 12 > sum.txt"), call("cd nowhere"), call("exit 3"), "It is done."]
    )
    assert (found.reward, found.rewards, found.metadata["harbor"]["verifier"]) == (1.0, {}, "")
    assert told[0] == "3\n4\n5" and told[1] == "[exit 0]" and told[2].endswith("[exit 1]") and told[3] == "[exit 3]"
    assert set(found.loss_mask) == {0, 1} and found.tokens[:2] == [1, 50]


def test_other_calls_and_the_end_of_time(tmp_path: Path) -> None:
    """An unknown tool is told so; a command has what is left of [agent] timeout_sec, and then the work is over."""
    write_task(tmp_path / "sum", TOML.replace("60.0", "1.0"))
    other = '<tool_call>{"name": "python", "arguments": {"code": "1"}}</tool_call>'
    late = [call("sleep 60"), call("echo 12 > sum.txt"), "never said"]
    found, told = played(tmp_path, [other, *late])
    assert found.reward == 0.0 and "bash" in told[0] and told[1] == "[it took too long]" and len(told) == 2


def test_a_policy_that_breaks_its_box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that it has reached is told; where its whole box was ended for it, that is its work too."""
    write_task(tmp_path / "sum")
    found, told = played(tmp_path, [call("python3 -c 'x = bytes(1 << 29); y = bytearray(1 << 29)'"), "done"])
    assert found.reward == 0.0 and found.rewards == {} and "memory" in told[0].lower()

    async def ended(*given: Any) -> BoxResult:
        return BoxResult(-9, "", "", limit="256 MiB of memory; the sandbox was ended")

    monkeypatch.setattr("hpcrl.rollout.samplers.harbor_agent.run_in", ended)
    found, _ = played(tmp_path, [call("true"), "done"])
    assert (found.reward, found.rewards) == (0.0, {"no_verdict": 1.0})


def test_a_lost_box_is_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error leaves the function as what makes the run call it again."""
    write_task(tmp_path / "sum")

    async def lost(*given: Any) -> None:
        raise SandboxLost("its watcher was killed")

    monkeypatch.setattr("hpcrl.rollout.samplers.harbor_agent.run_in", lost)
    with pytest.raises(SandboxLost) as raised:
        played(tmp_path, [call("true"), "done"])
    assert failure_of(raised.value) == LOST
