"""Which shape to ask a scheduler for: nodes, parallel sizes, engines, each checked, estimated, and the best rehearsed.

`shapes.py` says what a run can be cut into, `search.py` which of these hold it, `rows.py` how long each takes and in
which order they come, `rehearsed.py` tries the best, `table.py` shows them, `applied_recipe.py` writes one into a
recipe.  docs/fit.md.
"""
