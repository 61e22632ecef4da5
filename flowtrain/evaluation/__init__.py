"""Measuring a policy on held-out questions and benchmarks: here, or by nodes."""
