"""The engine's side: bring tensors from the version that they hold to another one, in place."""
