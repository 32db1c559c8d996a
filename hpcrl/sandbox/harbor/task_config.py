"""task.toml as a model; see Harbor's documentation of tasks for what each key means.

Invariant: a key that would change how a task runs is either done here or refused by name; what describes the task
(`Any` below) is passed over.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from hpcrl.errors import DataError
from hpcrl.sandbox import BoxLimits
from hpcrl.utils.untrusted_files import Damaged, parse_toml, read_given

_TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([GMK])")
_MEGABYTES = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}

Seconds = Annotated[float, Meta(gt=0, lt=1e9)]
Megabytes = Annotated[float, Meta(ge=64, lt=1 << 22)]
User = Literal["root", "0", 0]
Version = Annotated[str, Meta(pattern=r"^1(\.\d+)?$")]
Variables = dict[Annotated[str, Meta(pattern=r"^[^=\0]+$")], Annotated[str, Meta(pattern=r"^[^\0]*$")]]


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the file; keys of another name are refused unless they are empty."""


class AgentTable(_Table, frozen=True):
    """[agent].

    Attributes:
        timeout_sec: that the policy's commands may take together; None: no limit.
    """

    timeout_sec: Seconds | None = None
    user: User = "root"
    network_mode: Literal["no-network"] = "no-network"


class _WithVariables(_Table, frozen=True):
    """A table with variables; `${NAME:-default}` is its default, for no variable of the run is shown to a task."""

    env: Variables = {}

    def __post_init__(self) -> None:
        found = {}
        for name, value in self.env.items():
            template = _TEMPLATE.fullmatch(value)
            if template and template[2] is None:
                raise ValueError(f"a task sees no variable of the run: write ${{NAME:-value}} for {value}")
            found[name] = template[2] if template else value
        msgspec.structs.force_setattr(self, "env", found)


class VerifierTable(_WithVariables, frozen=True):
    """[verifier].

    Attributes:
        timeout_sec: that tests/test.sh may take.
        env: variables of tests/test.sh, in addition to those of the policy's commands.
    """

    timeout_sec: Seconds = 600.0
    user: User = "root"
    network_mode: Literal["no-network"] = "no-network"
    environment_mode: Literal["shared"] = "shared"


class EnvironmentTable(_WithVariables, frozen=True):
    """[environment].

    Attributes:
        env: variables of every command.
    """

    docker_image: str = ""
    os: Literal["linux"] = "linux"
    memory_mb: Megabytes | None = None
    storage_mb: Megabytes | None = None
    workdir: Annotated[str, Meta(pattern="^/|^$")] = ""
    network_mode: Literal["no-network"] = "no-network"
    cpus: Any = None
    build_timeout_sec: Any = None


class TaskConfig(_Table, frozen=True):
    """What a task.toml says."""

    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    environment: EnvironmentTable = EnvironmentTable()
    task: dict[str, Any] = {}
    schema_version: Version = "1.0"
    version: Version = "1.0"
    metadata: Any = None
    solution: Any = None
    source: Any = None
    artifacts: Any = None

    @property
    def limits(self) -> BoxLimits:
        """A box's limits: storage is memory here, so it is half of the memory at most."""
        usual, environment = BoxLimits(), self.environment
        memory = int((environment.memory_mb or 0) * (1 << 20)) or usual.memory
        disk = min(int((environment.storage_mb or 0) * (1 << 20)) or usual.disk, memory // 2)
        cpu = math.ceil(max(usual.cpu, self.agent.timeout_sec or 0, self.verifier.timeout_sec))
        return BoxLimits(memory=memory, disk=disk, cpu=cpu, output=1 << 16, inodes=1 << 17)


def read_config(path: Path) -> TaskConfig:
    """What the task.toml at `path` says.

    Raises:
        DataError: if it is no task file, or asks for something that is not done here.
    """
    try:
        found = _without_empty(parse_toml(read_given(path)), TaskConfig)
    except (OSError, UnicodeDecodeError, Damaged, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    for name, kind in (("agent", AgentTable), ("verifier", VerifierTable), ("environment", EnvironmentTable)):
        if isinstance(table := found.get(name), dict):
            found[name] = _without_empty(table, kind)
    try:
        return msgspec.convert(found, TaskConfig)
    except msgspec.ValidationError as error:
        raise DataError(f"{path}: {error}", "remove it, or leave this task out: hpcrl does not support it") from error


def _without_empty(table: dict[str, Any], kind: type[_Table]) -> dict[str, Any]:
    """A table without unknown keys that ask for nothing; `memory = "2G"` of older versions is `memory_mb`."""
    known = dict(table)
    for name in ("memory", "storage") if kind is EnvironmentTable else ():
        if old := known.pop(name, None):
            match = _SIZE.fullmatch(str(old).strip().upper())
            known.setdefault(f"{name}_mb", float(match[1]) * _MEGABYTES[match[2]] if match else old)
    return {name: value for name, value in known.items() if value or name in kind.__struct_fields__}
