"""A run's output for people: its folder, logs, progress line, tables and curves.

The curves live in `flowtrain.report.curves`, which is a command of its own and is therefore not
imported here.
"""

from flowtrain.report.metrics import MetricsLog, TrajectoryLog, trajectory_record
from flowtrain.report.progress import Progress, ProgressLine
from flowtrain.report.run_dir import RunDir, atomic_write_text, manifest
from flowtrain.report.tables import aligned, comparison_table, markdown, write_summary

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
