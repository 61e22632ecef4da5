"""The state of the dataflow in SQL."""

from flowtrain.rollouts.ledger.audit import Audit, audit_database
from flowtrain.rollouts.ledger.ledger import Ledger, open_ledger

__all__ = ["Audit", "Ledger", "audit_database", "open_ledger"]
