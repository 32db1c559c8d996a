"""How trainer ranks are started: under torchrun, or one by one by srun and mpirun.  Start with `torchrun.py`."""
