"""A rollout node: follows weights, leases work items, and pushes scored groups."""
