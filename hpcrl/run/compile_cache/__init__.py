"""Compiled code, kept from one start of a role to the next, on whatever node that is.

`shape.py` says what compiled code depends on, `archive.py` packs a directory of it into one file and unpacks it,
`role_cache.py` is what a role does with them.
"""
