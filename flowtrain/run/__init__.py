"""A run put together: components, policy trainer, placement, evaluation, logging, checkpoints."""
