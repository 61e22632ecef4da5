"""The state of the dataflow in SQL."""

from flowtrain.dataflow.ledger.audit import Audit, audit_database
from flowtrain.dataflow.ledger.ledger import Ledger, open_ledger

__all__ = ["Audit", "Ledger", "audit_database", "open_ledger"]
