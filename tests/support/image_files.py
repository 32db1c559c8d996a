"""Image files for tests: layers and archives byte by byte from their public forms.

The forms: OCI image specification 1.1 (image-layout.md, manifest.md, config.md, layer.md), Docker image specification
1.2 (`docker save`: manifest.json).
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

PROGRAMS = ("sh", "cat", "ls")
MINE = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]


def entry(name: str, data: bytes = b"", **more: Any) -> tuple[tarfile.TarInfo, bytes]:
    """A member of a layer: a file, unless `type` says otherwise."""
    found = tarfile.TarInfo(name)
    found.size = len(data)
    found.mode = 0o644
    for attribute, value in more.items():
        setattr(found, attribute, value)
    return found, data


def folder(name: str, mode: int = 0o755) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, type=tarfile.DIRTYPE, mode=mode)


def link(name: str, target: str, hard: bool = False) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, type=tarfile.LNKTYPE if hard else tarfile.SYMTYPE, linkname=target)


def layer(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    """A layer, a tar archive."""
    made = io.BytesIO()
    with tarfile.TarFile(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for member, data in members:
            archive.addfile(member, io.BytesIO(data))
    return made.getvalue()


def programs() -> list[tuple[tarfile.TarInfo, bytes]]:
    """A shell and what it needs, from this machine."""
    found: dict[str, Path] = {}
    for name in PROGRAMS:
        source = Path(shutil.which(name) or "").resolve()
        found[f"bin/{name}"] = source
        listed = subprocess.run(["ldd", source], capture_output=True, text=True, timeout=60, check=True).stdout
        found |= {word[1:]: Path(word) for word in listed.split() if word.startswith("/")}
    return [entry(name, path.read_bytes(), mode=0o755) for name, path in found.items()]


def docker_archive(path: Path, layers: Sequence[bytes], config: dict[str, Any] | None = None, **damage: Any) -> Path:
    """What `docker save` writes of one image.

    Args:
        config: what it says of commands: Env, WorkingDir.
        damage: a member's name, and what takes its content's place.
    """
    described = _config(layers, config)
    parts = {f"{number}/layer.tar": data for number, data in enumerate(layers)}
    said = [{"Config": "config.json", "RepoTags": ["test:1"], "Layers": list(parts)}]
    parts |= {"config.json": described, "manifest.json": json.dumps(said).encode()}
    return archive_of(path, parts | damage)


def oci_parts(
    layers: Sequence[bytes], architecture: str = MINE, config: dict[str, Any] | None = None
) -> dict[str, bytes]:
    """An OCI layout's files, its layers compressed."""
    parts = {"oci-layout": b'{"imageLayoutVersion": "1.0.0"}'}

    def blob(data: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        parts[f"blobs/sha256/{digest}"] = data
        return {"digest": f"sha256:{digest}", "size": len(data)}

    packed = [blob(gzip.compress(data, mtime=0)) for data in layers]
    manifest = blob(
        json.dumps({"schemaVersion": 2, "config": blob(_config(layers, config)), "layers": packed}).encode()
    )
    inner = {"schemaVersion": 2, "manifests": [manifest | {"platform": {"architecture": architecture, "os": "linux"}}]}
    index = {"schemaVersion": 2, "manifests": [blob(json.dumps(inner).encode())]}
    return parts | {"index.json": json.dumps(index).encode()}


def oci_archive(path: Path, layers: Sequence[bytes], architecture: str = MINE) -> Path:
    return archive_of(path, oci_parts(layers, architecture))


def oci_layout(path: Path, layers: Sequence[bytes], config: dict[str, Any] | None = None) -> Path:
    for name, data in oci_parts(layers, config=config).items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


def _config(layers: Iterable[bytes], config: dict[str, Any] | None = None) -> bytes:
    digests = [f"sha256:{hashlib.sha256(data).hexdigest()}" for data in layers]
    said = {"architecture": MINE, "rootfs": {"type": "layers", "diff_ids": digests}}
    return json.dumps(said | ({} if config is None else {"config": config})).encode()


def archive_of(path: Path, parts: dict[str, bytes]) -> Path:
    path.write_bytes(layer(*(entry(name, data) for name, data in parts.items())))
    return path
