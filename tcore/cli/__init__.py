"""The command line: a dataclass for every verb, parsed by tyro; its `run` does the work."""
