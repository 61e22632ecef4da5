"""Several servers of one store, such as the relay of a site and the origin: files come from the
nearest one that gives them.

All are asked for HEAD at once, and what left the store last counts, whoever passed it on: a relay
that lags, or has not heard of a rollback, leads no reader to another version. Files are asked for
by their checksums, which a relay that lags can do too. Distance is how long HEAD took; the source
changes when another one is twice as near, or when it fails.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from pathlib import Path
from typing import Protocol, TypeVar

from flowtrain.utils.threads import background
from flowtrain.weights.listing import Head
from flowtrain.weights.manifest import File, Manifest, NotThere, StoreError
from flowtrain.weights.store import Source

T = TypeVar("T")
_log = logging.getLogger(__name__)
_REST_S = 30.0
"""Seconds for which a source that failed is asked only where all others fail too."""
_GRACE_S = 2.0
"""Seconds that the others have to answer once one source has."""
_PAUSES_S = (0.0, 1.0, 3.0)
"""Before each round through the sources."""


class Server(Source, Protocol):
    """A source with several servers that can take its place."""

    def ask(self) -> Head | None:
        """Ask for HEAD; None in an empty store."""

    def read_manifest(self, version: int, checksum: str) -> Manifest:
        """Read the manifest of a checksum, or, where that is empty, the present one."""


class NearestStore:
    """See `Source`. Its sources share one cache, so that one goes on where another was cut."""

    def __init__(self, sources: Sequence[Server], pauses_s: Sequence[float] = _PAUSES_S) -> None:
        self._sources = list(sources)
        self._pauses_s = pauses_s
        self._newest: Head | None = None
        self._is_fresh = False
        """HEAD was asked for since the last load."""
        self._seconds: dict[Server, float] = {}
        """Seconds that sources took to answer."""
        self._rests: dict[Server, float] = {}
        """Sources that failed, with the time at which they are asked again."""
        self._used: Server | None = None

    def __str__(self) -> str:
        return ",".join(map(str, self._sources))

    def head(self) -> int | None:
        answers: list[Head | None] = []
        errors = [StoreError(f"{self}: no server")]
        for pause_s in self._pauses_s:
            if not answers:
                time.sleep(pause_s)
                answers, errors = self._ask_awake()
        if not answers:
            raise errors[-1]
        heads = [head for head in answers if head is not None]
        if heads and self._newest is not None:
            heads.append(self._newest)
        # Of those that may have been said at the same time, the one that knows more.
        last = max((head.asked_at for head in heads), default=0.0)
        current = [head for head in heads if head.said_at >= last]
        self._newest = max(current, key=lambda head: head.listing.head, default=None)
        self._is_fresh = True
        return None if self._newest is None else self._newest.listing.head

    def manifest(self, version: int) -> Manifest:
        newest = self._newest if self._is_fresh else None
        if newest is None or version > newest.listing.head:
            head = self.head()
            newest = self._newest
            if newest is None or version > newest.listing.head:
                text = "none" if head is None else head
                raise NotThere(f"version {version} is not at {self}; the newest there is {text}")
        checksum = newest.listing.manifests.get(version, "")
        return self._try(lambda source: source.read_manifest(version, checksum))

    def fetch(self, version: int, file: File) -> Path:
        return self._try(lambda source: source.fetch(version, file))

    def loaded(self, version: int) -> None:
        self._is_fresh = False
        for source in self._sources:
            source.loaded(version)

    def _ask_awake(self) -> tuple[list[Head | None], list[StoreError]]:
        """Ask the sources that do not rest, and where none of them answers the others."""
        now = time.monotonic()
        resting = [each for each in self._sources if self._rests.get(each, now) > now]
        answers, errors = self._ask([each for each in self._sources if each not in resting])
        if answers or not resting:
            return answers, errors
        answers, more = self._ask(resting)
        return answers, errors + more

    def _ask(self, sources: Sequence[Server]) -> tuple[list[Head | None], list[StoreError]]:
        """Ask sources at once. Returns their answers and errors."""
        asked = {background(source.ask, "ask"): source for source in sources}
        answers: list[Head | None] = []
        errors: list[StoreError] = []
        pending = set(asked)
        while pending:
            limit_s = _GRACE_S if answers else None
            done, pending = wait(pending, limit_s, FIRST_COMPLETED)
            if not done:
                for future in pending:
                    self._rest(asked[future], f"no answer {_GRACE_S:g} s after another one's")
                break
            for future in done:
                try:
                    head = future.result()
                except StoreError as error:
                    errors.append(error)
                    self._rest(asked[future], str(error))
                else:
                    answers.append(head)
                    self._is_back(asked[future], head)
        return answers, errors

    def _is_back(self, source: Server, head: Head | None) -> None:
        if self._rests.pop(source, None) is not None:
            _log.warning("%s answers again", source)
        if head is not None:
            self._seconds[source] = (self._seconds.get(source, head.seconds) + head.seconds) / 2

    def _rest(self, source: Server, why: str) -> None:
        if source not in self._rests:
            _log.warning("%s is left out for now: %s", source, why)
        self._rests[source] = time.monotonic() + _REST_S

    def _try(self, call: Callable[[Server], T]) -> T:
        """Return what the nearest source that can gives."""
        error = StoreError(f"{self}: no server")
        for pause_s in self._pauses_s:
            time.sleep(pause_s)
            is_there = False
            for source in sorted(self._sources, key=self._place):
                try:
                    done = call(source)
                except NotThere as failed:
                    error = failed
                except StoreError as failed:
                    error, is_there = failed, True
                    self._rest(source, str(failed))
                else:
                    self._use(source)
                    return done
            if not is_there:
                break
        raise error

    def _place(self, source: Server) -> tuple[bool, float]:
        seconds = self._seconds.get(source, float("inf"))
        return source in self._rests, seconds / 2 if source is self._used else seconds

    def _use(self, source: Server) -> None:
        if source is self._used:
            return
        why = ""
        if self._used is not None:
            why = "left out" if self._used in self._rests else self._distance(self._used)
            why = f" ({self._used}: {why})"
        _log.warning("weights come from %s, %s%s", source, self._distance(source), why)
        self._used = source

    def _distance(self, source: Server) -> str:
        return f"HEAD in {1000 * self._seconds.get(source, float('nan')):.1f} ms"
