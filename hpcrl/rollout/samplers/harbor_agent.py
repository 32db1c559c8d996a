"""An agent for Harbor's tasks: the policy calls a shell, turn after turn, and its verifier's verdict is the reward.

    --prompt-data DIR --custom-generate-function-path hpcrl.rollout.samplers.harbor_agent.generate

The policy has one tool, `bash`, shown as its chat template shows tools, and calls it in the form that the template
shows (`hpcrl/rollout/endpoint/tool_calls`).  A turn without a call ends its work, as does the end of the time or of the
room that it has.  An agent of your own needs `task_of`, `task_box`, `run_in` and `verdict` (docs/agents.md).

Invariant: what a command printed is not learned from; a response has the verifier's verdict, or it is not trained on.
"""

from __future__ import annotations

import time
from typing import Any

from hpcrl.rollout.endpoint.call_forms import form_of
from hpcrl.rollout.samplers.bash_tool import BASH, NO_SUCH_TOOL, command_of, shown
from hpcrl.rollout.samplers.conversation import Conversation
from hpcrl.rollout.samplers.trajectory import LENGTH, opening
from hpcrl.sandbox import Box
from hpcrl.sandbox.harbor.rows import KEY, task_of
from hpcrl.sandbox.harbor.task import HarborTask
from hpcrl.sandbox.harbor.verdict import TaskVerdict, run_in, task_box, verdict

TURNS = 32  #: of a response
SECONDS = 120.0  #: that one command may take


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Turns of the policy and of the shell, then the verdict."""
    task = task_of(sample.metadata)
    messages = [{"role": "user", "content": task.instruction}]
    tokens = opening(args.tokenizer, messages, [BASH])
    talk = Conversation(args, sample, sampling_params, tokens.tolist(), messages)
    async with task_box(task) as box:
        broken = await _work(args, talk, task, box)
        found = TaskVerdict(0.0, {"no_verdict": 1.0}, broken) if broken else await verdict(task, box)
    made = talk.sample()
    made.reward, made.rewards = found.reward, found.parts
    made.metadata[KEY] = {**made.metadata[KEY], "verifier": found.said}
    return made


async def _work(args: Any, talk: Conversation, task: HarborTask, box: Box) -> str:
    """The policy's turns; "", or the limit by which it has ended its own box."""
    form = form_of(args.tokenizer.template or "")
    left = task.config.agent.timeout_sec or float("inf")
    for _ in range(TURNS):
        turn = await talk.turn()
        calls = form.split(turn.text, [BASH])[1]
        if turn.finish == LENGTH or not calls or left <= 0:
            break
        answers = []
        for call in calls:
            command = command_of(call.name, call.arguments)
            if command is None:
                answers.append({"role": "tool", "content": NO_SUCH_TOOL})
                continue
            begun = time.monotonic()
            done = await run_in(box, task, command, max(0.1, min(SECONDS, left)))
            left -= time.monotonic() - begun
            if done.limit.endswith("the sandbox was ended"):
                return done.limit
            answers.append({"role": "tool", "content": shown(done)})
        talk.tell_messages(*answers, tools=[BASH])
    return ""
