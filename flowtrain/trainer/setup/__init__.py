"""The components of runs, nodes, evaluations and replays."""
