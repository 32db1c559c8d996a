"""`hpcrl hostfile`: what a hostfile means, or the same hosts in the dialect of another launcher.

Invariant: what is printed is what a run would understand; notes on how launchers read it differently go to stderr.
"""

from __future__ import annotations

import os
import sys

from hpcrl.errors import UsageError
from hpcrl.launch.mpi.hostfile import job_hostfile, parse_hostfile, read_hostfile, write_hostfile
from hpcrl.utils.arguments import Parser
from hpcrl.utils.check_results import count


def hostfile(argv: list[str]) -> int:
    """`hpcrl hostfile`: print what was understood, or write it in another dialect; notes go to stderr."""
    parser = Parser("hostfile", "Show how a hostfile is read, or write it for another launcher.")
    parser.add_argument(
        "file", metavar="FILE", nargs="?", help="Open MPI, MPICH, Intel MPI, Slurm node list, or slime's `ip slot=8`"
    )
    parser.add_argument(
        "--from", dest="job", metavar="SCHEDULER", help="read the hosts of the current job: lsf, sge or pbs"
    )
    parser.add_argument("--to", metavar="DIALECT", help="write it as openmpi, mpich, intel, slime or slurm")
    args = parser.parse_args(argv)

    if (args.file is None) == (args.job is None):
        raise UsageError("no hostfile given", "give FILE, or --from lsf, sge or pbs")
    found = read_hostfile(args.file) if args.job is None else parse_hostfile(*job_hostfile(args.job, os.environ))
    for note in found.notes:
        print(f"hpcrl: note: {note}", file=sys.stderr)
    if args.to:
        print(write_hostfile(found.hosts, args.to), end="")
        return 0
    width = max(len(host.name) for host in found.hosts)
    rank = 0
    for host in found.hosts:
        last = rank + host.slots - 1
        ranks = "no rank" if not host.slots else f"rank {rank}" if host.slots == 1 else f"ranks {rank}-{last}"
        print(f"{host.name:{width}}  {count(host.slots, 'slot')}  {ranks}")
        rank += host.slots
    return 0
