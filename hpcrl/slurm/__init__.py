"""Everything that knows Slurm's words: its queue, its partitions, its batch script and srun.

Open `scheduler.py` first: it is Slurm as hpcrl/launch/scheduler.py asks for it, from a login node.  `batch_process.py`
is the other side, inside a job, and `srun.py` starts that job's hosts.
"""
