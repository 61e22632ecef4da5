"""A rollout node: follows weights, leases work, pushes scored groups."""
