"""Runs as HTML: one page of one run, one of several, each a file without a script that needs no network."""
