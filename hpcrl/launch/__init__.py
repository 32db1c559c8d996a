"""Jobs, attempts and hosts: how a recipe becomes processes, on whatever machines a backend brings.

Open `job.py` first (a recipe's stages, one after another), then `attempts/` (one attempt after another, seen from the
launcher) and `host.py` (the processes of one host).  `batch_run.py` is a run inside a Slurm job (`allocation.py`),
`site.py` the profile of a cluster. `slurm/` and `mpi/` know these, and nothing else in hpcrl does.
"""
