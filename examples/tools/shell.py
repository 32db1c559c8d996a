"""A shell as a tool: the policy writes `<call>cat f47`, reads what the command printed, and answers.

    --custom-generate-function-path examples.tools.shell.generate             (started in the repository's root)

Commands run in a sandbox of the response's own, with the files of the prompt's metadata, without a network, within
limits (docs/agents.md).  A turn that calls is followed by what the command printed, at most CALLS times; the first
turn that does not call is the answer.  What the shell said is not learned from (loss mask 0).
"""

from __future__ import annotations

from typing import Any

from hpcrl.sandbox import BoxLimits, sandbox

CALL = "<call>"
CALLS = 3  #: of a response
LONGEST = 200  #: characters of what a command printed that the policy reads
NOTHING = "-"  #: what it reads where a command printed nothing
LIMITS = BoxLimits(memory=128 << 20, disk=16 << 20, processes=16, seconds=5.0, output=4096)


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Turns of the policy and of the shell."""
    from hpcrl.rollout.samplers.conversation import Conversation

    talk = Conversation(args, sample, sampling_params)
    async with sandbox(limits=LIMITS) as box:
        for path, text in sample.metadata["files"].items():
            await box.write(path, text)
        for _ in range(CALLS + 1):
            turn = await talk.turn()
            if turn.finish == "length" or not turn.text.startswith(CALL):
                break
            done = await box.run(turn.text.removeprefix(CALL))
            talk.tell_messages({"role": "tool", "content": done.stdout.strip()[:LONGEST] or NOTHING})
    return talk.sample()
