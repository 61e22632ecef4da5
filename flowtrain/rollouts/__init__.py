"""The dataflow between rollout nodes, trainers and weights that come and go: nodes make groups of
rollouts under leases; each group is committed once and trained once.

contract.py   the requests of nodes and trainers and the answers; any program that keeps it can join
codec.py      messages and groups as bytes
ledger/       the answers: all state in SQL, SQLite or PostgreSQL
rules/        filters of prompts and groups, selection for batches
service.py    the ledger behind HTTP; client.py asks it; wire.py is what both agree on
show.py       the status as a table
"""
