"""A campaign of faults: at drawn moments something is done to a run, and after each it is looked at what became of the
run.

beds.py      where runs run: on this machine (local.py, with and without engines), under Slurm and under mpirun (hosts.py)
kinds.py     what is done to whom, and what must come of it
checks.py    what must hold after every fault: the ledger, the checkpoints, equality with a run that nobody disturbed
campaign.py  one fault after another in one run directory, until the run has come to its end; then another run
"""
