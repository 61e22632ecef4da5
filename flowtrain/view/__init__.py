"""Runs as pages, in one HTML file or followed while they go on: `python -m flowtrain.view RUN`."""
