"""The run directory and what is in it, the processes of a run, and how a machine may fail them.

Open `rundir.py` first: it lists every file of a run directory and who writes it.  `role.py` is what the `main` of every
role has in common, `peers.py` how the processes of an attempt find each other.
"""
