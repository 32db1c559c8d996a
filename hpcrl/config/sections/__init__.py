"""The options, declared once each: a file for each topic, joined by `config/options.py`.

`opt` declares a field, `Base` is what the sections derive from.  Invariant: options are frozen; an unknown name is an
error.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


def opt(default: Any, help: str, source: str = "hpcrl", **kw: Any) -> Any:
    """A field with a help line and the name of the project whose meaning it carries."""
    return Field(default=default, description=help, json_schema_extra={"source": source}, **kw)


class Base(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
