"""How fast a run can be, from what it computes and what a GPU is rated for.

`flops.py` counts operations, `cards.py` has the rates, `estimate.py` puts both together before a run; a run logs what
it reached.  docs/memory.md has the formulas.
"""
