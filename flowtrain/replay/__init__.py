"""Makes a run again from its replay log, and compares every version."""

from pathlib import Path

from flowtrain.records import UserError


def log_path(run: Path) -> Path:
    """Return the replay log of a run folder. Raises UserError where there is none."""
    path = run / "replay" / "steps.jsonl"
    if not path.is_file():
        raise UserError(
            f"{run} has no {path.relative_to(run)}: only a run with --log.replay true writes it"
        )
    return path
