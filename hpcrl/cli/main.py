"""The command `hpcrl`.

Invariants: nothing heavy is imported here (no torch, vLLM or Megatron, and pydantic only where options are needed), so
help comes at once; whatever a user can do wrong ends as one line on stderr and a non-zero exit status.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence

from hpcrl import __version__
from hpcrl.errors import HpcrlError, Stopped, UsageError
from hpcrl.utils.plain_text import strip_control

HELP = """\
hpcrl: reinforcement-learning post-training of language models as a plain batch job

first steps
  hpcrl init NAME [--task T] [--model DIR]     make a folder of your own: a recipe, data, a reward with its test
  hpcrl try RECIPE.toml                        sample and grade a few prompts, and show them token by token
  hpcrl run RECIPE.toml [--option value ...]   run a recipe on this machine
  hpcrl run RECIPE.toml --dry-run              show plan and options of each stage; start nothing
  hpcrl run --help                             list the options of a first run; --help-all: every option
your runs
  hpcrl status [RUN]                           list all runs, or show one in full
  hpcrl watch RUN                              follow one run until it ends
  hpcrl logs RUN [--role R] [--host H] [-f]    print what its processes log
  hpcrl samples RUN [--step N] [--worst]       print prompts, responses and rewards; --diff A B: of two steps or runs
  hpcrl report RUN [-o FILE] [--trace]         write a page with curves, costs and samples; or a trace for Perfetto
  hpcrl report RUN --to wandb|trackio|mlflow   send curves, options and samples there
  hpcrl stop RUN                               save a checkpoint and end; hpcrl cancel RUN ends it without saving
  hpcrl resume RUN                             continue a run from its last checkpoint
  hpcrl eval RECIPE|RUN|HF-DIR                 sample and grade held-out prompts; --site S: as a job
  hpcrl convert WHAT ...                       convert a checkpoint: to-torch-dist, to-hf, to-fp8
cluster
  hpcrl submit RECIPE.toml [--site S]          submit a recipe as one batch job of Slurm; --dry-run: show the script
  hpcrl launch RECIPE.toml --hostfile FILE     run a recipe over the machines of a hostfile with mpirun
  hpcrl plan RECIPE.toml [--hostfile FILE]     show ranks, hosts, GPUs, parallel groups and memory
  hpcrl rehearse RECIPE.toml                   try one training step on fake tensors, without GPUs
  hpcrl doctor [RECIPE.toml] [--site S] [--nodes]   check that login node, site and nodes have what a run needs
  hpcrl selftest [--site S] [--hosts N]        test numbers, transports and memory on your hardware
  hpcrl hostfile FILE [--to DIALECT]           explain a hostfile, or write it for another launcher
more
  hpcrl import SCRIPT.sh > RECIPE.toml         turn a run script of slime's or vime's into a recipe
  hpcrl submit [--site S] -- ARGUMENTS ...     take the arguments of such a script unchanged; also run, plan, launch
  hpcrl engines RUN                            list the engines of a run; engines serve starts one without a run
  hpcrl options [--json|--schema]              list every option: as a table, JSON, a schema; --megatron, --vllm
  hpcrl completion bash|zsh|fish               print the script by which a shell completes commands and options
  hpcrl --version
examples
  hpcrl run examples/quickstart.toml
  hpcrl run examples/quickstart.toml --grpo.num-rollout 20 --grpo.eval-interval 5 --run-dir runs/short
  hpcrl run examples/quickstart.toml --recompute-granularity selective --vllm-max-num-seqs 64

RECIPE.toml may also be a folder that init made; the default is ./recipe.toml. Its keys are options. A flag overrides a
key, --STAGE.option does so in one stage. Ctrl-C or SIGTERM saves and ends, a second one ends without saving.
Exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted, 143 stopped and saved."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status."""
    try:
        return command(list(sys.argv[1:] if argv is None else argv))
    except HpcrlError as error:
        print(
            f"hpcrl: {'' if isinstance(error, Stopped) else 'error: '}{strip_control(str(error), lines=True)}",
            file=sys.stderr,
        )
        return error.exit_code
    except KeyboardInterrupt:
        print("hpcrl: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141 if (argv or sys.argv[1:])[:1] == ["run"] else 0  # a run has ended with it, and is not done
    except ModuleNotFoundError as error:
        if (error.name or "hpcrl").partition(".")[0] == "hpcrl":
            raise
        hint = "activate the environment that hpcrl is installed in (. .venv/bin/activate), or install it"
        print(f"hpcrl: error: {sys.executable} has no package {error.name}; {hint}", file=sys.stderr)
        return 1
    except OSError as error:
        place = strip_control(str(error.filename or "output"))
        print(f"hpcrl: error: {place}: {error.strerror}", file=sys.stderr)
        return 1


#: what other tools call a command:the command
SYNONYMS = (
    "train:run start:run evaluate:eval ps:status ls:status list:status tail:logs compare:report sync:report "
    "kill:cancel continue:resume sbatch:submit mpirun:launch check:doctor export:convert"
)


def command(argv: list[str]) -> int:
    """Find the command and run it."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(HELP)
        return 0
    if argv[0] == "--version":
        print(f"hpcrl {__version__}")
        return 0
    if argv[0] not in COMMANDS:
        known = {name: name for name in COMMANDS} | dict(pair.split(":") for pair in SYNONYMS.split())
        near = difflib.get_close_matches(argv[0], known, n=1)
        hint = f"did you mean hpcrl {known[near[0]]}?" if near else f"there are {', '.join(COMMANDS)}"
        raise UsageError(f"{argv[0]} is not a command", f"{hint}; see hpcrl --help" if not near else hint)
    place, _, name = COMMANDS[argv[0]].partition(":")
    module = importlib.import_module(place)
    before = argv[: argv.index("--")] if "--" in argv else argv
    if hasattr(module, "USAGE") and {"-h", "--help"} & {*before}:  # the parser of other commands has its own help
        print(module.USAGE)
        return 0
    function = getattr(module, name)
    return function(argv[1:], COMMANDS, HELP) if argv[0] == "completion" else function(argv[1:])


#: command -> module:function that does it
COMMANDS = {
    "init": "hpcrl.cli.init:init",
    "run": "hpcrl.cli.run:run",
    "submit": "hpcrl.cli.submit:submit",
    "plan": "hpcrl.cli.plan:plan",
    "rehearse": "hpcrl.cli.rehearse:rehearse",
    "import": "hpcrl.cli.import_script:import_script",
    "launch": "hpcrl.cli.launch:launch",
    "eval": "hpcrl.cli.evaluate:evaluate",
    "resume": "hpcrl.cli.resume:resume",
    "status": "hpcrl.cli.status:status",
    "watch": "hpcrl.cli.status:watch",
    "logs": "hpcrl.cli.logs:logs",
    "samples": "hpcrl.cli.samples:samples",
    "engines": "hpcrl.cli.engines:engines",
    "try": "hpcrl.cli.try_recipe:try_recipe",
    "report": "hpcrl.cli.report:report",
    "stop": "hpcrl.cli.stop:stop",
    "cancel": "hpcrl.cli.stop:cancel",
    "convert": "hpcrl.cli.convert:convert",
    "hostfile": "hpcrl.cli.hostfile:hostfile",
    "options": "hpcrl.cli.options:options",
    "completion": "hpcrl.cli.completion:completion",
    "doctor": "hpcrl.cli.doctor:main",
    "selftest": "hpcrl.cli.selftest:selftest",
}
