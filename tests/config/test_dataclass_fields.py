"""Fields read from source: the same as the imported classes would tell, without importing anything."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.config import dataclass_fields, passthrough
from hpcrl.config.dataclass_fields import read_fields
from hpcrl.config.value_types import Kind

SOURCES = {
    "__init__.py": "raise SystemExit('the package was imported')",
    "deep/__init__.py": "raise SystemExit('the package was imported')\nfrom .types import Color as Paint",
    "deep/types.py": """
from enum import Enum
from typing import Literal
class Color(Enum):
    _hidden = 0
    red = 1
    blue = 2
Inner = Literal["c"]
Letters: TypeAlias = Literal["a", "b", Inner]
class Base:
    inherited: float = 2.5
    '''Said once.'''
""",
    "deep/config.py": """
from dataclasses import dataclass, field
import torch
from typing import Callable, List, Literal, Optional, Tuple, Union
from . import Paint
from .types import Base, Letters
from ..nowhere import Missing
CONSTANT = 3
@dataclass
class Config:
    whole: int = 0
    '''A whole
       number.'''
    switch: bool = field(default=True, metadata={"argparse_meta": {"arg_names": ["--disable-it"]}})
    maybe: Optional[float] = None
    new_style: int | None = None
    either: Union[int, float] = 1
    open: Union[str, List[int]] = "a"
    many: Optional[List[str]] = None
    pair: Tuple[int, int] = (0, 0)
    choice: Literal["x", "y"] = "x"
    alias: Letters | None = None
    wide: Letters | str = "z"
    color: Paint = Paint.red
    quoted: "dict[str, Any] | None" = None
    dtype: torch.dtype = torch.float32
    call: Optional[Callable] = None
    unknown: Missing = None
    borrowed: float = Base.inherited
    got: float = get_field(Base, "inherited")
    _private: int = 1
    not_a_field = 3
    def method(self): pass
""",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name, text in SOURCES.items():
        file = tmp_path / "fakepackage" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield "fakepackage"
    for cached in (dataclass_fields.locate, dataclass_fields._module, read_fields):
        cached.cache_clear()


def test_kinds_through_aliases_and_imports(package: str) -> None:
    """Types are read from annotations through aliases and imports."""
    fields = read_fields(f"{package}.deep.config", "Config")
    assert fields is not None
    assert {name: setting.kind for name, setting in fields.items()} == {
        "whole": Kind("int"),
        "switch": Kind("bool"),
        "maybe": Kind("float", optional=True),
        "new_style": Kind("int", optional=True),
        "either": Kind("float"),
        "open": Kind("any"),
        "many": Kind("str", many=True, optional=True),
        "pair": Kind("int", many=True),
        "choice": Kind("str", choices=("x", "y")),
        "alias": Kind("str", choices=("a", "b", "c"), optional=True),
        "wide": Kind("str"),
        "color": Kind("str", choices=("red", "blue")),
        "quoted": Kind("object", optional=True),
        "dtype": Kind("str", choices=("fp32", "bf16", "fp16", "fp8")),
        "call": Kind("none", optional=True),
        "unknown": Kind("any"),
        "borrowed": Kind("float"),
        "got": Kind("float"),
    }
    assert fields["whole"].help == "A whole number." and fields["whole"].default == "0"
    assert fields["switch"].on_by_default and fields["switch"].spellings == ("disable-it",)
    assert fields["borrowed"].default == fields["got"].default == "2.5" and fields["got"].help == "Said once."
    assert package not in sys.modules


def test_what_is_not_there_is_none(package: str) -> None:
    assert read_fields("nopackageofthisname.x", "Y") is None
    assert read_fields(f"{package}.nomodule", "Y") is None
    assert read_fields(f"{package}.deep.config", "Y") is None
    assert read_fields(f"{package}.deep.config", "CONSTANT") is None


#: prints {class: {field: its default if that is a switch's}} of the classes as imported
ASK = """
import dataclasses, importlib, json, sys, warnings
warnings.simplefilter("ignore")
found = {}
for module, cls in json.loads(sys.argv[1]):
    try:
        owner = getattr(importlib.import_module(module), cls)
    except ImportError:
        continue
    found[cls] = {f.name: f.default if isinstance(f.default, bool) else None for f in dataclasses.fields(owner)}
print("\\n" + json.dumps(found))
"""


def as_imported(table: passthrough.Table) -> dict[str, bool | None]:
    """Field -> default of a switch, as the imported classes have it; the first class that has a field counts."""
    done = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps(passthrough.CLASSES[table])], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    merged: dict[str, bool | None] = {}
    for fields in json.loads(done.stdout.splitlines()[-1]).values():
        merged = fields | merged
    return {name: value for name, value in merged.items() if not name.startswith("_")}


@pytest.mark.process
def test_megatron_fields() -> None:
    """Megatron's fields are those of the imported classes."""
    imported = as_imported("megatron")
    read = passthrough.settings("megatron")
    others = set(passthrough.MODEL_ARGUMENTS)  # of which MLATransformerConfig has some as fields
    assert read is not None and set(read) - others == set(imported) - others
    switches = {name: value for name, value in imported.items() if value is not None and read[name].kind.base == "bool"}
    assert {name: read[name].on_by_default for name in switches} == switches


@pytest.mark.vllm
def test_vllm_fields() -> None:
    """vLLM's fields are those of the imported classes."""
    imported, read = as_imported("vllm"), passthrough.settings("vllm")
    assert read is not None and set(read) == set(imported)
    switches = {
        name: value for name, value in imported.items() if value is not None and read[name].default in ("True", "False")
    }
    assert len(switches) > 50
    assert {name: read[name].on_by_default for name in switches} == switches
