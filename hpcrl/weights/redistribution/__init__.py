"""Who sends which rectangle of which tensor to whom: the plan of a weight update, as pure functions of numbers (numpy
alone).  Start with `layouts.py` (the two sides as data), then `plan.py`.
"""
