"""The training pass: model, token trees, optimizer, checkpoints."""
