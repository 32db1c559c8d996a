"""The one parser of commands whose arguments are not options of a run.

Commands that take options of a run read them with hpcrl.config.flags, which knows every option; all others use this.

Invariant: a wrong command line ends as one `UsageError`, like every other mistake of a user.
"""

from __future__ import annotations

import argparse
from typing import NoReturn

from hpcrl.errors import UsageError
from hpcrl.plain_text import replace_unencodable

#: what RUN means, in the help of every command that takes one
RUN = "run directory, its name, or its job ID"


class Parser(argparse.ArgumentParser):
    """argparse whose errors are UsageErrors.

    Attributes:
        name: of the command, without `hpcrl`.
    """

    def __init__(self, name: str, description: str) -> None:
        super().__init__(prog=f"hpcrl {name}", description=description, allow_abbrev=False)
        replace_unencodable()

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, f"see {self.prog} --help")
