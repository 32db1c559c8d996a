"""What options must say together: those of `sections/NAME.py` in `NAME.py` here; `option_rules.py` calls every rule, in
order.

Invariant: pure functions of the resolved options; nothing is read but what they name.
"""
