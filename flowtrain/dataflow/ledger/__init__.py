"""The state of the dataflow in SQL."""
