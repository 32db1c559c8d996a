"""`hpcrl completion SHELL`: what the Tab key completes: commands, options with their choices, recipes and runs.

    eval "$(hpcrl completion bash)"            in ~/.bashrc; zsh likewise
    hpcrl completion fish > ~/.config/fish/completions/hpcrl.fish

Invariant: the script is made from the table of options and the commands of `hpcrl/cli.py`, and starts no hpcrl while
one types.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from hpcrl.commands.first_steps.options import facts
from hpcrl.toolbox.arguments import Parser

SHELLS = ("bash", "zsh", "fish")
#: commands that take a recipe and options of a run
OF_A_RECIPE = ("run", "submit", "plan", "rehearse", "fit", "launch", "eval", "doctor")
#: those that take a run
OF_A_RUN = ("status", "watch", "logs", "samples", "engines", "report", "trace", "bill", "stop", "cancel", "resume")
_OWN = {
    "run": ["--dry-run", "--resume", "--help", "--help-all"],
    "submit": [
        *("--site", "--time", "--layout", "--set", "--chain", "--after", "--sweep", "--seeds", "--at-once"),
        *("--dry-run", "--print", "--help"),
    ],
    "plan": ["--hostfile", "--gpu", "--gpu-memory", "--host-memory", "--link-rate", "--help"],
    "rehearse": ["--site", "--gpu", "--gpu-memory", "--ranks", "--at-once", "--on-node", "--help"],
    "fit": [
        *("--site", "--time", "--layout", "--set", "--max-nodes", "--rehearse", "--apply", "--output", "--force"),
        *("--gpus-per-node", "--gpu", "--gpu-memory", "--host-memory", "--link-rate", "--json", "--help"),
    ],
    "launch": ["--hostfile", "--dry-run", "--print", "--help"],
    "eval": ["--site", "--dry-run", "--help"],
    "doctor": ["--site", "--nodes", "--help"],
}
_WORD = re.compile(r"[A-Za-z0-9._-]+")  #: a choice that no shell reads as anything else


def completion(argv: list[str], commands: Sequence[str], summary: str) -> int:
    """The command.

    Args:
        commands: all of hpcrl's.
        summary: the text of hpcrl --help.
    """
    parser = Parser("completion", "Print the script by which a shell completes hpcrl's commands and options.")
    parser.add_argument("shell", choices=SHELLS, help='bash and zsh: eval "$(hpcrl completion bash)" in ~/.bashrc')
    print(script(parser.parse_args(argv).shell, commands, summary), end="")
    return 0


def script(shell: str, commands: Sequence[str], summary: str) -> str:
    """What the shell reads."""
    if shell == "fish":
        return _fish(commands, summary)
    words = {
        "@COMMANDS@": " ".join(commands),
        "@RECIPE@": "|".join(OF_A_RECIPE),
        "@RUN@": "|".join(OF_A_RUN),
        "@OPTIONS@": " ".join(flag for flag, _, _ in _flags()),
        "@OWN@": "\n".join(f'        {name}) own="{" ".join(flags)}" ;;' for name, flags in _OWN.items()),
        "@CHOICES@": "\n".join(f'        {flag}) values="{" ".join(own)}" ;;' for flag, own, _ in _flags() if own),
    }
    text = _BASH if shell == "bash" else f"autoload -Uz compinit bashcompinit; compinit; bashcompinit\n{_BASH}"
    for mark, value in words.items():
        text = text.replace(mark, value)
    return text


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
    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" verb="${COMP_WORDS[1]}" own="" values=""
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "@COMMANDS@ --help --version" -- "$word"))
        return
    fi
    case "$before" in
@CHOICES@
    esac
    case "$verb" in
@OWN@
    esac
    case "$verb" in
        @RECIPE@)
            if [ -n "$values" ]; then
                COMPREPLY=($(compgen -W "$values" -- "$word"))
            elif [[ "$word" == -* ]]; then
                COMPREPLY=($(compgen -W "$own @OPTIONS@" -- "$word"))
            else
                COMPREPLY=($(compgen -f -- "$word"))
            fi ;;
        @RUN@)
            # names of directories are never expanded: another user may have made one there
            while IFS= read -r found; do
                COMPREPLY+=("$found")
            done < <(cd runs 2> /dev/null && compgen -d -- "$word"; compgen -d -- "$word") ;;
        completion) COMPREPLY=($(compgen -W "bash zsh fish" -- "$word")) ;;
        *) COMPREPLY=($(compgen -f -- "$word")) ;;
    esac
}
complete -o filenames -F _hpcrl hpcrl
"""


def _fish(commands: Sequence[str], summary: str) -> str:
    """One `complete` for each command and option."""
    said = _summaries(summary)
    lines = [
        f"complete -c hpcrl -n __fish_use_subcommand -f -a {name} -d {shlex.quote(said.get(name, ''))}"
        for name in commands
    ]
    inside = f"-n '__fish_seen_subcommand_from {' '.join(OF_A_RECIPE)}'"
    for flag, choices, text in _flags():
        values = f" -x -a {shlex.quote(' '.join(choices))}" if choices else ""
        lines.append(f"complete -c hpcrl {inside} -l {flag.removeprefix('--')}{values} -d {_quoted(text)}")
    for name, flags in _OWN.items():
        of = f"-n '__fish_seen_subcommand_from {name}'"
        lines += [f"complete -c hpcrl {of} -l {flag.removeprefix('--')}" for flag in flags]
    runs = f"-n '__fish_seen_subcommand_from {' '.join(OF_A_RUN)}'"
    lines.append(f"complete -c hpcrl {runs} -a '(test -d runs; and ls runs)'")
    return "\n".join(
        [*lines, "complete -c hpcrl -n '__fish_seen_subcommand_from completion' -x -a 'bash zsh fish'", ""]
    )


def _quoted(text: str) -> str:
    """As fish reads it: within single quotes a backslash escapes both."""
    return "'" + text[:80].replace("\\", "\\\\").replace("'", "\\'") + "'"


def _summaries(summary: str) -> dict[str, str]:
    """Command -> what hpcrl --help says of it."""
    rows = [re.match(r"  hpcrl (\w+)\b.*?  +(\S.*)", line) for line in summary.splitlines()]
    return {row[1]: row[2] for row in reversed(rows) if row}
