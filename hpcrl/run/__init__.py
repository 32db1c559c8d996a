"""The run directory and what lies in it, the processes of a run, and what a machine may do to them.

Open `rundir.py` first: it lists every file of a run directory and who writes it.  `role.py` is what the `main` of every
role has in common, `peers.py` how the processes of an attempt find each other.
"""
