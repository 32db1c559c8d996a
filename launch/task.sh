#!/bin/bash
# What every task of an srun or an mpirun executes, on every host of a run:
#
#     task.sh PROGRAM ARGUMENTS...        PROGRAM: launch, probe, answer, doctor, selftest, host, once
#
#   launch  (mpirun) find out which host this is, and start its roles
#   probe   say which addresses this host has, before the plan is made
#   answer  leave an empty file of this host's name in a directory: it is alive
#   doctor  look whether this host has what a run needs
#   selftest  this host's ranks of hpcrl selftest
#   host    start this host's roles of the plan (trainer ranks, engines, rollout) and watch them
#   once    run a command on the first host only (what a recipe prepares)
#
# The environment that all of them share is set here and nowhere else.
set -euo pipefail

: "${HPCRL_PYTHON:=python3}"                      # the interpreter on the nodes; a container has its own
export PYTHONUNBUFFERED=1
unset HPCRL_PARENT                                # the launcher's; our parent is a daemon of srun or mpirun

program=$1
shift
if [ "$program" = launch ]; then exec "$HPCRL_PYTHON" -m hpcrl launch "$@"; fi

host=${SLURMD_NODENAME:?not a task of srun}
# A task of srun is no MPI rank: what it starts must not believe so.
unset "${!PMI_@}" "${!PMIX_@}" "${!OMPI_@}"
export HPCRL_CPUS="${SLURM_CPUS_ON_NODE:-}"       # ours of this host's, where nothing binds us to them
case $program in
once)
    if [ "${SLURM_PROCID:-0}" != 0 ]; then exit 0; fi
    exec "$HPCRL_PYTHON" -m hpcrl.run.process "$@"
    ;;
answer)
    : > "$1/$host"
    ;;
probe)
    if [ "${SLURM_LOCALID:-0}" != 0 ]; then exit 0; fi
    exec "$HPCRL_PYTHON" -m hpcrl.launch.probe "$@" --host "$host"
    ;;
doctor)
    if [ "${SLURM_LOCALID:-0}" != 0 ]; then exit 0; fi
    exec "$HPCRL_PYTHON" -m hpcrl.launch.node_checks.one_node "$@" --host "$host"
    ;;
selftest)
    if [ "${SLURM_LOCALID:-0}" != 0 ]; then exit 0; fi
    exec "$HPCRL_PYTHON" -m hpcrl.doctor.selftest.job "$@" --host "$host"
    ;;
host)
    if [ "${HPCRL_TASKS:-hosts}" = slots ]; then set -- "$@" --slot "$SLURM_LOCALID"; fi
    exec "$HPCRL_PYTHON" -m hpcrl.launch.host "$@" --host "$host"
    ;;
*)
    echo "task.sh: no program $program; there are launch, probe, answer, doctor, selftest, host, once" >&2
    exit 2
    ;;
esac
