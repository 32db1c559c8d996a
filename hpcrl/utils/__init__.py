"""Small mechanisms that every process needs, one of each; nothing here knows launchers or how anything is trained.

waiting.py          how long something may take, waiting for it, trying again, and when a peer was last heard of
plugins.py          plug-ins of a folder: one file, one name
arguments.py        the parser of commands that take no options of a run
untrusted_files.py  reading files that another user may have written
sample_parts.py     what a sample consists of: its status, columns and counts
shipped_files.py    examples, hostfiles, scripts and site profiles, which a wheel brings as well
"""
