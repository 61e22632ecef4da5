"""Options of the algorithms."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from flowtrain.config.section import Section

LOSSES = ("clip", "gspo", "cispo")
"""Losses of flowkernels that reinforce."""


class Algorithm(Section):
    name: str = "flow_grpo"
    """flow_grpo: AgentFlow's; appo: rollouts branch where it matters most; infoflow: sub-goals earn
    rewards, stuck rollouts get hints; distill: a teacher says what it would write; dr_grpo, dapo,
    rloo, spo, reinforce_plus_plus: relatives of GRPO; FILE.py:CLASS: your own; or an entry point in
    the group flowtrain.algorithms"""
    mode: Literal["paper", "released"] = "paper"
    """paper: nested means, statistics over trajectories; released: token mean, statistics over
    turns, clip 0.2/0.3, dual clip 3"""
    loss: str = "clip"
    """token loss: clip (PPO's), gspo (GSPO's clip of the ratio of whole turns, which wants clips
    near 4e-4), cispo (CISPO's bounded ratio), or FILE.py:NAME of a function of yours"""
    clip_low: float | None = Field(None, ge=0, le=1)
    """ratio is clipped below 1 - clip_low; unset: the algorithm's, 0.2 or with m2po 0.95"""
    clip_high: float | None = Field(None, ge=0)
    """ratio is clipped above 1 + clip_high; unset: 0.2 (paper), 0.3 (released) or 0.28 (appo), with
    m2po 20"""
    dual_clip: float | None = Field(None, gt=1)
    """for negative advantages the loss is at most -dual_clip * advantage; unset: off (paper) or 3
    (released, appo)"""
    equal_groups: Literal["drop", "keep"] | None = None
    """questions whose rollouts all have one reward. drop: they leave the loss and what it is
    divided by; keep: their advantages are 0, and they count in the mean and in the KL term, as in
    AgentFlow's equation 5; unset: drop with appo and dapo, else keep"""
    turn_credit: Literal["rollout", "to_go"] = "rollout"
    """where a reward function or an environment gives rewards of turns. rollout: a turn has the
    advantage of its rollout, whose reward has those of its turns in it; to_go: that of the reward
    without what earlier turns have earned, among the rollouts that have so many turns"""
    dynamic_sampling: int | None = Field(None, ge=0)
    """rounds of further questions that a step may take in place of those whose rollouts all have
    one reward; unset: 0, or 9 with dapo"""
    overlong: Literal["train", "mask"] = "train"
    """rollouts that ran into a limit of tokens. mask: they are not trained, but count in the
    statistics of their group"""
    overlong_buffer: int = Field(0, ge=0)
    """DAPO's soft punishment: the reward falls linearly by 1 while the longest response of a
    rollout takes up the last so many of rollout.max_new_tokens; 0: off"""
    kl: Literal["k1", "k2", "k3", "low_var_kl"] = "k3"
    """estimator of the KL to the reference policy, the model that training started from;
    low_var_kl: verl's, which is k3 up to 10 and has no gradient beyond (AgentFlow's code)"""
    kl_coef: float = Field(0.001, ge=0)
    """weight of the KL term (AgentFlow: 0.001); 0 spares the reference policy, and is the default
    with distill and the relatives of GRPO"""
    entropy_coef: float = Field(0.0, ge=0)
    """weight of the entropy bonus"""
    tis: float | None = Field(None, gt=0)
    """truncated importance sampling (decoupled PPO): weigh tokens by min(pi_trainer / pi_sampler,
    tis); needs train.rescore"""
    mis: tuple[float, float] | None = None
    """masked importance sampling: drop tokens whose pi_trainer / pi_sampler is outside [low, high];
    needs train.rescore"""
    m2po: float | None = Field(None, gt=0)
    """M2PO, for stale rollouts: clip a mini-batch as wide as keeps the mean square of leaving
    log-ratios at this, say 0.04; unset: off"""
    shuffle_rewards: bool = False
    """control experiment: deal the rewards of a step out at random; nothing should be learnt"""

    @field_validator("loss")
    @classmethod
    def _known(cls, loss: str) -> str:
        if loss not in LOSSES and ":" not in loss:
            raise ValueError(f"{loss!r} is none of {', '.join(LOSSES)}, and no FILE.py:NAME")
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
    """N: rollouts of a question that begin with it; branches of these fill up the M =
    rollout.group_size"""
    rule: Literal["score", "entropy", "random"] = "score"
    """where to branch: score: entropy x decayed future ratio; entropy: its first factor; random:
    anywhere, a control"""
    spacing: int = Field(16, ge=0)
    """tokens that two branches of a root are apart, at least"""
    keep_token: bool = False
    """a branch keeps the token it was chosen for and goes on after it (the released code), instead
    of sampling that one anew"""
    advantage_groups: Literal["dual", "single"] = "dual"
    """dual: the rewards of roots and those of branches are normalised apart; single: together, the
    paper's ablation"""
    omega: Literal["reference", "behavior"] = "reference"
    """denominator of the future ratio: the policy that training started from, or the sampler's
    log-probs (for stale rollouts)"""
    scorer: str = ""
    """name in [engines] of the endpoint at which rollout nodes ask for the reference policy's
    log-probs (vLLM's server with the model of model.path); empty: each node has a copy of it"""
    gamma: float = Field(1.0, ge=0, le=1)
    """decay per token of the future ratio in the branching score"""
    clip: float = Field(0.2, gt=0, lt=1)
    """the future ratio in the branching score is clipped to 1 - clip and 1 + clip"""
    future_coef: float = Field(1.0, ge=0)
    """b in A (1 + b A_fut): how much the future ratio adds to an advantage; 0: off, and the loss is
    as cheap as Flow-GRPO's"""
    future_half_life: PositiveFloat = 64.0
    """tokens after which a ratio counts half in A_fut"""
    future_low: float = Field(1.0, ge=0)
    """least A_fut"""
    future_high: float = Field(1.2, ge=0)
    """greatest A_fut"""
    future_scope: Literal["turn", "rollout"] = "turn"
    """tokens that A_fut looks ahead to, and among which more than one that the dual clip bounds
    take a sequence out of the policy term. turn: those of the response; rollout: those of all later
    turns too, without prompts and tool results in between (the released code's rollouts are one
    response); one more forward pass"""
    dual_clipped: Literal["count", "drop"] = "count"
    """tokens of sequences that the dual clip takes out of the policy term. count: its mean is still
    over them; drop: over the others alone (the released code); one more forward pass"""

    @property
    def node_scorer(self) -> str:
        """Return what `BranchPoint.scorer` is on a rollout node."""
        return self.omega if self.rule == "score" else "sampler"


class Distill(Section):
    teacher: str = "policy"
    """policy: the policy as it is before a step, which distill.hint tells more; start: the model
    that training started from; a name in [engines]: the model at an endpoint that tells log-probs
    of prompts, as vLLM's server does; or the folder of a model. All have the policy's tokens"""
    top_k: int = Field(0, ge=0)
    """likeliest tokens that a teacher of [engines] tells in the place of each, all others being one
    outcome; 0: log-probs of sampled tokens, whose advantage is that less the sampler's"""
    hint: str = ""
    """text that the teacher alone reads, before its prompt; {answer} stands for the answers of the
    question"""
    divergence: Literal["reverse_kl", "forward_kl", "jsd"] = "reverse_kl"
    """over the whole vocabulary: reverse_kl: of the policy from the teacher; forward_kl: of the
    teacher from the policy; jsd: Jensen and Shannon's between both"""
    mix: float = Field(0.5, gt=0, lt=1)
    """share of the teacher in the distribution that jsd compares both with"""
    reward_coef: float = Field(0.0, ge=0)
    """weight of the policy term, by rewards as in flow_grpo, beside the divergence"""


class Infoflow(Section):
    sub_goal_weight: float = Field(0.3, ge=0)
    """w: a rollout that reached all sub-goals of its question earns so much more"""
    hint_rate: float = Field(1.0, ge=0, le=1)
    """share of the rollouts that may get a hint, at the first step; 0: no hints"""
    hint_until: float = Field(0.5, gt=0, le=1)
    """share of the steps after which there are none any more; the rate falls linearly to 0 until
    then"""
    hint_turn: PositiveInt = 5
    """first turn, counted from 0, that may read a hint"""
    hint_patience: PositiveInt = 1
    """turns in a row that reached no sub-goal before there is one"""
