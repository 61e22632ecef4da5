"""The parts that runs, nodes, evaluations and replays are made of."""
