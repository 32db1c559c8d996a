"""Real trainer ranks for tests, at the price of a fork.

    run_ranks(4, function, *args, timeout=60) -> [result of rank 0, result of rank 1, ...]

`function(*args)` runs in n processes that have RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT as torchrun
sets them, so `hpcrl.trainer.parallel_state.initialize` works as in a run.  It must be a function of a module
that can be imported; arguments and results are pickled.

How: importing torch and Megatron takes seconds, so one clean process per test session (the zygote) imports them and
then forks ranks on demand, for all of the session's workers: it listens on an abstract Unix socket and ends with the
session.  A fork is only safe from a process that has never run a backward pass or opened gloo, so the zygote does
neither, and the store where ranks meet lives in the test process.  A second zygote, started when it is first asked for,
is for `on_fake_device`: what it has done to torch (hpcrl/planning/rehearsal/device.py) no other rank may see.  A third is
for `on_fake_gpu`, in which Megatron finds stand-ins for the packages that a GPU's machine has.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import IO, Any

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1",
}
FAKE = "fake"  #: the argument of the zygote whose device only knows shapes
PACKAGES = "packages"  #: that of the one which has stand-ins for Transformer Engine and DeepEP as well
_session: tuple[str, int] | None = None  #: (its name, the pid that it ends with); None: this process is all of it


class RankError(Exception):
    """A rank raised (the text is its traceback), died, or did not end in time."""


# ---- in the test process


def run_ranks(n: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """Run function(*args) on n ranks; what each returns.  RankError with the first rank's traceback that failed."""
    from torch.distributed import TCPStore

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        listener.listen(64)
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    answer = _ask((n, function.__module__, function.__qualname__, args, port, timeout, list(sys.path)))
    del store
    if isinstance(answer, str):
        raise RankError(answer)
    return answer


def on_fake_device(function: Callable[..., Any], *args: Any, timeout: float = 240.0) -> Any:
    """function(*args) in a process of its own whose accelerator is that of hpcrl/planning/rehearsal/device.py.

    Raises:
        RankError: with its traceback.
    """
    return _on_fake((FAKE,), function, args, timeout)


def on_fake_gpu(function: Callable[..., Any], *args: Any, timeout: float = 240.0) -> Any:
    """The same where Megatron finds Transformer Engine and DeepEP, held by hpcrl/planning/fake_libraries/transformer_engine.py and
    deep_ep.py.

    Raises:
        RankError: with its traceback.
    """
    return _on_fake((FAKE, PACKAGES), function, args, timeout)


def _on_fake(kind: tuple[str, ...], function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> Any:
    answer = _ask((1, function.__module__, function.__qualname__, args, 0, timeout, list(sys.path)), kind)
    if isinstance(answer, str):
        raise RankError(answer)
    return answer[0]


def pytest_configure(config: Any) -> None:
    """A worker of xdist has its zygotes in common with the session's other workers; their controller ends last."""
    global _session
    if hasattr(config, "workerinput"):
        _session = config.workerinput["testrunuid"], os.getppid()


def _ask(request: tuple[Any, ...], kind: tuple[str, ...] = ()) -> Any:
    session, ends_with = _session or (str(os.getpid()), os.getpid())
    name = "-".join(("hpcrl-zygote", session, *kind))
    with socket.socket(socket.AF_UNIX) as connection:
        deadline, started = time.monotonic() + 60, False
        while connection.connect_ex(f"\0{name}"):
            if not started:  # of workers that find none at once, one's takes the name
                started = True
                environment = os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
                command = [sys.executable, os.path.abspath(__file__), name, str(ends_with), *kind]
                subprocess.run(command, stdin=subprocess.DEVNULL, env=environment, check=True, timeout=60)
            assert time.monotonic() < deadline, "no zygote came up"
            time.sleep(0.02)
        with connection.makefile("rwb") as stream:
            _send(stream, request)
            return _receive(stream)


def _send(stream: IO[bytes], value: Any) -> None:
    data = pickle.dumps(value)
    stream.write(struct.pack("<q", len(data)) + data)
    stream.flush()


def _receive(stream: IO[bytes]) -> Any:
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError("the other side is gone")
    return pickle.loads(stream.read(struct.unpack("<q", head)[0]))


# ---- in the zygote


def _serve(name: str, ends_with: int) -> None:
    """Fork ranks for each request until a process has ended; detached, since tests count their process's children.

    Return at once if another zygote has the name.
    """
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(f"\0{name}")
        end = os.pidfd_open(ends_with)
    except OSError:
        return
    listener.listen(64)
    if os.fork():
        return
    os.dup2(2, 1)  # what ranks print is not for the worker's standard output
    if PACKAGES in sys.argv:
        from hpcrl.planning.fake_libraries import deep_ep, transformer_engine

        transformer_engine.install()
        deep_ep.install()
    if FAKE in sys.argv:
        from hpcrl.planning.rehearsal import device as fake_device

        fake_device.install()
    else:
        from hpcrl.trainer.megatron import replaced

        replaced.install()
    for module in ("megatron.hf_weights", "megatron.settings", "megatron.model", "checkpoint.save_load"):
        importlib.import_module(f"hpcrl.trainer.{module}")
    gc.freeze()  # a collection in a rank would copy all of these pages
    handlers = set[int]()
    while end not in (ready := select.select([listener, end], [], [], 1.0)[0]):
        handlers -= {pid for pid in handlers if os.waitpid(pid, os.WNOHANG)[0]}
        if ready:
            connection, _ = listener.accept()
            _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if uid == os.getuid() and (pid := os.fork()):
                handlers.add(pid)
            elif uid == os.getuid():
                listener.close()
                _answer(connection)
                os._exit(0)
            connection.close()


def _answer(connection: socket.socket) -> None:
    """In a process of its own: run what is asked, and end the ranks if the one who asks is gone."""
    with connection.makefile("rwb") as stream:
        n, module, name, args, port, timeout, sys.path[:] = _receive(stream)
        _send(stream, _run(n, module, name, args, port, timeout, connection.fileno()))


def _run(
    n: int, module: str, name: str, args: tuple[Any, ...], port: int, timeout: float, asking: int
) -> list[Any] | str:
    """Results of all ranks, or the text of what went wrong; asking: a descriptor that becomes readable when nobody waits
    for them any more."""
    pids, pipes = {}, {}
    for rank in range(n):
        reader, writer = os.pipe()
        if (pid := os.fork()) == 0:
            os.close(reader)
            _rank(rank, n, module, name, args, port, writer)
        os.close(writer)
        pids[rank], pipes[reader] = pid, rank
    data: dict[int, bytes] = dict.fromkeys(range(n), b"")
    end, error = time.monotonic() + timeout, ""
    while pipes and not error:
        ready, _, _ = select.select([*pipes, asking], [], [], max(0.0, end - time.monotonic()))
        if asking in ready:
            error = "the test is gone"
        elif not ready:
            error = f"ranks {sorted(pipes.values())} did not end within {timeout:.0f} s"
        for reader in set(ready) - {asking}:
            if chunk := os.read(reader, 1 << 20):
                data[pipes[reader]] += chunk
            else:
                rank = pipes.pop(reader)
                os.close(reader)
                error = error or _failure(rank, data[rank])
    for pid in pids.values():
        if error:
            os.kill(pid, signal.SIGKILL)  # not waited for yet, so the pid is still the rank's
        os.waitpid(pid, 0)
    for reader in pipes:
        os.close(reader)
    return error or [pickle.loads(data[rank])[1] for rank in range(n)]


def _failure(rank: int, data: bytes) -> str:
    if not data:
        return f"rank {rank} died"
    ok, value = pickle.loads(data)
    return "" if ok else f"rank {rank}:\n{value}"


def _rank(rank: int, n: int, module: str, name: str, args: tuple[Any, ...], port: int, writer: int) -> None:
    """Be rank `rank`: write (True, result) or (False, traceback) and end."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(n), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store is the test process's: every rank is its client
    try:
        value: Any = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
        data = pickle.dumps((True, value(*args)))
    except BaseException:  # noqa: BLE001  (told to the test)
        data = pickle.dumps((False, traceback.format_exc()))
    with os.fdopen(writer, "wb") as out:
        out.write(data)
    os._exit(0)


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
