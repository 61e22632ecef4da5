"""Measure and tell of a run: the sums of a step, its logs, tables and progress.

What needs torch is not imported here.
"""

from flowtrain.metrics.progress import Progress, ProgressLine
from flowtrain.metrics.run_dir import RunDir, atomic_write_text, manifest
from flowtrain.metrics.tables import aligned, comparison_table, markdown, write_summary
from flowtrain.metrics.writers import MetricsLog, TrajectoryLog, trajectory_record

__all__ = [
    "MetricsLog",
    "Progress",
    "ProgressLine",
    "RunDir",
    "TrajectoryLog",
    "aligned",
    "atomic_write_text",
    "comparison_table",
    "manifest",
    "markdown",
    "trajectory_record",
    "write_summary",
]
