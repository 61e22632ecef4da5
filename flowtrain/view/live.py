"""A run that is followed while it goes on: what a browser has not seen yet, as JSON.

A browser says what it has by a `Cursor`; nothing is kept per browser, so any number may look. The
newest rollouts stay in memory as JSON once a browser has asked for them, the texts of older ones do
not.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from flowtrain.report.curves import STAGES
from flowtrain.report.jsonl import json_value
from flowtrain.types import UserError, account_of
from flowtrain.view.data import MOST_POINTS, alarm_notes
from flowtrain.view.log import LOGS, Place, log_files
from flowtrain.view.page import MAX_BYTES
from flowtrain.view.rollouts import rollout_record
from flowtrain.view.run import facts, read_config, read_json, read_text, result_rows
from flowtrain.view.series import Metrics
from flowtrain.view.state import run_state
from flowtrain.view.tail import Line, Tail
from flowtrain.view.worst import NUM_SHOWN, distance, worst_token

_EVERY_S = 0.5
"""Least time between two looks at the files."""
_ANSWER_BYTES = 2 << 20
_ANSWER_S = 0.5
"""Bounds of the rollouts of one answer; one rollout is sent in any case."""


class Cursor(NamedTuple):
    """What a browser has."""

    epoch: int = -1
    """Times that the files were cut and read anew; what was sent in another epoch no longer counts.
    """
    record: int = 0
    """Records of metrics that it knows."""
    low: int = 0
    high: int = 0
    """Numbers of the oldest rollout that it has, and of the newest; 0: none."""
    head: str = ""
    """Checksum of the facts at the top."""


@dataclass(slots=True)
class _Entry:
    """A rollout, its number in the order of arrival, and its JSON once somebody has asked."""

    number: int
    place: Place
    text: str = ""


class LiveRun:
    """A run folder and all that was read of it. Threads may share it."""

    def __init__(self, path: Path, num_rollouts: int, max_bytes: int = MAX_BYTES) -> None:
        """Read nothing yet; the folder may come later.

        Args:
            num_rollouts: newest rollouts that are shown, in whole groups.
            max_bytes: of the lines of these; the oldest groups are left out beyond it.
        """
        self.path = path
        self._num_rollouts, self._max_bytes = num_rollouts, max_bytes
        self._lock = threading.Lock()
        self._epoch = (
            time.time_ns() // 1000
        )  # so that those of another process are not taken for ours
        self._looked_s = float("-inf")
        self._begin()

    def _begin(self) -> None:
        """Forget all that was read."""
        self._epoch += 1
        self._metrics = Metrics()
        self._metrics_tail = Tail(self.path / "metrics.jsonl")
        self._worst_tail = Tail(self.path / "worst_tokens.jsonl")
        self._worst: list[dict[str, Any]] = []
        self._tails: dict[Path, tuple[str, Tail, dict[tuple[int, int], int]]] = {}
        self._newest: deque[_Entry] = deque()
        self._num_bytes = self._num_logged = 0
        self._is_behind = False
        self._kept: dict[str, tuple[Any, Any]] = {}

    def answer(self, cursor: Cursor) -> dict[str, Any]:
        """Return what the browser lacks, as JSON values but for the texts of rollouts, which are
        JSON already.
        """
        with self._lock:
            self._look()
            is_new = cursor.epoch != self._epoch
            if is_new:
                cursor = Cursor(self._epoch)
            head = self._head()
            name = _checksum(head)
            rollouts, has_more = self._rollouts(cursor)
            state = run_state(self.path)
            return {
                "epoch": self._epoch,
                "is_new": is_new,
                "state": state.record(),
                "quiet_s": state.quiet_s and round(state.quiet_s, 1),
                "head_id": name,
                "head": None if name == cursor.head else head,
                "record": self._metrics.num_records,
                "panels": json_value(self._metrics.panels(cursor.record, MOST_POINTS)),
                "oldest": self._newest[0].number if self._newest else 0,
                "numbers": [entry.number for entry in rollouts],
                "has_more": has_more or self._is_behind,
                "rollouts": [entry.text for entry in rollouts],
            }

    # ---- reading

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked_s < _EVERY_S and not self._is_behind:
            return
        if not self._read():  # cut: from the beginning
            self._begin()
            self._read()
        self._looked_s = time.monotonic()

    def _read(self) -> bool:
        """Read what was appended; False where a file was cut."""
        for split in LOGS:
            for path in log_files(self.path, split):
                self._tails.setdefault(path, (split, Tail(path), {}))
        self._is_behind = False
        sinks: list[tuple[Tail, Callable[[Line], None]]] = [
            (self._metrics_tail, lambda line: self._metrics.add(line.record)),
            (self._worst_tail, self._take_worst),
            *((tail, self._taker(path)) for path, (_, tail, _) in self._tails.items()),
        ]
        for tail, take in sinks:
            news = tail.read()
            if news.is_restart:
                return False
            self._is_behind |= news.has_more
            for line in news.lines:
                take(line)
        return True

    def _take_worst(self, line: Line) -> None:
        self._worst = heapq.nlargest(NUM_SHOWN, [*self._worst, line.record], key=distance)

    def _taker(self, path: Path) -> Callable[[Line], None]:
        split, _, sizes = self._tails[path]

        def take(line: Line) -> None:
            record = line.record
            key = record["step"], int(record.get("group_index", 0))
            if key not in sizes and any(step != key[0] for step, _ in sizes):
                sizes.clear()  # a log is in the order of steps
            member = sizes[key] = sizes.get(key, -1) + 1
            place = Place(path, line.start, line.end, split, *key, member, record.get("reward"))
            self._num_logged += 1
            self._newest.append(_Entry(self._num_logged, place))
            self._num_bytes += line.end - line.start
            self._trim()

        return take

    def _trim(self) -> None:
        """Drop the oldest groups beyond the bounds."""
        while len(self._newest) > 1 and (
            len(self._newest) > self._num_rollouts or self._num_bytes > self._max_bytes
        ):
            group = self._newest[0].place.group
            while self._newest and self._newest[0].place.group == group:
                place = self._newest.popleft().place
                self._num_bytes -= place.end - place.start

    # ---- answering

    def _rollouts(self, cursor: Cursor) -> tuple[list[_Entry], bool]:
        """Choose what to send: rollouts newer than the browser's, oldest first, else older ones,
        newest first; and whether there are more.
        """
        if cursor.high:
            newer = [entry for entry in self._newest if entry.number > cursor.high]
            older = [entry for entry in reversed(self._newest) if entry.number < cursor.low]
        else:
            newer, older = [], list(reversed(self._newest))
        wanted = newer or older
        end = time.monotonic() + _ANSWER_S
        chosen: list[_Entry] = []
        num_bytes = 0
        for entry in wanted:
            if chosen and (num_bytes > _ANSWER_BYTES or time.monotonic() > end):
                break
            entry.text = entry.text or self._text(entry.place)
            num_bytes += len(entry.text)
            chosen.append(entry)
        return chosen, len(chosen) < len(newer) + len(older)

    def _text(self, place: Place) -> str:
        tokenizer = self._keep("tokenizer", "tokenizer.json", _tokenizer, None)
        try:
            record = rollout_record(place, place.read(), tokenizer)
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
            # The file was cut since its lines were found, which the next look sees; or the line is
            # none of a rollout.
            return "null"
        return json.dumps(json_value(record), separators=(",", ":"), allow_nan=False)

    def _head(self) -> dict[str, Any]:
        """All that the top of the page says."""
        notes: list[str] = []
        config = self._keep("config", "config.toml", lambda _: read_config(self.path), {}, notes)
        manifest = self._keep("manifest", "manifest.json", read_json, {}, notes)
        totals = self._metrics.totals()
        account = account_of(totals)
        tokenizer = self._keep("tokenizer", "tokenizer.json", _tokenizer, None, notes)
        alarms = self._keep("alarms", "alarms.jsonl", lambda _: alarm_notes(self.path), [], notes)
        head = {
            "name": self.path.resolve().name,
            "facts": [
                *facts(config, manifest),
                *([("Tokens", account.text())] if account.sampled else []),
            ],
            "config": self._keep("text", "config.toml", read_text, ""),
            "step": self._metrics.step,
            "num_steps": self._num_steps(config),
            "reward": self._metrics.ends("eval_reward"),
            "versions": self._metrics.ends("version"),
            "seconds": {
                stage: round(totals[f"{stage}_s"], 3)
                for stage in (*STAGES, "checkpoint")
                if totals.get(f"{stage}_s")
            },
            "num_logged": self._num_logged,
            "results": self._results(notes),
            "worst": [worst_token(each, tokenizer) for each in self._worst],
            "shown": self._shown(),
            "notes": [*notes, *alarms, *self._damage()],
        }
        cleaned: dict[str, Any] = json_value(head)
        return cleaned

    def _num_steps(self, config: Any) -> int | None:
        # Only a warm-up logs steps that have no version of the weights.
        is_warm_up = self._metrics.num_records and not self._metrics.ends("version")
        found: int | None = config.get("rft" if is_warm_up else "train", {}).get("num_steps")
        return found

    def _results(self, notes: list[str]) -> list[tuple[str, str, str, str]]:
        signs = [_sign(self.path / name) for name in ("warm.json", "summary.json")]
        return self._made("results", signs, lambda: result_rows(self.path), [], notes)

    def _shown(self) -> str:
        if len(self._newest) == self._num_logged:
            return f"All {self._num_logged:,} logged rollouts."
        return (
            f"The newest {len(self._newest):,} of {self._num_logged:,} logged rollouts; "
            "without --serve a page has groups of all steps."
        )

    def _damage(self) -> Iterable[str]:
        tails = (self._metrics_tail, *(tail for _, tail, _ in self._tails.values()))
        return [
            f"{tail.path.name}: {tail.num_damaged} lines are no JSON objects with a step."
            for tail in tails
            if tail.num_damaged
        ]

    def _keep(
        self,
        key: str,
        name: str,
        make: Callable[[Path], Any],
        default: Any,
        notes: list[str] | None = None,
    ) -> Any:
        """What is made of a file of the run, made again when the file has changed."""
        path = self.path / name
        return self._made(key, _sign(path), lambda: make(path), default, notes)

    def _made(
        self,
        key: str,
        sign: Any,
        make: Callable[[], Any],
        default: Any,
        notes: list[str] | None = None,
    ) -> Any:
        """What was made at this sign; a file that cannot be read is named in `notes`."""
        kept = self._kept.get(key)
        if kept is None or kept[0] != sign:
            try:
                made = make(), ""
            except UserError as error:
                made = default, str(error)
            kept = self._kept[key] = sign, made
        value, problem = kept[1]
        if problem and notes is not None:
            notes.append(problem)
        return value


def _tokenizer(path: Path) -> Tokenizer | None:
    return Tokenizer.from_file(str(path)) if path.is_file() else None


def _sign(path: Path) -> tuple[int, int] | None:
    """What changes with a file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _checksum(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=9).hexdigest()


def to_json(answer: dict[str, Any]) -> bytes:
    """Write an answer, whose rollouts are JSON already; pure ASCII."""
    texts = answer["rollouts"]
    rest = json.dumps({**answer, "rollouts": []}, separators=(",", ":"), allow_nan=False)
    assert rest.endswith('"rollouts":[]}'), "rollouts are the last entry"
    return f"{rest[:-2]}{','.join(texts)}]}}".encode("ascii")
