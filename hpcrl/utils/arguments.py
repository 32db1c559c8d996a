"""The one parser of commands whose arguments are not options of a run.

Commands that take options of a run read them with hpcrl.config.flags, which knows every option; all others use this.

What a command takes can be asked without running it (`declared`), for shell completion: both parsers answer before they
read a word.

Invariant: a wrong command line ends as one `UsageError`, like every other mistake of a user.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from hpcrl.errors import UsageError
from hpcrl.utils.plain_text import replace_unencodable

#: what RUN means, in the help of every command that takes one
RUN = "run directory, its name, or its job ID"


class Declared(BaseException):
    """What a command takes; raised by its parser where `declared` asks, and caught there.

    Attributes:
        flags: each with its choices, if it has any.
        words: that may come first, such as the name of a subcommand.
        options: those of a run that it takes as well, by name; None: all.
        verbs: of the words those that the command, given one alone, says more of.
    """

    def __init__(
        self,
        flags: Mapping[str, Sequence[str]],
        words: Iterable[str] = (),
        options: Collection[str] | None = (),
        verbs: Iterable[str] = (),
    ) -> None:
        super().__init__("asked what a command takes")
        self.flags = dict(flags)
        self.words = tuple(words)
        self.options = options
        self.verbs = tuple(verbs)


_asking = False


def declare(*taken: Any, **more: Any) -> None:
    """Say what the command takes, by the arguments of `Declared`, if the user asks for that."""
    if _asking:
        raise Declared(*taken, **more)


def declared(command: Callable[[list[str]], object], *words: str) -> Declared:
    """What a command takes after these words, without running it: whatever it calls first is one of the parsers, or
    `declare`."""
    global _asking
    _asking = True
    try:
        command([*words])
    except Declared as found:
        return found
    finally:
        _asking = False
    raise TypeError(f"{command} did not parse its arguments")


class Parser(argparse.ArgumentParser):
    """argparse whose errors are UsageErrors.

    Attributes:
        verbs: names of subcommands, which the command looks for by itself.
    """

    def __init__(self, name: str, description: str, verbs: Iterable[str] = ()) -> None:
        super().__init__(prog=f"hpcrl {name}", description=description, allow_abbrev=False)
        self.verbs = tuple(verbs)
        replace_unencodable()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """argparse's, once what the command takes was said."""
        flags = {f: [*map(str, a.choices or ())] for a in self._actions for f in a.option_strings if f[:2] == "--"}
        named = [str(word) for action in self._actions if not action.option_strings for word in action.choices or ()]
        declare(flags, [*self.verbs, *named], verbs=self.verbs)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, f"see {self.prog} --help")
