"""How many bytes a run will take, on each GPU and on each host, before anything is started; docs/sizing.md has the
formulas.  Start with `report.py`, which puts the estimates of the other modules together.
"""
