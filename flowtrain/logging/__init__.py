"""Measurement and logging of a run: the sums of a step, its logs, tables and progress.

This package imports no module that needs torch.
"""

from flowtrain.logging.progress import Progress, ProgressLine
from flowtrain.logging.run_dir import RunDir, atomic_write_text, manifest
from flowtrain.logging.tables import aligned, comparison_table, markdown, write_summary
from flowtrain.logging.writers import MetricsLog, TrajectoryLog, trajectory_record

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
