"""Options of the algorithms."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from flowtrain.config.section import Section

LOSSES = ("clip", "gspo", "cispo")
"""Losses of flowkernels that reinforce."""


class Algorithm(Section):
    name: str = "flow_grpo"
    """flow_grpo: AgentFlow's; appo: rollouts branch at decisive tokens; infoflow: rewards for
    sub-goals, hints for stuck rollouts; distill: on-policy distillation from a teacher; dr_grpo,
    dapo, rloo, spo, reinforce_plus_plus: relatives of GRPO; FILE.py:CLASS: a custom algorithm; or
    an entry point in the group flowtrain.algorithms"""
    mode: Literal["paper", "released"] = "paper"
    """paper: nested means, statistics over trajectories; released: token mean, statistics over
    turns, clip 0.2/0.3, dual clip 3"""
    loss: str = "clip"
    """token loss: clip (PPO's), gspo (GSPO's clip of the ratio of whole turns, which needs clips
    near 4e-4), cispo (CISPO's bounded ratio), or FILE.py:NAME of a custom function"""
    clip_low: float | None = Field(None, ge=0, le=1)
    """lower clip bound of the ratio is 1 - clip_low; unset: 0.2, or 0.95 with m2po"""
    clip_high: float | None = Field(None, ge=0)
    """upper clip bound of the ratio is 1 + clip_high; unset: 0.2 (paper), 0.3 (released) or 0.28
    (appo), and 20 with m2po"""
    dual_clip: float | None = Field(None, gt=1)
    """for negative advantages the loss is at most -dual_clip * advantage; unset: off (paper) or 3
    (released, appo)"""
    equal_groups: Literal["drop", "keep"] | None = None
    """treatment of questions whose rollouts all have the same reward. drop: excluded from the loss
    and its divisor; keep: their advantages are 0, but they count in the mean and in the KL term, as
    in AgentFlow's equation 5; unset: drop with appo and dapo, else keep"""
    turn_credit: Literal["rollout", "to_go"] = "rollout"
    """credit for rewards per turn, from a reward function or an environment. rollout: every turn
    gets the advantage of the rollout's reward, which includes the turn rewards; to_go: a turn gets
    the advantage of the reward without earlier turns' rewards, compared with the rollouts that
    reach this turn"""
    dynamic_sampling: int | None = Field(None, ge=0)
    """largest number of rounds of further questions per step that replace questions whose rollouts
    all have the same reward; unset: 0, or 9 with dapo"""
    overlong: Literal["train", "mask"] = "train"
    """treatment of rollouts that reach a token limit. mask: not trained, but counted in the
    statistics of their group"""
    overlong_buffer: int = Field(0, ge=0)
    """DAPO's soft overlong punishment: the reward falls linearly, by up to 1, as the longest
    response of a rollout uses this many last tokens of rollout.max_new_tokens; 0: off"""
    kl: Literal["k1", "k2", "k3", "low_var_kl"] = "k3"
    """estimator of the KL to the reference policy, the initial model; low_var_kl: verl's k3,
    clamped at 10 and without gradient there (AgentFlow's code)"""
    kl_coef: float = Field(0.001, ge=0)
    """weight of the KL term (AgentFlow: 0.001); 0 needs no reference policy and is the default with
    distill and the relatives of GRPO"""
    entropy_coef: float = Field(0.0, ge=0)
    """weight of the entropy bonus"""
    tis: float | None = Field(None, gt=0)
    """truncated importance sampling (decoupled PPO): weigh tokens by min(pi_trainer / pi_sampler,
    tis); needs train.rescore"""
    mis: tuple[float, float] | None = None
    """masked importance sampling: drop tokens whose pi_trainer / pi_sampler is outside [low, high];
    needs train.rescore"""
    m2po: float | None = Field(None, gt=0)
    """M2PO, for stale rollouts: clip each mini-batch so that the mean square of the log-ratios
    moving away stays at most this, e.g. 0.04; unset: off"""
    shuffle_rewards: bool = False
    """control experiment: permute the rewards of a step at random; the policy should learn nothing
    """

    @field_validator("loss")
    @classmethod
    def _known(cls, loss: str) -> str:
        if loss not in LOSSES and ":" not in loss:
            raise ValueError(f"{loss!r} must be one of {', '.join(LOSSES)}, or FILE.py:NAME")
        return loss

    @property
    def has_own_loss(self) -> bool:
        """The loss is a function of the user's."""
        return self.loss not in LOSSES

    @property
    def scores_sub_goals(self) -> bool:
        """Rollouts come with a score of their sub-goals."""
        return self.name == "infoflow"

    @property
    def places_branches(self) -> bool:
        """Rollouts leave others where a score says so."""
        return self.name == "appo"


class Appo(Section):
    num_roots: PositiveInt = 4
    """N: rollouts that start from the question; branches complete the M = rollout.group_size"""
    rule: Literal["score", "entropy", "random"] = "score"
    """choice of branch points: score: entropy x decayed future ratio; entropy: the first factor
    alone; random: any token, as a control"""
    spacing: int = Field(16, ge=0)
    """smallest distance in tokens between two branch points of a root"""
    keep_token: bool = False
    """a branch keeps the token at its branch point and continues after it (the released code),
    instead of sampling this token again"""
    advantage_groups: Literal["dual", "single"] = "dual"
    """dual: normalise rewards of roots and of branches separately; single: together (an ablation)
    """
    omega: Literal["reference", "behavior"] = "reference"
    """denominator of the future ratio: the initial policy (reference), or the sampler's log-probs
    (behavior; for stale rollouts)"""
    scorer: str = ""
    """name in [engines] of the endpoint that gives rollout nodes the reference policy's log-probs
    (vLLM's server with the model of model.path); empty: each node holds a copy of the model"""
    gamma: float = Field(1.0, ge=0, le=1)
    """decay per token of the future ratio in the branching score"""
    clip: float = Field(0.2, gt=0, lt=1)
    """the future ratio in the branching score is clipped to [1 - clip, 1 + clip]"""
    future_coef: float = Field(1.0, ge=0)
    """b in A (1 + b A_fut): weight of the future ratio; 0: off, as cheap as Flow-GRPO"""
    future_half_life: PositiveFloat = 64.0
    """number of tokens after which a ratio counts half in A_fut"""
    future_low: float = Field(1.0, ge=0)
    """lower bound of A_fut"""
    future_high: float = Field(1.2, ge=0)
    """upper bound of A_fut"""
    future_scope: Literal["turn", "rollout"] = "turn"
    """tokens that A_fut looks ahead to; a sequence with more than one dual-clipped token among them
    leaves the policy term. turn: the tokens of the response; rollout: also the responses of all
    later turns (in the released code a rollout is one response), at the cost of one more forward
    pass"""
    dual_clipped: Literal["count", "drop"] = "count"
    """treatment of tokens in sequences that the dual clip removes from the policy term. count: they
    still count in its mean; drop: they do not (the released code), at the cost of one more forward
    pass"""

    @property
    def node_scorer(self) -> str:
        """Return what `BranchPoint.scorer` is on a rollout node."""
        return self.omega if self.rule == "score" else "sampler"


class Distill(Section):
    teacher: str = "policy"
    """policy: the policy before the step, which also reads distill.hint; start: the initial model;
    a name in [engines]: a model behind an endpoint that returns log-probs of prompts, as vLLM's
    server does; or the folder of a model. All need the policy's vocabulary"""
    top_k: int = Field(0, ge=0)
    """likeliest tokens per position from a teacher in [engines], compared together with one outcome
    for all others; 0: log-probs of the sampled tokens alone, as advantages"""
    hint: str = ""
    """text before the teacher's prompt alone; {answer} stands for the question's answers"""
    divergence: Literal["reverse_kl", "forward_kl", "jsd"] = "reverse_kl"
    """divergence over the whole vocabulary: reverse_kl: KL(policy || teacher); forward_kl:
    KL(teacher || policy); jsd: Jensen-Shannon divergence"""
    mix: float = Field(0.5, gt=0, lt=1)
    """share of the teacher in the mixture distribution of jsd"""
    reward_coef: float = Field(0.0, ge=0)
    """weight of flow_grpo's policy term, added to the divergence"""


class Infoflow(Section):
    sub_goal_weight: float = Field(0.3, ge=0)
    """w: additional reward of a rollout that reaches all sub-goals of its question"""
    hint_rate: float = Field(1.0, ge=0, le=1)
    """share of the rollouts that may get a hint at the first step; 0: no hints"""
    hint_until: float = Field(0.5, gt=0, le=1)
    """share of the steps after which hints end; until then the rate falls linearly to 0"""
    hint_turn: PositiveInt = 5
    """first turn, counted from 0, that may read a hint"""
    hint_patience: PositiveInt = 1
    """consecutive turns without a new sub-goal before a hint"""
