"""Words that all rooms share: bases, errors, registries, files, threads."""
