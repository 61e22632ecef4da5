"""The records, in the order in which data flows: Task -> Turn -> Trajectory -> Group -> Sample.

All are frozen; a later stage that knows more makes a new record with `dataclasses.replace`. Token
ids are plain ints, log-probabilities natural logs, times seconds. Only the standard library is
imported here.
"""

from flowtrain.records.rollout import (
    MAX_TOOL_CALLS,
    Action,
    BranchPoint,
    BranchStart,
    Group,
    PolicyName,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    Verdict,
)
from flowtrain.records.sample import FilterReason, Rollouts, Sample, SampleId, Scored, TrainBatch
from flowtrain.records.sampling import (
    Call,
    FinishReason,
    Likeliest,
    Routes,
    Sampling,
    SamplingMask,
    VersionSpan,
)
from flowtrain.records.task import Outage, PlanStep, SubGoal, Task, Unmet, UserError
from flowtrain.records.token_account import TokenAccount, account_of

__all__ = [
    "MAX_TOOL_CALLS",
    "Action",
    "BranchPoint",
    "BranchStart",
    "Call",
    "FilterReason",
    "FinishReason",
    "Group",
    "Likeliest",
    "Outage",
    "PlanStep",
    "PolicyName",
    "Rollouts",
    "Routes",
    "Sample",
    "SampleId",
    "Sampling",
    "SamplingMask",
    "Scored",
    "SubGoal",
    "Task",
    "TokenAccount",
    "ToolCall",
    "ToolResult",
    "TrainBatch",
    "Trajectory",
    "Turn",
    "Unmet",
    "UserError",
    "Verdict",
    "VersionSpan",
    "account_of",
]
