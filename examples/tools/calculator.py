"""A calculator as a tool: the policy writes `<call>47*83`, reads `3901`, and answers.

    --custom-generate-function-path examples.tools.calculator.Generate        (started in the repository's root)

A turn that calls is followed by the tool's answer, at most CALLS times; the first turn that does not call is the
answer.  What the tool said is not learned from (loss mask 0).  The calculator is a process of its own, which holds
little memory, opens no file, starts no process, and is killed when one answer takes longer than SECONDS.

    python examples/tools/calculator.py             (the calculator: a line with an expression in, a line with its value out)
"""

from __future__ import annotations

import ast
import asyncio
import operator
import resource
import sys
from typing import Any

CALL = "<call>"
CALLS = 3  #: of a response
SECONDS = 2.0  #: that the calculator may take for one answer
LONGEST = 200  #: characters of an expression and of its value
FAILED = "-"  #: what the policy reads where there is no value


class Generate:
    """Turns of the policy and of the calculator.  One is made for each process that runs it."""

    def __init__(self) -> None:
        self._calculator = Calculator()

    async def __call__(self, args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
        from hpcrl.rollout.samplers.conversation import Conversation

        talk = Conversation(args, sample, sampling_params)
        for _ in range(CALLS + 1):
            turn = await talk.turn()
            if turn.finish == "length" or not turn.text.startswith(CALL):
                break
            talk.tell_messages({"role": "tool", "content": await self._calculator.value(turn.text.removeprefix(CALL))})
        return talk.sample()


class Calculator:
    """The process that calculates, started when it is first asked, and again when it had to be killed."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def value(self, expression: str) -> str:
        """The value of an expression, FAILED if it has none or takes too long."""
        if not expression.isascii() or not expression.isprintable() or len(expression) > LONGEST:
            return FAILED
        async with self._turn:
            process = self._process or await self._start()
            try:
                async with asyncio.timeout(SECONDS):
                    process.stdin.write(expression.encode() + b"\n")
                    answer = await process.stdout.readline()
                if answer:
                    return answer.decode().strip()
            except (TimeoutError, ConnectionError):
                process.kill()
            except BaseException:  # the call was given up: its answer must not become another's
                process.kill()
                self._process = None
                raise
            self._process = None
            return FAILED

    async def _start(self) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", __file__, stdin=pipe, stdout=pipe
        )
        return self._process


# ---- the process


OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
}


def calculate(node: ast.AST) -> float:
    """The value of a tree of numbers and operators.  ValueError for anything else."""
    if isinstance(node, ast.Expression):
        return calculate(node.body)
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](calculate(node.left), calculate(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](calculate(node.operand))
    raise ValueError("no number and no operator")


def main() -> None:
    for limit, most in ((resource.RLIMIT_AS, 1 << 29), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_NOFILE, 3)):
        resource.setrlimit(limit, (most, most))
    for line in sys.stdin:
        try:
            value = str(calculate(ast.parse(line.strip(), mode="eval")))
        except (ValueError, TypeError, SyntaxError, ArithmeticError, MemoryError, RecursionError):
            value = FAILED
        print(value if len(value) <= LONGEST else FAILED, flush=True)


if __name__ == "__main__":
    main()
