"""Benchmarks: the flow, or a rival, asked every question of a data set."""
