"""Sampling by vLLM: on this side of its process border, and on the other.

Here: `engine`, `runner`, `updates`, `process`. In vLLM's processes: `worker`, `executor`, `plugin`,
`plan`, `layouts`, `sharded_target`, `adapters`, `sampler_entropies`. `routes` is in both.
"""
