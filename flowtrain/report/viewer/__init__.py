"""A run as one HTML file that needs nothing else: `python -m flowtrain.report.viewer RUN`."""
