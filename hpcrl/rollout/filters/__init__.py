"""Filters of groups, one a file, named as the option's value.

A dynamic one has `keep(options, samples)`, which judges a finished group; one of the buffer has `choose(options,
rollout_id, buffer, count)`, which says which waiting groups are continued. `custom_filters.py` loads and calls them,
and the user's own; `verdict.py` is what a dynamic one says.
"""
