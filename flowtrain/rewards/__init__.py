"""Rewards of answers: by rules, with a language model as a fallback judge, or by user-written
functions.
"""

from flowtrain.rewards.functions import ByPolicy, RewardFunctions
from flowtrain.rewards.judge import Judge
from flowtrain.rewards.judge_cache import JudgeCache
from flowtrain.rewards.scorers import SCORERS
from flowtrain.rewards.scoring import is_refusal, score, score_one, shuffle_rewards

__all__ = [
    "SCORERS",
    "ByPolicy",
    "Judge",
    "JudgeCache",
    "RewardFunctions",
    "is_refusal",
    "score",
    "score_one",
    "shuffle_rewards",
]
