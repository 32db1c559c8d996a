"""Filling the templates next to this file.

Invariant: whatever is filled in is escaped, unless it is a picture of ours; a name that a template uses and does not
get is an error.
"""

from __future__ import annotations

from pathlib import Path

import jinja2

from hpcrl.utils.untrusted_files import read_given


def render(name: str, **values: object) -> str:
    """The HTML of a template."""
    loader = jinja2.FunctionLoader(lambda name: read_given(Path(__file__).with_name(name)))
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(name).render(values)
