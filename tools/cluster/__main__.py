"""`python -m tools.cluster`: see tools/cluster/__init__.py."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tools.cluster import control, packages, roots
from tools.cluster.layout import HEAD, read


def parser() -> argparse.ArgumentParser:
    """Every command and its arguments."""
    root = argparse.ArgumentParser(
        prog="python -m tools.cluster", description="A real Slurm and MPI cluster in namespaces."
    )
    commands = root.add_subparsers(dest="command", required=True)

    def add(name: str, text: str, *arguments: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("dir", metavar="DIR", type=Path, help="plays the shared file system")
        for argument in arguments:
            command.add_argument(argument)
        return command

    begin = add("start", "start a cluster in DIR, anew")
    begin.add_argument("--nodes", type=int, default=4, help="besides the head (default 4)")
    begin.add_argument("--no-accounting", action="store_true", help="no MariaDB, no slurmdbd: sacct answers nothing")
    begin.add_argument(
        "--release",
        default=roots.MACHINE,
        help="another Slurm than the machine's: its version (26.05) or its Debian (forky); `root` makes it",
    )
    begin.add_argument("--cgroups", action="store_true", help="limits by cgroups (version 1)")
    begin.add_argument(
        "--visible", type=Path, action="append", default=[], help="below /tmp, yet seen by every node; repeatable"
    )
    add("exec", "run a command on a node", "node").add_argument("words", nargs=argparse.REMAINDER, metavar="CMD")
    add("shell", "a shell on a node (the head if none is named)").add_argument("node", nargs="?", default=HEAD)
    add("kill-node", "cut the power of a node", "node")
    add("boot-node", "turn a node on again", "node")
    add("kill-slurmd", "kill a node's slurmd alone", "node")
    add("start-slurmd", "start a node's slurmd again", "node")
    add("link", "pull or plug in a node's cable", "node").add_argument("state", choices=["up", "down"])
    add("stop", "end the cluster; nothing is left of it but DIR")
    text = "make the root of another Debian release, for its Slurm"
    commands.add_parser("root", help=text, description=text).add_argument("suite", choices=roots.SUITES)
    missing = commands.add_parser("packages", help="name the Debian packages that are missing")
    missing.add_argument("--install", action="store_true", help="install them (as root), without starting a daemon")
    return root


def main() -> int:
    """Run one command; its exit status."""
    options = parser().parse_args()
    try:
        return _run(options)
    except (control.ClusterError, roots.RootError, FileNotFoundError) as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1


def _run(options: argparse.Namespace) -> int:
    if options.command == "packages":
        return packages.main(install=options.install)
    if options.command == "root":
        return roots.main(options.suite)
    if options.command == "start":
        return _start(options)
    layout = read(options.dir)
    if options.command in {"exec", "shell"}:
        words = options.words if options.command == "exec" else [os.environ.get("SHELL", "/bin/bash")]
        return subprocess.run(control.entering(layout, options.node, words), env=control.environment()).returncode
    if options.command == "stop":
        control.stop(layout.shared)
    elif options.command == "link":
        control.link(layout, options.node, options.state)
    else:
        getattr(control, options.command.replace("-", "_"))(layout, options.node)
    return 0


def _start(options: argparse.Namespace) -> int:
    lacking = packages.reason()
    if lacking:
        raise control.ClusterError(lacking)
    handle = control.start(
        options.dir,
        nodes=options.nodes,
        accounting=not options.no_accounting,
        cgroups=options.cgroups,
        visible=options.visible,
        release=options.release,
    )
    control.detach(handle)
    program = f"{sys.executable} -m tools.cluster"
    print(f"""head and {options.nodes} nodes are up; {options.dir} is the file system that they share
  {program} shell {options.dir}          a shell on the head: sinfo, sbatch, squeue, sacct, mpirun, ssh node1
  {program} kill-node {options.dir} node3
  {program} stop {options.dir}""")
    return 0


if __name__ == "__main__":
    sys.exit(main())
