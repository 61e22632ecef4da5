"""Payloads of groups in an object store (`dataflow.payloads`): the service puts them there, the
ledger keeps key, size and SHA-256 of each, and the trainer fetches it by these.

A key is used once, so that uploads which are repeated, or of rival attempts, replace nothing. The
digest is cryptographic: other bytes than those that the ledger has checked are not trained, whoever
may write to the store.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

from flowtrain.dataflow.contract import Batch, Refused, StoredPayload, Unavailable
from flowtrain.dataflow.wire import MAX_PUSH_BYTES
from flowtrain.net.objects import MissingObject, StoreSilent, open_objects, read_object
from flowtrain.types import UserError

_NUM_FETCHING = 8


class PayloadStore:
    """The payloads of one run. Threads may share it. Methods raise Unavailable when the store does
    not answer, or refuses.
    """

    def __init__(self, url: str, run: str, patience_s: float = 20.0) -> None:
        """`url`: see `open_objects`. UserError when it is none."""
        self._objects = open_objects(url, patience_s)
        self._run = run

    def __str__(self) -> str:
        return self._objects.url

    def new_key(self, work_item: int, attempt: int) -> str:
        return f"{self._run}/{work_item}-{attempt}-{uuid.uuid4().hex}"

    def put(self, key: str, payload: bytes) -> StoredPayload:
        with _available():
            self._objects.put(key, payload)
        return StoredPayload(key, len(payload), hashlib.sha256(payload).hexdigest())

    def get(self, stored: StoredPayload) -> bytes:
        """Fetch a payload. Raises Refused when it is missing, or other bytes than these."""
        where = f"{self}/{stored.key}"
        try:
            with _available():
                data = read_object(self._objects, stored.key, MAX_PUSH_BYTES)
        except MissingObject as error:
            raise Refused(str(error)) from error
        if len(data) != stored.num_bytes or hashlib.sha256(data).hexdigest() != stored.sha256:
            raise Refused(f"{where} holds other bytes than those that were pushed")
        return data

    def filled(self, batch: Batch) -> Batch:
        """Fetch the payloads that a batch only names."""
        with ThreadPoolExecutor(_NUM_FETCHING, "payloads") as threads:
            payloads = threads.map(
                lambda each: each.payload if each.stored is None else self.get(each.stored),
                batch.groups,
            )
            groups = [
                replace(each, payload=payload, stored=None)
                for each, payload in zip(batch.groups, payloads, strict=True)
            ]
        return replace(batch, groups=tuple(groups))

    def delete(self, keys: Sequence[str]) -> None:
        with _available():
            self._objects.delete(keys)


@contextmanager
def _available() -> Iterator[None]:
    """Take missing rights for an outage, too: a person may mend them while others wait."""
    try:
        yield
    except (StoreSilent, UserError) as error:
        raise Unavailable(str(error)) from error
