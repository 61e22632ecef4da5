"""Engines that sample: the protocol, torch, vLLM and chat engines, and one factory for them."""
