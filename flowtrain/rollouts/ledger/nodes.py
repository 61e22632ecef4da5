"""A node's request to take part."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

from flowtrain.config import Config
from flowtrain.config.options import to_toml
from flowtrain.rollouts.contract import Join, Joined, Refused
from flowtrain.rollouts.ledger.leases import end_leases_of
from flowtrain.rollouts.ledger.schema import locked
from flowtrain.rollouts.ledger.sql import Database, Transaction, marks
from flowtrain.rollouts.ledger.trainers import check_layouts, known_policies, policy_states

_log = logging.getLogger(__name__)
_RETIRED_S = 3600.0
"""Seconds without a sign of life after which a node is forgotten, at least; no request takes as
long, so that none of it comes later."""


@dataclass(frozen=True, slots=True)
class Nodes:
    database: Database
    config: Config

    def join(self, request: Join) -> Joined:
        for name in (request.node, request.life):
            if not re.fullmatch(r"[A-Za-z0-9._-]{1,100}", name):
                raise Refused(
                    f"node {name[:100]!r}: a name and a life must have 1 to 100 letters, digits, "
                    "'.', '_' and '-'"
                )
        with locked(self.database) as (transaction, meta):
            policies = transaction.all("SELECT * FROM policies")
            check_layouts(request.node, request.layouts, policies)
            query = "SELECT life FROM nodes WHERE name = ? AND life = ?"
            if not transaction.one(query, request.node, request.life):
                self._begin(transaction, request)
            elif request.layouts:  # it had no engines yet when it joined first
                transaction.run(
                    "UPDATE nodes SET layouts = ? WHERE name = ? AND life = ?",
                    *(known_policies(self.config, request.layouts), request.node, request.life),
                )
            transaction.run(
                "UPDATE nodes SET seen_s = ? WHERE name = ? AND life = ?",
                *(transaction.now(), request.node, request.life),
            )
        return Joined(
            run=meta.run,
            config=to_toml(self.config),
            group_size=self.config.rollout.group_size,
            lease_s=self.config.dataflow.lease_s,
            policies=policy_states(policies),
        )

    def _begin(self, transaction: Transaction, request: Join) -> None:
        """Note a new process of the node, which goes on with the seconds of its last one, and end
        the leases of that. Nodes that were not heard for longer than one waits for the service go:
        pools that come and go give each node a name of its own.
        """
        now = transaction.now()
        previous = transaction.one(
            "SELECT busy_s, waited_s FROM nodes WHERE name = ? ORDER BY seen_s DESC LIMIT 1",
            request.node,
        )
        seconds = (0.0, 0.0) if previous is None else (previous.busy_s, previous.waited_s)
        silent_s = max(_RETIRED_S, 2 * self.config.dataflow.wait_s)
        transaction.run("DELETE FROM nodes WHERE seen_s < ? AND is_current >= 0", now - silent_s)
        transaction.run(
            "UPDATE nodes SET is_current = 0 WHERE name = ? AND is_current = 1", request.node
        )
        layouts = known_policies(self.config, request.layouts)
        row = (request.node, request.life, 1, now, now, layouts, "{}", "", *seconds)
        transaction.run(f"INSERT INTO nodes VALUES {marks(row)}", *row)
        end_leases_of(transaction, request.node, "node began anew", self.config.dataflow)
        _log.info("node %s %s", request.node, "joined" if previous is None else "began anew")
