"""The engine role: one vLLM server, started, watched and ended.

    python -m hpcrl.engine.main RUN --attempt N --index I [--incarnation K]

Invariants: an engine that does not come up, dies, hangs or stops answering ends this process with a non-zero status and
one message that says why (`run/engine_files.py`: its supervisor starts it again, or it is the attempt's error),
whatever exit code vLLM had (it has 0 after its engine core died); when this process ends, however, nothing that it
started is left.  No torch is imported here.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from hpcrl.engine.health import CoreWatchdog, ServerLog, StoppedProcess, leftovers
from hpcrl.engine.key_guard import KEY_FILE, REALM, read_key
from hpcrl.engine.membership.http import HEALTH, REFUSED, TURN, Address, request_json, status
from hpcrl.engine.multi_node import bound_socket, meet, variables
from hpcrl.engine.server_settings import LISTEN_FD, build, gpu_wishes, scale_warning, server_environment
from hpcrl.errors import DeadlineError, HpcrlError, PeerError, UsageError
from hpcrl.models.files.config_json import read_config
from hpcrl.report.timeline.spans import Timeline, role_timeline
from hpcrl.run.compile_cache.role_cache import KeptCode
from hpcrl.run.engine_files import limit_after, record_end, restart_limit, was_up
from hpcrl.run.exit_status import MemoryWatch, how_it_ended
from hpcrl.run.gpu_environment import overruled
from hpcrl.run.pauses import read_carried
from hpcrl.run.peers import EnginePeer, publish
from hpcrl.run.process import adopt_orphans, descendants, die_with_parent, end_descendants, end_processes
from hpcrl.run.role import RoleContext, act, open_role, read_plan, say
from hpcrl.run.scratch import SHORT, Scratch
from hpcrl.transport.auth import HTTP_KEY
from hpcrl.utils.waiting import Deadline
from hpcrl.weights.colocation import Event
from hpcrl.weights.update_backend import backend

SERVER = "hpcrl.engine.server"
GRACE = 5.0  #: seconds between SIGTERM and SIGKILL of the server
POLL = 0.5
#: statuses of a server that was ended from outside, which its compiled code is no reason for
TOLD = (-signal.SIGTERM, -signal.SIGINT, -signal.SIGKILL)


class EngineSupervisor:
    """One server of this host, from its socket to its end.

    Attributes:
        keeps_code: whether what it compiles is kept next to its run.
    """

    keeps_code = True

    def __init__(self, context: RoleContext) -> None:
        self.context = context
        self.place = context.plan.engines[context.index]
        self.found = build()
        self.name = f"engine {context.index} on {self.place.host}"
        self.backend = backend(context.options, context.plan, self.found.cpu)
        self._check_added()
        if warning := scale_warning(read_config(context.options.hf_checkpoint), self.found):
            say(warning)
        os.environ |= {KEY_FILE: str(context.rundir.keys / HTTP_KEY), REALM: self._key_name()}
        self.key = read_key().decode()
        usual = tempfile.gettempdir()  # paths of sockets may have 107 characters at most
        self.made = Scratch("engine", Path(usual if len(usual) < 40 else SHORT))
        self.scratch = self.made.path
        self.memory = MemoryWatch()
        self.stopped = threading.Event()
        self.standing = StoppedProcess()
        self.shared: set[Path] = set()
        self.child: subprocess.Popen[bytes] | None = None
        self.code: KeptCode | None = None
        self.died = False

    def _key_name(self) -> str:
        """The name under which the engine's key is derived."""
        return f"{self.context.index}.{self.context.incarnation}"

    def _check_added(self) -> None:
        """Raise UsageError if weights come to the run's other engines in a way that does not reach this host."""
        theirs = backend(self.context.options, read_plan(self.context.rundir), self.found.cpu)
        if theirs != self.backend:
            raise UsageError(
                f"{self.name} cannot join: the run's weights go to its engines by {theirs}, which does not leave "
                "their host",
                "begin the run with --weight-transfer gloo (or nccl) to add engines on other hosts",
            )

    def start(self) -> None:
        """Bind the port and start the server on it."""
        sock = self._bind()
        self.address = Address(self.place.at, sock.getsockname()[1], self.key)
        also = {LISTEN_FD: str(sock.fileno())}
        if self.place.also:
            also |= variables(meet(self.context), 0)
        self.launch(also, 0, [sock.fileno()])
        sock.close()  # or else connections would be accepted for a server that is gone

    def launch(self, also: Mapping[str, str], node: int, fds: Sequence[int] = ()) -> None:
        """Start the server of part `node` of the engine.

        Args:
            also: of its environment.
            fds: that it gets from us.
        """
        base = dict(os.environ) | {"TMPDIR": str(self.scratch), "VLLM_RPC_BASE_PATH": str(self.scratch), **also}
        options = self.context.options
        plan = self.context.plan
        index = self.context.index
        rundir = self.context.rundir
        self.code = KeptCode(options, rundir, "engine", (node,), base, self.scratch, self.keeps_code)
        base |= self.code.variables
        for line in overruled(gpu_wishes(options, plan, index, self.found, node), base):
            say(line)
        command = [
            sys.executable,
            "-m",
            SERVER,
            str(rundir.root),
            "--attempt",
            str(rundir.attempt),
            "--index",
            str(index),
            "--incarnation",
            str(self.context.incarnation),
        ]
        self.child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=fds,
            env=server_environment(options, plan, index, base, self.found, node),
        )
        assert self.child.stdout is not None
        self.log = ServerLog(self.child.stdout)

    def _bind(self) -> socket.socket:
        try:
            return bound_socket(self.place.at, 0)
        except OSError as error:
            raise UsageError(
                f"{self.name} cannot bind a port of its host: {error}", "is this the host that the plan names?"
            ) from error

    def wait_until_up(self) -> None:
        """Return when /health answers 200.

        Raises:
            DeadlineError: after --engine-start-timeout.
        """
        limit = self.context.options.engine_start_timeout
        end = Deadline(limit)
        while not self.stopped.is_set():
            self._check_child()
            if status(self.address) == 200:
                return
            if end.over:
                last = self.log.last_line()
                raise DeadlineError(
                    f"{self.name} did not answer within --engine-start-timeout {limit:.0f} s; its last output: {last}",
                    "raise the limit, or see its log",
                )
            self.stopped.wait(0.1)

    def publish(self) -> None:
        """Tell the run where the engine is and what it can do."""
        model = request_json(self.address, "GET", "/v1/models", 60)["data"][0]
        peer = EnginePeer(
            host=self.address.host,
            port=self.address.port,
            model_len=model["max_model_len"],
            incarnation=self.context.incarnation,
        )
        self.shared |= leftovers(descendants())
        self.made.name(self.shared)  # for the process that cleans up after a supervisor that was killed
        self._keep_code(compiled=True)
        if self.context.options.takes_turns:  # the trainer is to find the GPUs free
            for event in (Event.UP, Event.SLEEP):
                request_json(self.address, "POST", TURN, self.context.options.update_timeout, {"event": event})
        publish(self.context.rundir, peer, self.context.index)
        version = request_json(self.address, "GET", "/version", 60)["version"]
        say(f"{self.name} is up: vLLM {version}, weights by {self.backend}, {peer}")

    def _keep_code(self, compiled: bool = False) -> None:
        """Have what is compiled packed, by one engine of all.

        Args:
            compiled: whether the start has compiled all that it does.
        """
        if self.code and not self.context.index:
            self.code.watch(compiled)

    def watch(self) -> None:
        """Return when told to stop.

        Raises:
            PeerError: as soon as the server has died, answers no more, or its engine core does not.
        """
        silent_since = None
        patience = self.context.options.rollout_health_check_timeout
        pulse = CoreWatchdog(self.address, patience)
        while not self.stopped.wait(POLL):
            self._check_child()
            health = status(self.address)
            now = time.monotonic()
            if health == 200:
                silent_since = None
                self.log.note_health()
                if pulse.late:
                    raise PeerError(
                        f"{self.name} hangs: its engine core has been busy with {pulse.late} (--update-timeout); "
                        f"{self.log.explain()}"
                    )
                if pulse.sign.silence > patience:
                    raise PeerError(
                        f"{self.name} hangs: its engine core has not answered for {patience:.0f} s "
                        f"(--rollout-health-check-timeout); {self.log.explain()}"
                    )
                continue
            silent_since = silent_since or now
            if health >= REFUSED:
                raise PeerError(
                    f"{self.name} has died: {HEALTH} answers {health or 'no more'}; "
                    f"{self.memory.describe_kills() or self.log.explain()}"
                )
            if now - silent_since > patience:
                raise PeerError(
                    f"{self.name} hangs: it has not answered {HEALTH} for {patience:.0f} s; {self.log.explain()}"
                )

    def _check_child(self) -> None:
        assert self.child is not None
        if self.stopped.is_set():
            return
        if (code := self.child.poll()) is None:
            self._check_standing()
            return
        self.died = code not in TOLD
        self.log.finish(2)
        raise PeerError(f"{self.name}: its vLLM server {how_it_ended(code, self.memory)}; {self.log.explain()}")

    def _check_standing(self) -> None:
        """Raise PeerError if something of the server has been stopped for too long, which matters above all while it
        starts: no route answers then, for as long as a large model takes.
        """
        pid, seconds = self.standing.longest() or (0, 0.0)
        if seconds > (patience := self.context.options.rollout_health_check_timeout):
            raise PeerError(
                f"{self.name} hangs: its process {pid} has been stopped for {patience:.0f} s "
                "(--rollout-health-check-timeout)"
            )

    def end(self) -> None:
        """End the server and all that it started, and remove what it left on this host."""
        if self.code and self.stopped.is_set():
            self.code.end()
        self.shared |= leftovers(descendants())
        if self.child is not None:
            end_processes(
                [psutil.Process(self.child.pid)] if self.child.poll() is None else [], GRACE
            )  # it ends its own in order
        end_descendants(1.0)
        for path in self.shared:
            path.unlink(missing_ok=True)
        self.made.remove()
        if self.code and self.stopped.is_set():
            self.code.finish()
        elif self.code and self.died and not was_up(self.context.rundir, self.context.index, self.context.incarnation):
            self.code.discard()


def run(context: RoleContext) -> None:
    """The engine of this role."""
    if context.index >= len(context.plan.engines):
        raise HpcrlError(f"the plan has {len(context.plan.engines)} engines, none with index {context.index}")
    timeline = role_timeline(context.rundir, "engine", context.index, context.plan.engines[context.index].host)
    supervise(context, EngineSupervisor(context), timeline)


def supervise(context: RoleContext, engine: EngineSupervisor, timeline: Timeline) -> None:
    """Start an engine, or a part of one, and watch it until SIGTERM."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: engine.stopped.set())
    try:
        engine.start()
        engine.wait_until_up()
        if not engine.stopped.is_set():
            engine.publish()
            timeline.started()
            engine.watch()
    except HpcrlError as error:
        record(context, str(error))  # at once: ending a broken server takes seconds
        raise
    finally:
        engine.end()


def record(context: RoleContext, why: str) -> None:
    """Record why this incarnation of the engine ends, and whether another one is to follow.

    Of an engine that another attempt has taken over, the process of its host does that.
    """
    rundir = context.rundir
    if rundir.superseded():
        return
    index = context.index
    incarnation = context.incarnation
    limit = limit_after(why, restart_limit(context.options, context.plan), context.options.oom_retries, rundir)
    host = context.plan.engines[index].host if index < len(context.plan.engines) else "?"
    first = read_carried(rundir).begin.get(index, 0)
    record_end(rundir, index, host, incarnation, limit, was_up(rundir, index, incarnation), why, first)


def main() -> int:
    die_with_parent()
    adopt_orphans()
    context = open_role()
    return act("engine", context, context.index, lambda: run(context), record=lambda why: record(context, why))


if __name__ == "__main__":
    sys.exit(main())
