"""Filters of groups: dynamic ones judge a finished group, buffer ones choose what is gone on with; a built-in is a
file."""
