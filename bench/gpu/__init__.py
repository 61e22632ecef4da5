"""What minutes on one GPU must answer, in plans of stages: `python -m bench.gpu --help`."""
