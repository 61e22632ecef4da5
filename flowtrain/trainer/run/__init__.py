"""A run put together: the loop's verbs, the dry run, logging, checkpoints."""
