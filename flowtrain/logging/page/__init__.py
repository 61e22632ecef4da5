"""A run as a page, in one HTML file or served: `python -m flowtrain.logging.page RUN`."""
