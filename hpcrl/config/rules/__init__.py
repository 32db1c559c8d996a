"""What options must say together; `option_rules.py` calls every rule of this room, in order.

Invariant: pure functions of the resolved options; nothing is read but what they name.
"""
