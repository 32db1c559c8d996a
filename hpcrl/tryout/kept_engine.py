"""An engine that stays up from one `hpcrl try` to the next, and ends by itself when it is not used.

    FOLDER/engine-HASH/keys/     its keys, as those of `hpcrl engines serve`
    FOLDER/engine-HASH/address   HOST:PORT, once it answers; made new at every start
    FOLDER/engine-HASH/used      touched at every use: the engine ends once that is IDLE seconds ago
    FOLDER/engine-HASH/log

HASH is of this host and of whatever the engine is started with, so other settings are another engine.

Invariants: it listens on the loopback of this machine; only the user's own processes have its key; of two that want it
at once one starts it, and the other waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrl.config.options import Options
from hpcrl.config.rules.layout import split_address
from hpcrl.engines.http import HEALTH_SECONDS, Address, ask, realm_of, status
from hpcrl.engines.served import IDLE_SECONDS, USED_FILE, note_use
from hpcrl.errors import DeadlineError, HpcrlError, Interrupted
from hpcrl.launch.engines.standalone import PROGRAM, prepare
from hpcrl.queue.auth import HTTP_KEY, key_of_engine
from hpcrl.run.role import last_error
from hpcrl.run.rundir import write_atomic
from hpcrl.toolbox.deadline import Deadline, poll
from hpcrl.toolbox.signs import LastSign
from hpcrl.tryout.alone import alone
from hpcrl.untrusted_files import open_append, read_regular, read_system

HERE = "127.0.0.1"
IDLE = 600.0  #: seconds without use after which it ends
POLL = 0.2
USE_EVERY = 30.0  #: seconds between two notes that it is in use
AGAIN = 30.0  #: seconds between two words that it is waited for
#: what of the options an engine depends on
_SETTINGS = ("hf_checkpoint", "bf16", "vllm", "rollout_max_context_len", "rollout_num_gpus_per_engine", "seed")


@dataclass(frozen=True)
class KeptEngine:
    """An engine that answers.

    Attributes:
        listen: HOST:PORT.
        keys: directory of its keys.
    """

    listen: str
    keys: Path

    def use(self) -> None:
        """Say that it is in use."""
        note_use(self.keys.parent / "used")

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """It is in use for as long as this context is entered."""
        over = threading.Event()

        def keep() -> None:
            self.use()
            while not over.wait(USE_EVERY):
                self.use()

        thread = threading.Thread(target=keep, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(HEALTH_SECONDS)

    def address(self) -> Address:
        """Where it answers, with the key of this time.

        Raises:
            HpcrlError: if what listens there names no key.
        """
        return address_of(self.listen, self.keys)


def address_of(listen: str, keys: Path) -> Address:
    """The address of a served engine, with the key that its realm and the directory of its keys make."""
    host, port = split_address(listen)
    if host == HERE and not _ours(port):
        raise HpcrlError(f"another user listens at {listen}", "try again")
    _, realm = asyncio.run(realm_of(Address(host, port, "")))
    if not realm:
        raise HpcrlError(f"no engine of hpcrl answers at {listen}", "it may just have ended: try again")
    lent = key_of_engine(read_regular(keys / HTTP_KEY).strip(), listen).encode()
    return Address(host, port, key_of_engine(lent, realm))


def at_hand(options: Options, folder: Path) -> KeptEngine:
    """The engine for these options: the one that is up, or else a new one, once it answers.

    Raises:
        HpcrlError: if it does not come up.
    """
    place = folder / f"engine-{_hash(options)}"
    place.mkdir(mode=0o700, exist_ok=True)
    with alone(place, options.engine_start_timeout):
        listen = _up(place)
        if listen is None:
            listen = _start(options, place)
        engine = KeptEngine(listen, place / "keys")
        engine.use()
        return engine


def _hash(options: Options) -> str:
    plain = options.model_dump(mode="json")
    settings = [socket.gethostname(), *(f"{name}={plain[name]}" for name in _SETTINGS)]
    settings.append(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    settings += [f"{path.name} {(seen := path.stat()).st_size} {seen.st_mtime_ns}" for path in _files(plain)]
    return hashlib.sha256("\0".join(settings).encode()).hexdigest()[:12]


def _files(plain: Mapping[str, Any]) -> list[Path]:
    """What the model's directory holds: another content is another engine."""
    folder = Path(plain["hf_checkpoint"])
    return sorted([*folder.glob("*.json"), *folder.glob("*.safetensors")])


def _ours(port: int) -> bool:
    """Whether what listens at this port of the loopback is a process of this user (proc(5), /proc/net/tcp); so it
    counts where that cannot be told."""
    try:
        lines = read_system("/proc/net/tcp").splitlines()[1:]
    except OSError:
        return True
    fields = [line.split() for line in lines]
    owners = {row[7] for row in fields if row[3] == "0A" and row[1] == f"0100007F:{port:04X}"}
    return not owners or owners == {str(os.getuid())}


def _up(place: Path) -> str | None:
    """Where it answers, if it does."""
    try:
        listen = read_regular(place / "address").decode()
        return listen if status(address_of(listen, place / "keys")) == 200 else None
    except (OSError, HpcrlError, UnicodeDecodeError):
        return None


def _start(options: Options, place: Path) -> str:
    with socket.create_server((HERE, 0)) as free:
        listen = f"{HERE}:{free.getsockname()[1]}"
    rundir = prepare(options, listen, place / "keys")
    note_use(place / "used")
    environment = os.environ | {USED_FILE: str(place / "used"), IDLE_SECONDS: f"{IDLE:g}"}
    print(f"hpcrl: starting an engine; it ends {IDLE / 60:.0f} minutes after its last use", file=sys.stderr, flush=True)
    (place / "log").unlink(missing_ok=True)
    with open_append(place / "log") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", PROGRAM, str(rundir.root), "--attempt", "0"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
    try:
        _wait_until_up(process, listen, place, options.engine_start_timeout)
        where = address_of(listen, place / "keys")
        ask(
            where, "POST", "/update_weight_version", options.update_timeout, {"new_version": "0"}
        )  # as a run names them
    except BaseException as error:  # Ctrl-C as well: it is not to stay up unused
        process.terminate()
        if isinstance(error, KeyboardInterrupt):
            raise Interrupted("interrupted: the engine that was starting is ended") from None
        raise
    write_atomic(place / "address", listen.encode())
    return listen


def _wait_until_up(process: subprocess.Popen[bytes], listen: str, place: Path, seconds: float) -> None:
    """Until it answers.

    Raises:
        HpcrlError: with its own last word if it ends, DeadlineError if it takes longer than --engine-start-timeout.
    """
    log, told = place / "log", LastSign()

    def answers() -> bool:
        note_use(place / "used")
        if process.poll() is not None:
            said = last_error(read_regular(log).splitlines())
            raise HpcrlError(f"the engine has ended{f': {said}' if said else ''}", f"see {log}")
        if told.due(AGAIN):
            print(f"hpcrl: still waiting for the engine; log: {log}", file=sys.stderr, flush=True)
        with contextlib.suppress(HpcrlError):
            return status(address_of(listen, place / "keys")) == 200
        return False

    if not poll(answers, Deadline(seconds), POLL):
        raise DeadlineError(f"the engine did not answer within --engine-start-timeout {seconds:.0f} s", f"see {log}")
