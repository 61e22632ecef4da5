"""The training pass: model, packed rows, optimizer, checkpoints."""
