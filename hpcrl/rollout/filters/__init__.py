"""Filters of groups: dynamic ones judge a finished group, buffer ones choose which groups to continue with.

A built-in filter is a file in `dynamic/` or `buffer/`; `custom_filters.py` loads and calls them.
"""
