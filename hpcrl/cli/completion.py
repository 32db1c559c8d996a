"""`hpcrl completion SHELL`: what the Tab key completes: commands, options with their choices, recipes and runs.

    eval "$(hpcrl completion bash)"            in ~/.bashrc; zsh likewise
    hpcrl completion fish > ~/.config/fish/completions/hpcrl.fish

Invariant: the script is made from the table of options, the commands of `hpcrl/cli/main.py` and what each of these
declares to its parser, so that a new one is completed with no other edit; it starts no hpcrl while one types.
"""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Mapping

from hpcrl.cli.options import facts
from hpcrl.config.passthrough import dashed
from hpcrl.utils.arguments import Declared, Parser, declared

SHELLS = ("bash", "zsh", "fish")
_WORD = re.compile(r"[A-Za-z0-9._-]+")  #: a choice that no shell reads as anything else


def completion(argv: list[str], commands: Mapping[str, str], summary: str) -> int:
    """The command.

    Args:
        commands: all of hpcrl's, with module:function of each.
        summary: the text of hpcrl --help.
    """
    parser = Parser("completion", "Print the script by which a shell completes hpcrl's commands and options.")
    parser.add_argument("shell", choices=SHELLS, help='bash and zsh: eval "$(hpcrl completion bash)" in ~/.bashrc')
    print(script(parser.parse_args(argv).shell, commands, summary), end="")
    return 0


def completed(commands: Mapping[str, str]) -> dict[str, Declared]:
    """What each command itself declares; a subcommand such as `engines serve` comes before its command."""
    found: dict[str, Declared] = {}
    for name, place in commands.items():
        module, _, function = place.partition(":")
        of = getattr(importlib.import_module(module), function)
        takes = declared((lambda argv: completion(argv, {}, "")) if name == "completion" else of)
        found |= {f"{name} {verb}": _completed(declared(of, verb)) for verb in takes.verbs}
        found[name] = _completed(takes)
    return found


def _completed(takes: Declared) -> Declared:
    """With --help, and those of the run's options that it takes alone, among its flags."""
    some = {f"--{dashed(option)}": () for option in sorted(takes.options or ())}
    return Declared({"--help": ()} | takes.flags | some, takes.words, takes.options)


def takes_run(name: str, summary: str) -> bool:
    """Whether the help says that a command takes a run."""
    usage = re.search(rf"hpcrl {name}\b(.*?)(?:  |;|>|$)", summary, re.MULTILINE)
    return bool(usage and re.search(r"\bRUN\b", usage[1]))


def script(shell: str, commands: Mapping[str, str], summary: str) -> str:
    """What the shell reads."""
    found = completed(commands)
    if shell == "fish":
        return _fish(found, summary)
    chosen = {f"*:{flag}": own for flag, own, _ in _flags() if own}
    for name, each in found.items():  # what a command says of a flag comes before what the options say
        chosen = {f"{_pattern(name)}:{flag}": own for flag, own in each.flags.items() if own} | chosen
    words = {
        "@COMMANDS@": " ".join(commands),
        "@OPTIONS@": " ".join(flag for flag, _, _ in _flags()),
        "@OWN@": "\n".join(
            f'        {_pattern(name)}) own="{" ".join(each.flags)}" first="{" ".join(each.words)}"'
            f" options={int(each.options is None)} run={int(takes_run(name, summary))} ;;"
            for name, each in found.items()
        ),
        "@CHOICES@": "\n".join(f'        {which}) values="{" ".join(own)}" ;;' for which, own in chosen.items()),
    }
    text = _BASH if shell == "bash" else f"autoload -Uz compinit bashcompinit; compinit; bashcompinit\n{_BASH}"
    for mark, value in words.items():
        text = text.replace(mark, value)
    return text


def _pattern(name: str) -> str:
    """What the shell compares the command and the word after it with."""
    return name.replace(" ", r"\ ") if " " in name else rf"{name}\ *"


def _flags() -> list[tuple[str, list[str], str]]:
    """(flag, choices, help) of every option, and of a switch what turns it off."""
    found = []
    for fact in facts():
        choices = [str(choice) for choice in fact["choices"] if _WORD.fullmatch(str(choice))]
        found.append((fact["flag"], choices, fact["help"]))
        if fact["type"] == "bool":
            found.append((fact["flag"].replace("--", "--no-", 1), [], f"not: {fact['help']}"))
    return found


_BASH = """\
_hpcrl() {
    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" verb="${COMP_WORDS[1]}"
    local own="" first="" options=0 run=0 values="" found="" second=""
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "@COMMANDS@ --help --version" -- "$word"))
        return
    fi
    [ "$COMP_CWORD" -gt 2 ] && second="${COMP_WORDS[2]}"
    case "$verb $second" in
@OWN@
    esac
    [ "$options" -eq 1 ] && own="$own @OPTIONS@"
    case "$verb $second:$before" in
@CHOICES@
    esac
    if [ "$COMP_CWORD" -eq 2 ] && [[ "$word" != -* ]]; then
        COMPREPLY=($(compgen -W "$first" -- "$word"))
    fi
    if [ -n "$values" ] && [[ " $own " == *" $before "* ]]; then
        COMPREPLY=($(compgen -W "$values" -- "$word"))
    elif [[ "$word" == -* ]]; then
        COMPREPLY=($(compgen -W "$own" -- "$word"))
    elif [ "$run" -eq 1 ]; then
        # names of directories are never expanded: another user may have made one there
        while IFS= read -r found; do
            COMPREPLY+=("$found")
        done < <(cd runs 2> /dev/null && compgen -d -- "$word"; compgen -d -- "$word")
    else
        while IFS= read -r found; do
            COMPREPLY+=("$found")
        done < <(compgen -f -- "$word")
    fi
}
complete -o filenames -F _hpcrl hpcrl
"""


def _fish(found: Mapping[str, Declared], summary: str) -> str:
    """One `complete` for each command, and for each of its flags; a subcommand has its own."""
    rows = [re.match(r"  hpcrl (\w+)\b.*?  +(\S.*)", line) for line in summary.splitlines()]
    said = {row[1]: row[2] for row in reversed(rows) if row}
    lines = [
        f"complete -c hpcrl -n __fish_use_subcommand -f -a {name} -d {shlex.quote(said.get(name, ''))}"
        for name in found
        if " " not in name
    ]
    for name, each in found.items():
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in name.split())
        of = f"complete -c hpcrl -n '{seen}'"
        flags = [
            *(_flags() if each.options is None else ()),
            *((flag, choices, "") for flag, choices in each.flags.items()),
        ]
        for flag, choices, text in flags:
            values = f" -x -a {shlex.quote(' '.join(choices))}" if choices else ""
            quoted = text[:80].replace("\\", "\\\\").replace("'", "\\'")  # fish escapes both within quotes
            lines.append(f"{of} -l {flag.removeprefix('--')}{values} -d '{quoted}'")
        if each.words:
            lines.append(f"{of} -a {shlex.quote(' '.join(each.words))}")
        if takes_run(name, summary):
            lines.append(f"{of} -a '(test -d runs; and ls runs)'")
    return "\n".join([*lines, ""])
