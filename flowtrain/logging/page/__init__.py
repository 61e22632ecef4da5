"""A run as a page, in one HTML file or served: `python -m flowtrain.view RUN`."""
