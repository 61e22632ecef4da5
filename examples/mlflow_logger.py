"""The numbers of a run in MLflow: `--log.loggers examples/mlflow_logger.py:MlflowLogger`.

MLFLOW_TRACKING_URI says where; `pip install mlflow-skinny`.
"""

import time

from mlflow.entities import Metric
from mlflow.tracking import MlflowClient


class MlflowLogger:
    """Called on a thread of its own: a server that is slow keeps no step waiting."""

    def __init__(self, context):
        self.client = MlflowClient()
        name = context.options.get("experiment", "flowtrain")
        found = self.client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self.client.create_experiment(name)
        path = context.run_dir / "mlflow_id.txt"
        if not path.exists():  # a run that resumes goes on with the same one
            run = self.client.create_run(experiment, run_name=context.run_dir.name)
            path.write_text(run.info.run_id)
        self.run_id = path.read_text()

    def log(self, step, numbers):
        now = int(1000 * time.time())
        metrics = [Metric(key, value, now, step) for key, value in numbers.items()]
        self.client.log_batch(self.run_id, metrics[:1000])

    def close(self):
        self.client.set_terminated(self.run_id)
