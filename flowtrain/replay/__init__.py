"""Makes a run again from its replay log, and compares every version."""
