"""Sampling engines: the protocol, the torch, vLLM and chat engines, and their factory."""
