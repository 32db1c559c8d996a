"""What a launcher in Python has noted down besides commands, and what makes its arguments none that a run may have.

Invariant: a flag whose value, or whose presence, only a missing package could decide is refused, and never left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hpcrl.config.setting_names import nearest
from hpcrl.errors import UsageError
from hpcrl.utils.plain_text import strip_control

FILE = "hpcrl-file"  #: a call of this name is the path and the text of a file that a launcher wrote and hands over
DEPENDS = "hpcrl-depends"  #: a line of the launcher, and an unknown value that a branch or a loop there depends on
INSTALLED = "hpcrl-installed"  #: a line, and a package that the launcher would do without
READ = "hpcrl-read"  #: names of variables that the launcher has read
OFFERED = "hpcrl-offered"  #: a name of a setting that it has
OF_LAUNCHERS = (FILE, DEPENDS, INSTALLED, READ, OFFERED)
#: a value as launcher_values.py writes it; a launcher may have made it lower case
_UNKNOWN = re.compile(r"UNKNOWN:([\w.]+)", re.I)


def check_known(
    path: Path,
    calls: Sequence[Sequence[str]],
    arguments: Sequence[str],
    environment: Mapping[str, str],
    files: Mapping[str, str],
) -> None:
    """Refuse what stand-ins for missing packages have had a say in.

    Args:
        calls: those before the training's.

    Raises:
        UsageError: if there is any such.
    """
    if named := dict.fromkeys(_unknown(arguments, environment, files)):
        raise UsageError(
            f"{path} hands over what only a package that is not here knows: {strip_control('; '.join(named))[:400]}",
            "write these values into the script, or give its arguments yourself: hpcrl import -- ARGUMENTS",
        )
    if found := depends(calls):
        raise UsageError(
            f"{path} {found}, and its arguments may differ with that",
            "write the value into the script, or give its arguments yourself: hpcrl import -- ARGUMENTS",
        )


def check_read(path: Path, calls: Sequence[Sequence[str]], variables: Mapping[str, str]) -> None:
    """A NAME=VALUE that a launcher did not read has no effect.

    Raises:
        UsageError: if there is one; it names the setting that it may be a slip of.
    """
    read = {name for call in calls if call[0] == READ for name in call[1:]}
    if missed := next((name for name in variables if name not in read), None):
        offered = {call[1] for call in calls if call[0] == OFFERED and len(call) == 2}
        names = {name.replace("_", "-"): name for name in offered}
        close = nearest(missed, names)
        raise UsageError(
            f"{path} does not read {missed}, so that {missed}={variables[missed]} has no effect",
            f"did you mean {strip_control(names[close])}?" if close else "leave it out",
        )


def depends(calls: Sequence[Sequence[str]]) -> str:
    """The first branch or loop that depends on an unknown value; "" if there is none."""
    found = next((call for call in calls if call[0] == DEPENDS and len(call) == 3), None)
    if found is None:
        return ""
    line, name = map(strip_control, found[1:])
    return f"line {line[:80]} depends on {name[:100]}, which only a package that is not here knows"


def _unknown(arguments: Sequence[str], environment: Mapping[str, str], files: Mapping[str, str]) -> Iterator[str]:
    """Flags with the unknown values in them, and variables and files likewise."""
    flag = ""
    for word in arguments:
        if word.startswith("--"):
            flag = word.partition("=")[0]
        yield from (f"{flag} {found[0]}".strip() for found in _UNKNOWN.finditer(word))
    for where, texts in (("environment", environment), ("the file", files)):
        for name, text in texts.items():
            yield from (f"{where} {name} {found[0]}" for found in _UNKNOWN.finditer(text))


def installed(calls: Sequence[Sequence[str]]) -> Iterator[str]:
    """Packages that a launcher looks for, and of which one way was taken."""
    for line, name in dict.fromkeys(tuple(call[1:3]) for call in calls if call[0] == INSTALLED and len(call) == 3):
        yield f"line {line} looks whether {name} is installed: read as if it were"
