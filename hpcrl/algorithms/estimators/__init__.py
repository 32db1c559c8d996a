"""From rewards to advantages.

To add one, add a file: its name is the value of --advantage-estimator.  It holds
`estimate(batch, options) -> Advantages`: see `interface.RolloutBatch` for what it sees.  The docstring
gives formula, source and use; NEEDS, OPTIONS, LOSS and KL are explained in `hpcrl/config/plugin_names.py`.
"""
