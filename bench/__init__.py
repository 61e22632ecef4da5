"""Microbenchmarks: `python -m bench.<name>` prints a table beside the rivals of the same run and,
with --json F, writes its rows.
"""
