"""Engines that a user has for himself: one that is kept from one use to the next ends once its file has not been
touched for a while; one that is served to other programs leaves its key in a file.

Invariants: both sides set and read the file's time by the clock of their host, which is the same; a key is in no
command line, environment variable or log.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import shlex
import time
from pathlib import Path

from hpcrl.run.rundir import write_atomic
from hpcrl.untrusted_files import touch

#: environment variables of such an engine: its file, and how many seconds it may go unused
USED_FILE = "HPCRL_ENGINE_USED_FILE"
IDLE_SECONDS = "HPCRL_ENGINE_IDLE_SECONDS"
#: where the key goes of one that is served to programs that speak OpenAI's protocol
KEY_TO = "HPCRL_ENGINE_KEY_TO"
OURS = (USED_FILE, IDLE_SECONDS, KEY_TO)


def note_use(path: Path) -> None:
    """It is used now."""
    touch(path)
    now = time.time()
    os.utime(path, (now, now))


def unused(environment: os._Environ[str] = os.environ) -> bool:
    """Whether this engine is such a one, and has not been used for too long; so is one whose file is gone."""
    path, seconds = environment.get(USED_FILE), environment.get(IDLE_SECONDS)
    if path is None or seconds is None:
        return False
    with contextlib.suppress(OSError):
        return time.time() - Path(path).stat().st_mtime > float(seconds)
    return True


def program_key(key: str) -> str:
    """The key for programs that speak OpenAI's protocol, of an engine's own key: it opens those routes alone."""
    return hmac.new(key.encode(), b"openai", hashlib.sha256).hexdigest()


def show_key(key: str, url: str, environment: os._Environ[str] = os.environ) -> str:
    """What a user types to ask this engine, once its key for programs is in the file that is wanted; "" if none is."""
    path = environment.get(KEY_TO)
    if path is None:
        return ""
    write_atomic(Path(path), program_key(key).encode())
    return f"export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY=$(cat {shlex.quote(path)})"
