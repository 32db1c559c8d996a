"""The one tool of the shipped agents: a command for a shell, and what the policy reads of it.

Invariant: whatever a policy calls, there is an answer; nothing is run but the text of a call's `command`.
"""

from __future__ import annotations

from typing import Any

from hpcrl.sandbox import BoxResult

LONGEST = 8192  #: characters of what a command printed that the policy reads
NAME = "bash"
NO_SUCH_TOOL = f"there is one tool, {NAME}, and it needs a command"
BASH = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Run a command in a shell, in the working directory of the task.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "what to run"}},
            "required": ["command"],
        },
    },
}


def command_of(name: str, arguments: Any) -> str | None:
    """What a call wants to have run; None of one that is to be answered with NO_SUCH_TOOL."""
    command = arguments.get("command") if name == NAME and isinstance(arguments, dict) else None
    return command if isinstance(command, str) and command.strip() and "\0" not in command else None


def shown(done: BoxResult) -> str:
    """What the policy reads of a command: both outputs; and how it ended, unless it did well and has printed
    something."""
    text = f"{done.stdout}{done.stderr}".strip()
    if len(text) > LONGEST:
        text = f"{text[: LONGEST // 2]}\n[...]\n{text[-LONGEST // 2 :]}"
    if done.ok and text:
        return text
    code = f"exit {done.code}" if done.code >= 0 or not done.limit else ""
    ended = "it took too long" if done.timed_out else "; ".join(filter(None, (done.limit, code)))
    return f"{text}\n[{ended}]".strip()
