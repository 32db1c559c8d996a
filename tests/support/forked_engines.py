"""Real vLLM servers for tests, at the price of a fork.

    nursery = Nursery()
    engines = nursery.engines(root, model, weight_transfer="shm")     # as tests.support.engines.Engines, ready when it returns
    engines.stop(); nursery.close()

How: importing vLLM takes most of an engine's start.  One clean process (the nursery) imports it, and forks a server for
each run directory that it reads from stdin.  What then runs is hpcrl.engine.server, with the worker extension of
tests/support/breakable and without the supervisor of hpcrl.engine.main.  A server dies with the nursery, the nursery
with the test process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from hpcrl.config.options import Options
from hpcrl.engine.key_guard import KEY_FILE, REALM
from hpcrl.engine.membership.http import Address, HttpError, request_json
from hpcrl.engine.server_settings import LISTEN_FD, build, server_environment
from hpcrl.models.files.config_json import read_config
from hpcrl.run.peers import EnginePeer, publish
from hpcrl.run.process import die_with_parent
from hpcrl.run.rundir import RunDir
from hpcrl.transport.auth import http_key
from hpcrl.weights.update_backend import VLLM_IPC
from tests.support.children import read_line

REPO = Path(__file__).resolve().parents[2]
IPC = "shared-gpus"  #: name of a run directory whose engines open memory of the trainer


class Nursery:
    """The process that forks servers."""

    def __init__(self) -> None:
        self.process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        env = os.environ | {
            "PYTHONPATH": str(REPO),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "TORCHDYNAMO_DISABLE": "1",
        }
        return subprocess.Popen(
            [sys.executable, "-m", "tests.support.forked_engines"],
            cwd=REPO,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def engines(self, root: Path, model: Path, count: int = 1, without_weights: bool = False, **values: Any) -> Any:
        """So many engines for `model`, up and published; with its weights, or as in a run that trains."""
        from tests.support.engines import Engines

        nursery = self

        class Nursed(Engines):
            empty = without_weights or Engines.empty

            def _start(self, index: int) -> Server:  # type: ignore[override]
                return nursery._fork(self.rundir, index)

        found = Nursed(root, model, count, **values)
        _publish(found)
        return found

    def _fork(self, rundir: RunDir, index: int) -> Server:
        if self.process.poll() is not None:  # a test of what ends all its descendants has ended it
            self.process = self._start()
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{index} {rundir.root}\n")
        self.process.stdin.flush()
        pid, port = map(int, read_line(self.process, 240).split())
        return Server(psutil.Process(pid), port)

    def close(self) -> None:
        """End it, and with it every server that is left."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait(30)


class Server:
    """A forked server, with what tests need of a Popen."""

    def __init__(self, process: psutil.Process, port: int) -> None:
        self.process = process
        self.pid = process.pid
        self.port = port

    def poll(self) -> int | None:
        return None if self.process.is_running() and self.process.status() != psutil.STATUS_ZOMBIE else 1

    def terminate(self) -> None:
        self.process.terminate()

    def wait(self, seconds: float) -> int:
        self.process.wait(seconds)
        return 0


def _publish(engines: Any) -> None:
    """Wait for /health, then tell the run what the supervisors would."""
    deadline = time.monotonic() + 120
    for index, server in enumerate(engines.processes):
        address = Address("127.0.0.1", server.port, http_key(engines.rundir, index))
        while True:
            assert server.poll() is None and time.monotonic() < deadline, engines.log_file(index).read_text()[-3000:]
            try:
                request_json(address, "GET", "/health", 10)
                break
            except HttpError:
                time.sleep(0.05)
        publish(engines.rundir, EnginePeer(host=address.host, port=address.port), index)


# ---- in the nursery


def main() -> None:
    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended servers are reaped by themselves
    import vllm.entrypoints.launchers.api_server.entry
    import vllm.entrypoints.launchers.cli_args
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401

    for line in sys.stdin:
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        if (pid := os.fork()) == 0:
            index, _, root = line.strip().partition(" ")
            _serve(RunDir(Path(root)), int(index), sock)
        print(pid, sock.getsockname()[1], flush=True)
        sock.close()
    os._exit(0)  # taking vLLM apart takes seconds


def _serve(rundir: RunDir, index: int, sock: socket.socket) -> None:
    """Be the server of a run directory; never returns."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        die_with_parent()
        log = os.open(rundir.logs / f"engine-{index}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        from hpcrl.engine import server, server_settings

        server_settings.EXTENSION = "tests.support.breakable.extension.Extension"
        options = Options.model_validate_json(rundir.options_file.read_bytes())
        config = read_config(options.hf_checkpoint)
        if config["model_type"].startswith("qwen3_5"):
            from tests.support import absent_torchvision

            absent_torchvision.install()
        if "quantization_config" in config:
            from tests.support.breakable.fp8_on_cpu import install

            install()
        if options.weight_transfer == "vllm":
            from tests.support import vllm_on_cpu

            vllm_on_cpu.install()
        if rundir.root.name == IPC:
            vllm_on_cpu.install_ipc()
            server_settings.backend = lambda *_: VLLM_IPC
        with tempfile.TemporaryDirectory(prefix="hpcrl-nursed-", dir="/tmp") as scratch:
            base = dict(os.environ) | {
                KEY_FILE: str(rundir.keys / "http.key"),
                "TMPDIR": scratch,
                "VLLM_RPC_BASE_PATH": scratch,
            }
            base[REALM] = f"{index}.0"
            base[LISTEN_FD] = str(os.dup(sock.fileno()))
            sys.argv = ["serve", str(rundir.root), "--attempt", "0", "--index", str(index)]
            context = server.open_role()
            os.environ.update(server_environment(options, context.plan, index, base, build()))
            tempfile.tempdir = None  # it was found before the fork, and is another now
            sock.close()
            code = server.main()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
