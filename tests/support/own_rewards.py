"""Own rewards as users write them, good and bad; they run in grading processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from hpcrl.sandbox import SandboxLost, sandbox

NOT_A_FUNCTION = 3


def length(options: Any, sample: Any) -> float:
    return len(sample.response)


async def length_async(args: Any, sample: Any, **kwargs: Any) -> float:
    return len(sample.response)


class Length:
    async def __call__(self, options: Any, sample: Any) -> float:
        return len(sample.response)


def length_with_more(args: Any, sample: Any, *, scale: float = 1.0, **kwargs: Any) -> float:
    return scale * len(sample.response)


def slow_length(options: Any, sample: Any) -> float:
    time.sleep(1.0 if sample.response == "slow" else 0.0)
    return len(sample.response)


def sees_everything(options: Any, sample: Any) -> bool:
    assert options.rollout_temperature == 0.5 and os.getcwd() in (sys.path[0], os.path.abspath(sys.path[0]))
    assert (sample.group_index, sample.response_index, sample.prompt, sample.label, sample.status) == (
        7,
        3,
        "1+1=",
        {"a": 1},
        "completed",
    )
    assert sample.metadata == {"key": "value"} and sample.response == "abc" and sample.response_length == 3
    assert sample.tokens == [0, 1, 2, 3, 4] and sample.loss_mask == [1, 1, 1] and sample.reward is None
    assert sample.array("tokens").tolist() == sample.tokens and sample.versions == [0, 0, 0]
    assert len(sample.rollout_log_probs) == 3
    return True


async def waits_half_a_second(options: Any, sample: Any) -> float:
    await asyncio.sleep(0.5)
    return 1.0


def ranks(args: Any, samples: list[Any], **kwargs: Any) -> list[int]:
    """By length; they come in the order of their index."""
    assert [sample.response_index for sample in samples] == [0, 1, 2]
    assert len({sample.group_index for sample in samples}) == 1
    lengths = [len(sample.response) for sample in samples]
    return [sorted(lengths).index(length) for length in lengths]


def as_object(options: Any, sample: Any) -> dict[str, Any]:
    return {"score": 0.5, "length": len(sample.response), "why": "because"}


def prints(options: Any, sample: Any) -> float:
    print("hello from the reward", flush=True)
    return 1.0


# ---- those that fail on "bad"


def returns_nan(options: Any, sample: Any) -> float:
    return float("nan") if sample.response == "bad" else 1.0


def returns_too_much(options: Any, sample: Any) -> float:
    return 1e39 if sample.response == "bad" else 1.0


def returns_text(options: Any, sample: Any) -> Any:
    return "good" if sample.response == "bad" else 1.0


def returns_nothing(options: Any, sample: Any) -> Any:
    return None if sample.response == "bad" else 1.0


def raises(options: Any, sample: Any) -> Any:
    if sample.response == "bad":
        return sample.metadata["answer"]
    return 1.0


def exits(options: Any, sample: Any) -> float:
    if sample.response == "bad":
        sys.exit(3)
    return 1.0


def dies(options: Any, sample: Any) -> float:
    if sample.response == "bad":
        os._exit(7)
    return 1.0


def is_killed(options: Any, sample: Any) -> float:
    if sample.response == "bad":
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def takes_memory(options: Any, sample: Any) -> float:
    if sample.response == "bad":
        return float(len(bytearray(2**30)))
    return 1.0


def sleeps(options: Any, sample: Any) -> float:
    if sample.response == "bad":
        time.sleep(600)
    return 1.0


async def sleeps_async(options: Any, sample: Any) -> float:
    if sample.response == "bad":
        await asyncio.sleep(600)
    return 1.0


async def blocks_the_loop(options: Any, sample: Any) -> float:
    await asyncio.sleep(0.01)
    if sample.response == "bad":
        time.sleep(600)
    return 1.0


def spins(options: Any, sample: Any) -> float:
    while sample.response == "bad":
        pass
    return 1.0


def ignores_signals(options: Any, sample: Any) -> float:
    if sample.response == "bad":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        while True:
            try:
                time.sleep(600)
            except BaseException:  # noqa: BLE001
                continue
    return 1.0


def starts_a_process(options: Any, sample: Any) -> float:
    process = subprocess.Popen(["sleep", "600"])
    Path(sample.response).write_text(str(process.pid))
    process.wait()
    return 1.0


def fails_once(options: Any, sample: Any) -> float:
    mark = Path(sample.response)
    if not mark.exists():
        mark.touch()
        raise RuntimeError("the first time")
    return 1.0


def no_arguments() -> float:
    return 1.0


def too_many_arguments(options: Any, sample: Any, more: Any) -> float:
    return 1.0


_LOST: list[str] = []


async def loses_its_sandbox(args: Any, sample: Any) -> float:
    """Twice, then it does not; that of the response "never" each time."""
    if sample.response == "never" or len(_LOST) < 2:
        _LOST.append("")
        raise SandboxLost("the box has ended")
    return 3.0


async def in_a_sandbox(args: Any, sample: Any) -> float:
    """What the response's command exits with."""
    async with sandbox() as box:
        return float((await box.run(sample.response, 5.0)).code)


def judged_by_run(options: Any, sample: Any) -> float:
    """A plain reward that asks with asyncio.run, twice, and that a signal can interrupt."""

    async def judge() -> float:
        await asyncio.sleep(0.01)
        return float(len(sample.response))

    asyncio.run(judge())
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError()))
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        signal.pause()
    except TimeoutError:
        return asyncio.run(judge())
    return -1.0


def groups_judged_by_run(options: Any, samples: Any) -> list[float]:
    return [judged_by_run(options, sample) for sample in samples]


def of_trl(prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
    return [0.0 for _ in completions]


def of_verl(data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any = None) -> float:
    return 0.0
