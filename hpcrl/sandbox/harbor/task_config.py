"""task.toml, as far as it says how a task is run; see Harbor's documentation of tasks for what each key means.

Invariant: a key that would change how a task runs is either done here or refused by name; what describes the task
([task], [metadata], [solution], cpus, build_timeout_sec) is passed over.
"""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcrl.errors import DataError
from hpcrl.sandbox import BoxLimits
from hpcrl.utils.untrusted_files import Damaged, parse_toml, read_given

VERDICT_SECONDS = 600.0  #: Harbor's own, where [verifier] says none
_VERSIONS = re.compile(r"1(\.\d+)?")
_TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([GMK])")
_UNITS = {"G": 1 << 30, "M": 1 << 20, "K": 1 << 10}
#: sections -> the keys that are done here; then those that say nothing of how a task runs here
_DONE = {
    "": {"schema_version", "version", "verifier", "agent", "environment", "artifacts"},
    "agent": {"timeout_sec", "user", "network_mode"},
    "verifier": {"timeout_sec", "env", "user", "network_mode", "environment_mode"},
    "environment": {
        *("docker_image", "os", "memory_mb", "memory", "storage_mb", "storage", "env", "workdir"),
        *("network_mode", "allow_internet", "gpus"),
    },
}
_PASSED_OVER = {"": {"task", "metadata", "solution", "source"}, "environment": {"cpus", "build_timeout_sec"}}
_NO_NETWORK = "a sandbox has no network: take the line out if the task can do without"
_HINTS = {
    "steps": "tasks of several steps are not run; make a task of each",
    "gpus": "a sandbox has no GPU",
    "tpu": "a sandbox has no TPU",
    "mcp_servers": "no server is started for the policy; give it what it needs as programs of the image",
    "allowed_hosts": _NO_NETWORK,
    "healthcheck": "no service is started in a sandbox; start it in tests/test.sh",
}
#: never carried over to where the verdict is made, nor a working directory
_KEPT = ("/tests", "/logs/verifier", "/proc", "/dev", "/sys", "/solution")


@dataclass(frozen=True)
class HarborConfig:
    """What a task.toml says.

    Attributes:
        agent_seconds: that the policy's commands may take together; None: no limit.
        verdict_seconds: that tests/test.sh may take.
        image: `docker_image`, or "".
        workdir: an absolute path, or "".
        env, verdict_env: variables of the policy's commands, and of tests/test.sh in addition.
        artifacts: absolute paths, or relative to the working directory, whose content the verdict is made of.
        separate: of these alone: the working directory is not carried over.
    """

    agent_seconds: float | None = None
    verdict_seconds: float = VERDICT_SECONDS
    image: str = ""
    workdir: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    verdict_env: Mapping[str, str] = field(default_factory=dict)
    artifacts: tuple[str, ...] = ()
    separate: bool = False
    limits: BoxLimits = field(default_factory=BoxLimits)


def read_config(path: Path) -> HarborConfig:
    """What the task.toml at `path` says.

    Raises:
        DataError: if it is none, or asks for something that is not done here.
    """
    try:
        found = parse_toml(read_given(path))
    except (OSError, UnicodeDecodeError, Damaged, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    return _Reader(path, found).config()


class _Reader:
    """Reads one file's tables, and names file and key in every error."""

    def __init__(self, path: Path, found: dict[str, Any]) -> None:
        self._path = path
        self._tables = {name: found.get(name, {}) for name in ("agent", "verifier", "environment")}
        self._top = found
        for name, table in self._tables.items():
            if not isinstance(table, dict):
                self._refuse(f"[{name}]", "give a table")

    def config(self) -> HarborConfig:
        for name, table in {"": self._top, **self._tables}.items():
            self._known(name, table)
        environment, verifier = self._tables["environment"], self._tables["verifier"]
        agent = self._number("agent", "timeout_sec")
        mode = verifier.get("environment_mode")
        if mode not in (None, "separate"):
            self._refuse(
                f"[verifier] environment_mode = {mode!r}",
                "the verdict is made in a box in which the policy has run nothing: leave the line out, the working "
                "directory and the artifacts are carried over to there",
            )
        return HarborConfig(
            agent_seconds=agent,
            verdict_seconds=self._number("verifier", "timeout_sec") or VERDICT_SECONDS,
            image=self._text(environment, "docker_image"),
            workdir=self._workdir(environment),
            env=self._env("environment"),
            verdict_env=self._env("verifier"),
            artifacts=tuple(map(self._artifact, self._list("artifacts"))),
            separate=mode == "separate",
            limits=self._limits(agent),
        )

    def _refuse(self, what: str, hint: str) -> None:
        raise DataError(f"{self._path}: {what} is not done here", hint)

    def _known(self, name: str, table: dict[str, Any]) -> None:
        """Refuse keys that are not done here, and values of those that are."""
        shown = f"[{name}] " if name else ""
        for key, value in table.items():
            empty = value in (None, [], {}, 0) and not isinstance(value, bool)
            if (key in _DONE[name] and not (key == "gpus" and value)) or key in _PASSED_OVER.get(name, ()) or empty:
                continue
            self._refuse(f"{shown}{key}", _HINTS.get(key, "take it out, or leave this task out"))
        if name == "" and not _VERSIONS.fullmatch(str(table.get("schema_version", table.get("version", "1.0")))):
            self._refuse("this schema_version", "1.0 to 1.4 are read")
        if table.get("user", "root") not in ("root", 0, "0"):
            self._refuse(f"{shown}user = {table['user']!r}", "a sandbox has one user; take it out")
        if table.get("network_mode", "no-network") != "no-network" or table.get("allow_internet"):
            self._refuse(f"{shown}a network", _NO_NETWORK)
        if str(table.get("os", "linux")).lower() != "linux":
            self._refuse(f"{shown}os = {table['os']!r}", "leave this task out")

    def _number(self, name: str, key: str) -> float | None:
        value = self._tables[name].get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise DataError(f"{self._path}: [{name}] {key} = {value!r} is no positive number")
        return float(value)

    def _text(self, table: dict[str, Any], key: str) -> str:
        value = table.get(key) or ""
        if not isinstance(value, str):
            raise DataError(f"{self._path}: {key} = {value!r} is no text")
        return value

    def _list(self, key: str) -> list[Any]:
        value = self._top.get(key, [])
        if not isinstance(value, list):
            raise DataError(f"{self._path}: {key} = {value!r} is no list")
        return value

    def _workdir(self, environment: dict[str, Any]) -> str:
        found = self._text(environment, "workdir")
        if found and (not found.startswith("/") or not carriable(found)):
            raise DataError(
                f"{self._path}: the working directory {found!r}", "name a directory of the task's own, such as /app"
            )
        return absolute(found) if found else ""

    def _artifact(self, value: Any) -> str:
        """A path, or a table with one; where else it is to go is of no account here."""
        source = value.get("source") if isinstance(value, dict) else value
        more = set(value) - {"source", "destination", "service"} if isinstance(value, dict) else set()
        if more or (isinstance(value, dict) and value.get("service") not in (None, "main")):
            self._refuse(f"the artifact {value!r}", "give its path alone")
        if not isinstance(source, str) or not source or not carriable(posixpath.join("/app", source)):
            raise DataError(f"{self._path}: the artifact {source!r}", "name a file or directory of the task's own")
        return source

    def _env(self, name: str) -> dict[str, str]:
        """Variables; `${NAME:-default}` is its default, for nothing of the run's environment is shown to a task."""
        table = self._tables[name].get("env", {})
        found = {}
        for key, value in table.items() if isinstance(table, dict) else [("env", None)]:
            if not isinstance(value, str) or "=" in key or "\0" in key + value:
                raise DataError(f"{self._path}: [{name}] env {key} = {value!r} is no text")
            template = _TEMPLATE.fullmatch(value)
            if template and template[2] is None:
                self._refuse(
                    f"[{name}] env {key} = {value!r}",
                    "no variable of the run's environment is shown to a task: write its value, or ${NAME:-value}",
                )
            found[key] = template[2] if template else value
        return found

    def _limits(self, agent: float | None) -> BoxLimits:
        """A box's limits: storage is memory here, so it is half of the memory at most."""
        usual = BoxLimits()
        memory = self._size("memory") or usual.memory
        disk = min(self._size("storage") or usual.disk, memory // 2)
        cpu = math.ceil(max(usual.cpu, agent or 0, self._number("verifier", "timeout_sec") or VERDICT_SECONDS))
        return BoxLimits(memory=memory, disk=disk, cpu=cpu, output=1 << 16, inodes=1 << 17)

    def _size(self, name: str) -> int:
        """Bytes: of `NAME_mb`, or of the older `NAME`, such as "2G"; 0 if neither is there."""
        table = self._tables["environment"]
        found = table.get(f"{name}_mb")
        if found is None and (old := table.get(name)) is not None:
            match = _SIZE.fullmatch(str(old).strip().upper())
            found = float(match[1]) * _UNITS[match[2]] / (1 << 20) if match else math.nan
        if found is None:
            return 0
        if isinstance(found, bool) or not isinstance(found, int | float) or not 64 <= found < 1 << 22:
            raise DataError(f"{self._path}: [environment] {name} is no size", "give 64 MB or more")
        return int(found * (1 << 20))


def absolute(path: str, base: str = "/") -> str:
    """A path inside a box in its one form: with one slash at its beginning, without . and .."""
    return "/" + posixpath.normpath(posixpath.join(base, path)).lstrip("/")


def carriable(path: str) -> bool:
    """Whether a directory of a box may be carried over to where the verdict is made: nothing of the system's, nor what
    the verdict itself is made with."""
    if not path.startswith("/"):
        return False
    path = absolute(path)
    inside = any(path == kept or path.startswith(f"{kept}/") for kept in _KEPT)
    system = path.split("/")[1:2] in ([name] for name in ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32"))
    return path not in ("/", "/etc", "/logs", "/tmp", "/var") and not inside and not system
