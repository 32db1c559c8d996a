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

  hpcrl init NAME [--task T] [--model DIR]     a folder of your own: recipe, data, a reward with a test; hpcrl run there
  hpcrl run RECIPE.toml [--option value ...]   run a recipe on this machine
  hpcrl run RECIPE.toml --dry-run              show who would run where, and with which options; start nothing
  hpcrl run --help                             the options of a first run; --help-all: every one
  hpcrl submit RECIPE.toml [--site S]          run it as one batch job (Slurm); --dry-run shows plan, script, command
  hpcrl launch RECIPE.toml --hostfile FILE     run it over the machines of a hostfile with mpirun
  hpcrl eval RECIPE|CHECKPOINT|HF-DIR          sample and grade held-out prompts, train nothing; --site S: as a job
  hpcrl resume RUN                             resume a run the way it was started
  hpcrl plan RECIPE.toml [--hostfile FILE]     ranks, hosts, GPUs and parallel groups, over the hosts of a hostfile
  hpcrl rehearse RECIPE.toml                   its distinct ranks take a step on tensors without content
  hpcrl import SCRIPT.sh > RECIPE.toml         read a run script of slime's or vime's
  hpcrl submit [--site S] -- ARGUMENTS ...     the arguments of such a script, unchanged; also run, plan, launch
  hpcrl hostfile FILE [--to DIALECT]           say what a hostfile means, or write it for another launcher
  hpcrl doctor [RECIPE.toml] [--site S] [--nodes]   is all there that a run needs: login node, site, nodes
  hpcrl selftest [--site S] [--hosts N]        numbers, transports and memory on your hardware: passed, failed, skipped
  hpcrl convert WHAT ...                       checkpoints: to-torch-dist, to-hf, to-fp8; ... WHAT --help
  hpcrl status [RUN]                           what runs are doing: all of them, or one in full
  hpcrl try RECIPE.toml                        a few prompts, sampled and graded: as rendered, token by token
  hpcrl watch RUN                              the status of one run, live, until it ends
  hpcrl logs RUN [--role R] [--host H] [-f]    what its processes say
  hpcrl samples RUN [--step N] [--worst]       prompts, responses and rewards; --diff A B: of two steps or runs
  hpcrl engines RUN                            its engines; engines serve: one of no run
  hpcrl report RUN [-o FILE] [--trace]         one HTML file: curves, timeline, cost, samples; or a trace for Perfetto
  hpcrl sync RUN --to wandb|trackio|mlflow     send its curves, options and samples there, from where there is a network
  hpcrl stop RUN                               save a checkpoint and end; hpcrl cancel RUN: end at once
  hpcrl options [--json|--schema]              every option: a table, JSON, a schema for editors; --megatron, --vllm
  hpcrl completion bash|zsh|fish               the script by which a shell completes all this
  hpcrl --version

examples
  hpcrl run examples/quickstart.toml
  hpcrl run examples/quickstart.toml --grpo.num-rollout 20 --eval-interval 5 --run-dir runs/short
  hpcrl run examples/quickstart.toml --recompute-granularity selective --vllm-max-num-seqs 64

A recipe is a TOML file whose keys are options; a flag overrides it, --STAGE.option in that stage. Without one, run,
plan, submit and launch take recipe.toml of this directory. Ctrl-C or SIGTERM saves a checkpoint and ends; a second one
ends at once. Exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted, 143 stopped and saved."""


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


#: what other tools call a command -> the command
SYNONYMS = {"train": "run", "compare": "report", "ps": "status", "kill": "cancel", "export": "convert"}


def command(argv: list[str]) -> int:
    """Find the command and run it."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(HELP)
        return 0
    if argv[0] == "--version":
        print(f"hpcrl {__version__}")
        return 0
    if argv[0] not in COMMANDS:
        near = [SYNONYMS[argv[0]]] if argv[0] in SYNONYMS else difflib.get_close_matches(argv[0], COMMANDS, n=1)
        hint = f"did you mean hpcrl {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        raise UsageError(f"{argv[0]} is not a command", f"{hint}; see hpcrl --help" if not near else hint)
    module, _, name = COMMANDS[argv[0]].partition(":")
    function = getattr(importlib.import_module(module), name)
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
    "sync": "hpcrl.cli.report:sync",
    "stop": "hpcrl.cli.stop:stop",
    "cancel": "hpcrl.cli.stop:cancel",
    "convert": "hpcrl.cli.convert:convert",
    "hostfile": "hpcrl.cli.hostfile:hostfile",
    "options": "hpcrl.cli.options:options",
    "completion": "hpcrl.cli.completion:completion",
    "doctor": "hpcrl.cli.doctor:main",
    "selftest": "hpcrl.cli.selftest:selftest",
}
