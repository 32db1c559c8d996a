"""Built-in filters of --dynamic-sampling-filter-path, one a file, named as the option's value: `keep(options,
samples)`."""
