"""Who may speak to the rollout queue, to engines and to nodes with sandboxes, and how both sides prove who they are.

    RUN/keys/queue-server.json       the server's CURVE key pair, and the public key of every client
    RUN/keys/queue-client-R.json     key pair of data-parallel rank R, and the server's public key
    RUN/keys/http.key                what the key of every engine and of every node with sandboxes is made from
    RUN/keys/engine-I.key            what the key of an engine is made from that this run has not started

Invariants: keys are made for every attempt, end with it (but what engines' keys are made from, where engines continue
from one attempt to the next), and are in a directory of mode 0700, in files of mode 0600; each process reads one file;
the server admits the clients of this attempt and no others (a ZAP allow-list, ZeroMQ RFC 27), a client speaks to the
holder of the server's secret key and to no other (CurveZMQ, RFC 26); who is not refused has a rank, and that rank comes
from the key it holds, never from what it says.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils import z85

from hpcrl.errors import HpcrlError
from hpcrl.run.peers import EnginePeer, peer_file, read_published
from hpcrl.run.rundir import RunDir, write_atomic, write_first, write_unread
from hpcrl.utils.untrusted_files import read_regular
from hpcrl.utils.waiting import Deadline, Pauses, poll

ZAP_DOMAIN = b"hpcrl.transport"
HTTP_KEY = "http.key"
_SERVER = "queue-server.json"
PUBLISHED = 30.0  #: seconds until what is published on one host is on every other
MAX_REFUSALS = 100  #: peers without a key that are logged
_USER = "dp-"


class ServerKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the queue server needs: keys are Z85 text of 40 characters; clients[r] is rank r's public key."""

    public: str
    secret: str
    clients: tuple[str, ...]

    def __repr__(self) -> str:
        return f"ServerKeys({self.public})"


class ClientKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the client of one data-parallel rank needs.

    Attributes:
        server: the server's public key.
    """

    public: str
    secret: str
    server: str

    def __repr__(self) -> str:
        return f"ClientKeys({self.public})"


Keys = TypeVar("Keys", ServerKeys, ClientKeys)

# ---- key files


def make_keys(rundir: RunDir, dp_size: int, engines_continue: bool = False) -> None:
    """New keys for an attempt: of the queue's server and its `dp_size` clients, and of the engines.

    Args:
        engines_continue: the engines have theirs, from the attempt before.
    """
    rundir.keys.mkdir(mode=0o700, exist_ok=True)
    rundir.keys.chmod(0o700)
    for old in (*rundir.keys.glob("*-*.json"), *rundir.keys.glob("engine-*.key")):
        old.unlink()
    server, *clients = [tuple(key.decode() for key in zmq.curve_keypair()) for _ in range(1 + dp_size)]
    keys = ServerKeys(*server, tuple(public for public, _ in clients))
    write_unread(rundir.keys / _SERVER, msgspec.json.encode(keys))
    for rank, client in enumerate(clients):
        write_unread(_client_file(rundir.keys, rank), msgspec.json.encode(ClientKeys(*client, server[0])))
    if not engines_continue:
        write_atomic(rundir.keys / HTTP_KEY, secrets.token_hex(32).encode())


def forget_keys(rundir: RunDir) -> None:
    """Remove the keys of an attempt whose processes have ended, as far as that can be done."""
    with contextlib.suppress(OSError):
        for path in rundir.keys.iterdir():
            path.unlink(missing_ok=True)


# ---- keys of engines that a run has not started


def make_engine_keys(folder: Path) -> None:
    """The key of engines that serve one run after another, unless `folder` has it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    write_first(folder / HTTP_KEY, secrets.token_hex(32).encode())  # several may be served at once
    (folder / HTTP_KEY).chmod(0o600)


def lend_keys(folder: Path, address: str, to: Path) -> None:
    """Put what the engine at `address` (HOST:PORT) needs of these keys into the directory `to`."""
    write_atomic(to / HTTP_KEY, key_of_engine(_read(folder / HTTP_KEY).strip(), address).encode())


def borrow_keys(rundir: RunDir, folder: Path, addresses: Iterable[str], first: int) -> None:
    """Make the run one that the engines at `addresses` answer; `first` is the number of the first.

    Raises:
        HpcrlError: names what is missing.
    """
    for index, address in enumerate(addresses, first):
        own = key_of_engine(_read(folder / HTTP_KEY).strip(), address).encode()
        write_atomic(_borrowed_file(rundir, index), own)


def http_key(rundir: RunDir, index: int, incarnation: int = 0) -> str:
    """The key of the HTTP routes of an engine in one of its incarnations, hexadecimal.

    A process that listens on the port of one that is gone, and is sent its key, has the key of no other.

    Raises:
        HpcrlError: if there is no key, or an engine that the run has not started has not been found yet.
    """
    if not _borrowed_file(rundir, index).exists():
        return key_of_engine(_read(rundir.keys / HTTP_KEY).strip(), f"{index}.{incarnation}")
    peer = poll(
        lambda: read_published(peer_file(rundir.here, EnginePeer, index, incarnation), EnginePeer),
        Deadline(PUBLISHED),
        iter(Pauses(0.05, 1.0, growth=1.2)),
    )
    if peer is None:
        raise HpcrlError(f"engine-{index} was not published within {PUBLISHED:.0f} s", f"see {rundir.here / 'peers'}")
    return borrowed_key(rundir, index, peer.key_name)


def borrowed_key(rundir: RunDir, index: int, realm: str) -> str:
    """The key of an engine that the run has not started, which named this realm when it was asked without a key."""
    return key_of_engine(_read(_borrowed_file(rundir, index)), realm)


def key_of_engine(key: bytes, engine: str) -> str:
    """HMAC-SHA256 (RFC 2104) of an engine's name under a key, hexadecimal.

    Args:
        engine: INDEX.INCARNATION of one of the run; of another its address, then its realm, under that.  Of a node with
            sandboxes it has another form.
    """
    return hmac.new(key, b"hpcrl engine " + engine.encode(), hashlib.sha256).hexdigest()


def sandbox_key(rundir: RunDir, index: int, incarnation: int) -> str:
    """The key of a node with sandboxes in one of its incarnations, hexadecimal."""
    return key_of_engine(_read(rundir.keys / HTTP_KEY).strip(), f"sandboxes {rundir.attempt}.{index}.{incarnation}")


def server_keys(rundir: RunDir) -> ServerKeys:
    """The keys of the queue's server."""
    return _load(rundir.keys / _SERVER, ServerKeys)


def client_keys(rundir: RunDir, rank: int) -> ClientKeys:
    """The keys of a data-parallel rank."""
    return _load(_client_file(rundir.keys, rank), ClientKeys)


def _borrowed_file(rundir: RunDir, index: int) -> Path:
    return rundir.keys / f"engine-{index}.key"


def _client_file(folder: Path, rank: int) -> Path:
    return folder / f"queue-client-{rank}.json"


def _load(path: Path, kind: type[Keys]) -> Keys:
    try:
        return msgspec.json.decode(_read(path), type=kind)
    except msgspec.DecodeError as error:
        raise HpcrlError(f"key file {path} is damaged: {error}", "start the attempt again") from error


def _read(path: Path) -> bytes:
    try:
        return read_regular(path)
    except OSError as error:
        raise HpcrlError(
            f"cannot read key file {path}: {error.strerror}", "the keys are made by hpcrl when an attempt starts"
        ) from error


# ---- sockets


def lock_server(socket: zmq.Socket, keys: ServerKeys) -> None:
    """Make `socket` a CURVE server that admits only clients that a ZAP handler admits."""
    socket.curve_server = True
    socket.curve_publickey = keys.public.encode()
    socket.curve_secretkey = keys.secret.encode()
    # with the domain enforced, libzmq refuses everybody when there is no handler; by default it would admit everybody
    socket.zap_domain = ZAP_DOMAIN
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def lock_client(socket: zmq.Socket, keys: ClientKeys) -> None:
    """Make `socket` a CURVE client that speaks only to the holder of the server's secret key."""
    socket.curve_publickey = keys.public.encode()
    socket.curve_secretkey = keys.secret.encode()
    socket.curve_serverkey = keys.server.encode()


def rank_of(frame: zmq.Frame) -> int:
    """The data-parallel rank whose key the connection that brought `frame` proved to hold."""
    return int(str(frame.get("User-Id")).removeprefix(_USER))


class CurveAuthenticator(AsyncioAuthenticator):
    """Answers libzmq's question, for every connection to the sockets of `context`, whether it may come in.

    pyzmq serves the question (ZAP) in the running event loop, from now until `stop`; which keys are admitted, and that
    no client is without one, is said here.
    """

    def __init__(self, context: zmq.asyncio.Context, keys: ServerKeys, say: Callable[[str], None]) -> None:
        super().__init__(context)
        self._ranks = {key.encode(): rank for rank, key in enumerate(keys.clients)}
        self._say = say
        self._address = "?"
        self._refused = 0
        self.configure_curve_callback(ZAP_DOMAIN.decode(), self)
        self.start()

    async def handle_zap_message(self, msg: list[bytes]) -> None:
        """Answer one request: status 200 and the user id `dp-R` for the key of rank R, else status 400."""
        if len(msg) == 7 and msg[5] == b"CURVE" and len(msg[6]) == 32:
            self._address = msg[3].decode(errors="replace")
            await super().handle_zap_message(msg)
        else:  # pyzmq admits a peer that needs no key (NULL, GSSAPI), and calls it anonymous
            self._send_zap_reply(msg[1] if len(msg) > 1 else b"", b"400", b"no key of this attempt")

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the peer that proved to hold `key` (Z85) may come in: pyzmq asks it of a credentials provider."""
        known = key in self._ranks
        self._refused += not known
        if not known and self._refused <= MAX_REFUSALS:
            last = "; more like it are not logged" if self._refused == MAX_REFUSALS else ""
            self._say(f"queue: refused a peer at {self._address}: it holds no key of this attempt{last}")
        return known

    def curve_user_id(self, client_public_key: bytes) -> str:
        """What messages of the peer that was let in bear as its user id; its key comes as 32 bytes."""
        return f"{_USER}{self._ranks[z85.encode(client_public_key)]}"
