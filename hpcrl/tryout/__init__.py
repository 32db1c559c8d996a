"""Trying things out: an engine that stays up for a while, for `hpcrl try` and `hpcrl chat`; `hpcrl serve`."""
