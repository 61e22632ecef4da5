"""Rollout nodes, trainers and weights that come and go: groups of rollouts under leases, each
committed once and consumed once.

contract.py   what nodes and trainers ask, and what they are answered; whoever keeps to it can take
part codec.py      messages and groups as bytes ledger/       the answers: all state in SQL, SQLite
or PostgreSQL rules/        curation of prompts, filtering of groups, selection for batches
service.py    the ledger behind HTTP; client.py asks it there pool.py       how many nodes would do;
local_pool.py starts and ends them on this machine
"""
