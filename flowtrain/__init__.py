"""flowtrain: a lean, kernel-centric RL trainer for LLM agents."""

__version__ = "0.1.0"
