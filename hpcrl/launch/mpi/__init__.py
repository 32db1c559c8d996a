"""A run over the machines of a hostfile, with mpirun.

Open `mpirun.py` first: it calls mpirun and waits for its end.  Under mpirun, `rank_main.py` is what every rank does:
rank 0 launches the run (`launcher_rank.py`), the others start what it orders (`host_rank.py`).  `hostfile.py` reads and
writes hostfiles of every dialect.
"""
