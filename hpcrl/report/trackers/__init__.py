"""Services that keep curves of many runs: one file each, which registers itself by its name (`hpcrl report --to NAME`).

`record.py` reads a run and knows what was sent before; `wandb.py`, `trackio.py` and `mlflow.py` send it.  A run itself
speaks to none of them: what they get comes from the run directory, by `hpcrl report --to` from wherever there is a
network, or by a process next to the rollout process (`live.py`).
"""
