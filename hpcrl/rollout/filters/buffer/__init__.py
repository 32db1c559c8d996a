"""Built-in filters of --buffer-filter-path, one a file, named as the option's value: `choose(options, rollout_id,
buffer, count)`."""
