"""A grading process: loads the rewards, then grades what it is sent until its socket closes.

    python -m hpcrl.rollout.grading.worker FD        (started by process.py; FD is its end of a socket pair)

Invariants: it dies with the rollout process; after its start it cannot take more than a bounded amount of memory; what
a reward prints goes to the rollout's log and never into the protocol.  A plain function has the process to itself,
async ones run side by side.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import sys
import traceback

import msgspec

from hpcrl.config.options import Options
from hpcrl.errors import HpcrlError
from hpcrl.rollout.grading.frames import Ready, Reply, Setup, Task, receive_sample
from hpcrl.rollout.grading.rewards import Reward, grade, load_reward
from hpcrl.rollout.worker_process import frame, receive
from hpcrl.run.process import die_with_parent


async def serve(fd: int) -> None:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=fd), limit=1 << 22)
    setup = msgspec.msgpack.decode(await receive(reader), type=Setup)
    options = Options.model_validate_json(setup.options)
    try:
        rewards = {word: load_reward(word, options) for word in setup.words}
    except BaseException as error:  # noqa: BLE001  (the user's module may raise anything)
        what, hint = (
            (error.what, error.hint) if isinstance(error, HpcrlError) else (f"{type(error).__name__}: {error}", "")
        )
        cause = error.__cause__
        trace = "".join(traceback.format_exception(cause)) if cause is not None else ""
        writer.write(frame(Ready(error=what, hint=hint, trace=trace)))
        await writer.drain()
        return
    _bound_memory(setup.memory)
    writer.write(frame(Ready(waits=[word for word, reward in rewards.items() if reward.waits])))
    running: set[asyncio.Task[None]] = set()
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            task = msgspec.msgpack.decode(await receive(reader), type=Task)
            work = _answer(writer, task, [rewards[word] for word in task.words], options)
            if all(rewards[word].waits for word in task.words):
                pending = asyncio.create_task(work)
                running.add(pending)
                pending.add_done_callback(running.discard)
            else:
                await work


async def _answer(writer: asyncio.StreamWriter, task: Task, rewards: list[Reward], options: Options) -> None:
    samples = [receive_sample(sent) for sent in task.samples]
    writer.write(frame(Reply(task.id, await grade(rewards, options, samples, task.key, task.seconds))))
    await writer.drain()


def _bound_memory(more: int) -> None:
    """No more than `more` bytes of data beyond what there is now; then an allocation fails with MemoryError (Linux)."""
    if not sys.platform.startswith("linux"):
        return
    with open("/proc/self/status", encoding="ascii") as status:
        now = next(int(line.split()[1]) for line in status if line.startswith("VmData")) * 1024
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = now + more if hard == resource.RLIM_INFINITY else min(now + more, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def main() -> None:
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    os.dup2(2, 1)  # what a reward prints
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        asyncio.run(serve(int(sys.argv[1])))
    sys.stderr.flush()
    os._exit(0)  # threads that a reward has left behind are not waited for


if __name__ == "__main__":
    main()
