"""`hpcrl options`: every option, as a Markdown table, as JSON for programs, or as a JSON Schema of recipes for editors.

    hpcrl options --schema > hpcrl.schema.json      then, as the first line of a recipe:  #:schema ./hpcrl.schema.json

Invariant: made from the declarations alone; a recipe that hpcrl takes fits the schema, whatever packages are installed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hpcrl.errors import UsageError
from hpcrl.utils.arguments import Parser


def options(argv: list[str]) -> int:
    """The command."""
    parser = Parser("options", "Every option as a Markdown table.")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--write", metavar="FILE", type=Path, help="write the table to FILE (docs/options.md)")
    which.add_argument("--json", action="store_true", help="for programs: one JSON object for each option")
    which.add_argument("--schema", action="store_true", help="a JSON Schema of recipes, for an editor of TOML files")
    which.add_argument("--megatron", action="store_true", help="list the settings of the installed Megatron-core")
    which.add_argument("--vllm", action="store_true", help="list the settings of the installed vLLM")
    args = parser.parse_args(argv)
    from hpcrl.config.options_doc import foreign_help, markdown

    if args.megatron or args.vllm:
        print(foreign_help("megatron" if args.megatron else "vllm"))
    elif args.json:
        print(json.dumps(facts(), indent=1))
    elif args.schema:
        print(json.dumps(schema(), indent=1))
    elif args.write:
        try:
            args.write.write_text(markdown(), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {args.write}: {error.strerror}") from error
    else:
        print(markdown(), end="")
    return 0


def facts() -> list[dict[str, Any]]:
    """What is declared of each option, in the order of the help text."""
    from hpcrl.config.options import Options
    from hpcrl.config.passthrough import dashed
    from hpcrl.config.setting_names import kind_of_field, sections

    found = []
    for section, names in sections():
        for name in names:
            field = Options.model_fields[name]
            kind = kind_of_field(field)
            found.append(
                {
                    "name": name,
                    "flag": f"--{dashed(name)}",
                    "section": section,
                    "type": kind.base,
                    "list": kind.many,
                    "lone": kind.lone,
                    "choices": list(kind.choices),
                    "bounds": kind.bounds,
                    "default": field.get_default(call_default_factory=True),
                    "source": field.json_schema_extra["source"],
                    "help": field.description,
                }
            )
    return found


# ---- the schema


_TYPES = {"bool": "boolean", "int": "integer", "float": "number", "str": "string", "object": "object"}
_BOUNDS = {">=": "minimum", ">": "exclusiveMinimum", "<=": "maximum", "<": "exclusiveMaximum"}
_COMMAND = {"type": "array", "items": {"type": "string"}, "minItems": 1}
_PREPARE = "a command that runs before the first stage, or a list of commands, each a list of words"


def schema() -> dict[str, Any]:
    """JSON Schema (draft 7) of a recipe.

    Settings of Megatron-core and vLLM are in their tables, and those of Megatron by themselves as well, so a key that
    is not hpcrl's may be one of theirs: only hpcrl's own are described.
    """
    keys = {fact["name"]: _property(fact) for fact in facts()}
    stage = {"type": "object", "properties": {**keys, "name": {"type": "string"}}, "required": ["name"]}
    prepare = {"description": _PREPARE, "anyOf": [_COMMAND, {"type": "array", "items": _COMMAND}]}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "recipe of hpcrl",
        "type": "object",
        "properties": {
            **keys,
            "prepare": prepare,
            "stage": {"description": "stages run one after another", "type": "array", "items": stage},
        },
    }


def _property(fact: dict[str, Any]) -> dict[str, Any]:
    """What the schema says of one option."""
    one: dict[str, Any] = {"type": _TYPES[fact["type"]]} if fact["type"] in _TYPES else {}
    if fact["choices"]:
        one["enum"] = fact["choices"]
    for bound in filter(None, fact["bounds"].split(" and ")):
        sign, value = bound.split()
        one[_BOUNDS[sign]] = float(value)
    found: dict[str, Any] = {"description": fact["help"]}
    if fact["default"] is not None:
        found["default"] = fact["default"]
    if not fact["list"]:
        return found | one
    several = {"type": "array", "items": one}
    return found | ({"anyOf": [several, one]} if fact["lone"] else several)
