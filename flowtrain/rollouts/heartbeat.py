"""Reports a trainer's progress to the dataflow from a thread, and shows that the trainer lives."""

from __future__ import annotations

import logging
import queue
import time
from dataclasses import replace
from threading import Thread

from flowtrain.rollouts.contract import Dataflow, Progress, Refused, Unavailable

_log = logging.getLogger(__name__)
_LAST_WORDS_S = 5.0


class Heartbeat:
    """Sends progress reports in order from a thread; repeats the last one in between."""

    def __init__(self, dataflow: Dataflow, interval_s: float, wait_s: float) -> None:
        """`wait_s`: longest wait for the dataflow to hear of the end of training."""
        self._dataflow, self._interval_s, self._wait_s = dataflow, interval_s, wait_s
        self._news: queue.Queue[Progress | None] = queue.Queue()
        self._thread = Thread(target=self._run, name="heartbeat", daemon=True)
        self._reported_s, self._waited_s, self._has_ended, self._is_done = 0.0, 0.0, False, False

    def start(self, progress: Progress) -> None:
        self._reported_s = time.monotonic()
        self._news.put(progress)
        self._thread.start()

    def waited(self, seconds: float) -> None:
        self._waited_s += seconds

    def report_progress(self, progress: Progress) -> None:
        """Send a report with the seconds since the last one."""
        now = time.monotonic()
        busy_s = max(0.0, now - self._reported_s - self._waited_s)
        self._news.put(replace(progress, busy_s=busy_s, waited_s=self._waited_s))
        self._reported_s, self._waited_s = now, 0.0
        self._is_done = progress.is_done

    def close(self) -> None:
        """Send what is queued and end. The wait is short, unless the end of training is to be told:
        nodes would wait for this trainer for ever.
        """
        self._news.put(None)
        if self._thread.is_alive():
            self._thread.join(self._wait_s if self._is_done else _LAST_WORDS_S)
        self._has_ended = True

    def _run(self) -> None:
        news = self._news.get()
        while news is not None:
            progress = news
            try:
                self._dataflow.progress(progress)
            except (Refused, Unavailable) as error:
                if self._has_ended:
                    return
                _log.warning(
                    "version %d could not be reported to the dataflow: %s",
                    progress.version,
                    error,
                )
            try:
                news = self._news.get(timeout=self._interval_s)
            except queue.Empty:  # a sign of life, whose seconds have been told already
                news = replace(progress, busy_s=0.0, waited_s=0.0)
