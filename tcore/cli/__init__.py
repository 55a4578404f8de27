"""The command line: a verb, a function."""
