"""Everything that knows Slurm's words: its queue, its partitions, its batch script and srun.

Open `submission.py` first: how a run becomes a job, from a login node.  `batch_process.py` is the other side, inside a
job, and `srun.py` starts that job's hosts.
"""
