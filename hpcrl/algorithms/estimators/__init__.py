"""From rewards to advantages.

Each file holds `estimate(batch, options) -> Advantages`: see `interface.RolloutBatch` for what it sees.  The docstring
gives formula, source and use; NEEDS, OPTIONS, LOSS and KL are explained in `hpcrl/config/plugin_names.py`.
"""
