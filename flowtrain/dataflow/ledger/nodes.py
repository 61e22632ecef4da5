"""A node's request to take part."""

from __future__ import annotations

import re
from dataclasses import dataclass

from flowtrain.config import Config
from flowtrain.config.options import to_toml
from flowtrain.dataflow.contract import Join, Joined, Refused
from flowtrain.dataflow.ledger.leases import check_layouts, end_leases_of, known_policies
from flowtrain.dataflow.ledger.schema import locked
from flowtrain.dataflow.ledger.sql import Database, Transaction, marks
from flowtrain.dataflow.ledger.trainers import policy_states


@dataclass(frozen=True, slots=True)
class Nodes:
    database: Database
    config: Config

    def join(self, request: Join) -> Joined:
        for name in (request.node, request.life):
            if not re.fullmatch(r"[A-Za-z0-9._-]{1,100}", name):
                raise Refused(
                    f"node {name[:100]!r}: a name has 1 to 100 letters, digits, '.', '_' and '-', "
                    "and so has a life"
                )
        with locked(self.database) as (transaction, meta):
            policies = transaction.all("SELECT * FROM policies")
            check_layouts(request.node, request.layouts, policies)
            known = "SELECT life FROM nodes WHERE name = ? AND life = ?"
            if not transaction.one(known, request.node, request.life):
                self._begin(transaction, request)
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
        """Note a new process of the node, and end the leases of its last one."""
        now = transaction.now()
        transaction.run("UPDATE nodes SET is_current = 0 WHERE name = ?", request.node)
        layouts = known_policies(self.config, request.layouts)
        row = (request.node, request.life, 1, now, now, layouts, "{}", "", 0.0, 0.0)
        transaction.run(f"INSERT INTO nodes VALUES {marks(row)}", *row)
        end_leases_of(transaction, request.node, "node began anew", self.config.dataflow)
