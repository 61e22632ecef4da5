"""Assembly of a run: the verbs of the loop, dry run, logging and checkpoints."""
