"""--rm-type math: 1 if the last boxed answer of the response equals the label, else 0.

Equal text and equal numbers are seen here; everything else is compared symbolically by math-verify, in a process of its
own (`_symbolic.py`), because an answer such as 9^{9^{9^9}} can only be stopped from outside.

Invariants: no response can crash or hang the rollout process; an answer that cannot be compared in time is wrong.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import sys
from fractions import Fraction

import msgspec

from hpcrl.config.options import Options
from hpcrl.errors import HpcrlError, UsageError
from hpcrl.sample import Sample

SECONDS = 2.0  #: for one symbolic comparison
START = 60.0  #: for the comparing process to come up
LONGEST = 300  #: characters of an answer that is looked at symbolically, if the label is not longer
_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d)\.)?")


def boxed(text: str) -> str | None:
    r"""What stands in the last complete \boxed{...} (or \fbox{...}) of `text`, or None.  One pass, whatever the text."""
    opened: list[tuple[int, bool]] = []  # (where the content begins, whether it is boxed) of every open brace
    start, content = -1, None
    for found in _BRACES.finditer(text):
        token = found.group()
        if token.endswith("{") and token != "\\{":
            opened.append((found.end(), len(token) > 1))
        elif token == "}" and opened:
            begin, is_boxed = opened.pop()
            if is_boxed and begin > start:
                start, content = begin, text[begin : found.start()].strip()
    return content


def number(text: str) -> Fraction | None:
    """The value of a plain decimal number such as -1,234.50, or None if it is something else."""
    text = text.strip().strip("$").strip()
    if len(text) > 100 or not any(c.isdecimal() for c in text) or not text.isascii() or not _NUMBER.fullmatch(text):
        return None
    return Fraction(text.replace(",", "").rstrip("."))


class Math:
    """Grades boxed answers."""

    def __init__(self, workers: int) -> None:
        self._free: asyncio.LifoQueue[_Worker] = asyncio.LifoQueue()
        self._workers = [_Worker() for _ in range(workers)]
        for worker in self._workers:
            self._free.put_nowait(worker)

    def __str__(self) -> str:
        return "math"

    async def __call__(self, sample: Sample) -> float:
        label = str(sample.label)
        return await self.compare(boxed(sample.response), boxed(label) or label)

    async def compare(self, answer: str | None, label: str) -> float:
        """1.0 if the two are the same answer, else 0.0."""
        if not answer:
            return 0.0
        if answer.strip() == label.strip():
            return 1.0
        values = number(answer), number(label)
        if None not in values:
            return float(values[0] == values[1])
        if len(answer) > max(LONGEST, 2 * len(label)):
            return 0.0
        worker = await self._free.get()
        try:
            return float(await worker.same(answer, label))
        finally:
            self._free.put_nowait(worker)

    async def close(self) -> None:
        for worker in self._workers:
            await worker.end()


class _Worker:
    """The process that compares symbolically; started when first needed, and anew after it had to be ended."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    async def same(self, answer: str, label: str) -> bool:
        """Whether the two are equal; False also if that cannot be told in SECONDS."""
        pair = [text.encode(errors="replace").decode() for text in (answer, label)]
        try:
            if self._process is None:
                await self._start()
            self._process.stdin.write(msgspec.json.encode(pair) + b"\n")
            async with asyncio.timeout(SECONDS):
                reply = await self._process.stdout.readline()
        except (TimeoutError, BrokenPipeError, ConnectionResetError):
            reply = b""
        except asyncio.CancelledError:
            await self.end()  # its reply to nobody must not be taken for the next one
            raise
        if not reply.endswith(b"\n"):  # too slow, or it died of this pair
            await self.end()
            return False
        return reply == b"1\n"

    async def _start(self) -> None:
        command = [sys.executable, "-m", "hpcrl.rollout.rewards._symbolic"]
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        try:
            async with asyncio.timeout(START):
                ready = await self._process.stdout.readline()
        except TimeoutError:
            ready = b""
        if ready != b"ready\n":
            await self.end()
            raise HpcrlError(
                "reward math: the process for symbolic comparison did not start",
                "is the math-verify package usable? see the rollout log",
            )

    async def end(self) -> None:
        """Kill the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()


def make(options: Options) -> Math:
    """UsageError if the math-verify package is missing."""
    if importlib.util.find_spec("math_verify") is None:
        raise UsageError("--rm-type math needs the Python package math-verify", "install it where the rollout process runs")
    return Math(workers=max(1, min(8, len(os.sched_getaffinity(0)) - 1)))
