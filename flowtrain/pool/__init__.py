"""The rollout nodes as a run sees them: its batches and evaluations come from the dataflow."""
