"""The state of the dataflow in SQL."""

from flowtrain.dataflow.ledger.audit import Audit
from flowtrain.dataflow.ledger.curation import Decision, Event
from flowtrain.dataflow.ledger.ledger import Ledger, open_ledger

__all__ = ["Audit", "Decision", "Event", "Ledger", "open_ledger"]
