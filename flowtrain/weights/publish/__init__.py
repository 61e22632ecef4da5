"""The trainer's side: what changed in the weights, as an immutable version."""
