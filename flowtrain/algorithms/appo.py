"""APPO (arXiv 2606.12384): branch at decisive tokens, and credit the choices that led to the
branch.

Of the M rollouts per question N are roots; the others branch off a root in the middle of a response
(`algorithms/branching.py` chooses the token, `Flow.run` rewinds). Only roots are trained. A token
of a root has two advantages: the advantage of its rollout among the roots, and the mean advantage,
among the branches, of the branches that share the token (dual groups, eq. 6). The future-aware
factor of eqs. 7 and 8 is part of the loss (`flowkernels.future_aware`), because it depends on the
current policy.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from flowtrain.algorithms.advantages import Credits, normalise, reward_of
from flowtrain.algorithms.base import Algorithm, Branches, NodeSampler, Values
from flowtrain.config import Algorithm as Options
from flowtrain.records import BranchPoint, Group, UserError
from flowtrain.tasks.sets import TaskSet
from flowtrain.tools import Tool

if TYPE_CHECKING:
    from flowkernels import FutureRatio, LossSpec, TokenLossFn
    from transformers import PreTrainedTokenizerFast

    from flowtrain.agents.registry import AgentKind
    from flowtrain.trainer.minibatch_factor import MinibatchFactor
    from flowtrain.trainer.trainer import Trainer


class Appo(Algorithm):
    """APPO: some rollouts of a question branch off others; the objective is a mean over tokens."""

    average = "token"

    @property
    def num_roots(self) -> int:
        return self.config.appo.num_roots

    @property
    def needs_reference(self) -> bool:
        return super().needs_reference or self.branches_against_reference

    @property
    def branches_against_reference(self) -> bool:
        """Return whether branch scores compare the policy with the initial policy."""
        return (self.config.appo.rule, self.config.appo.omega) == ("score", "reference")

    @property
    def records_entropies(self) -> bool:
        """In fp32 the torch engine's entropies and log-probs are the trainer's but for rounding."""
        return (self.config.rollout.engine, self.config.model.dtype) == ("torch", "float32")

    @property
    def has_old_logprobs(self) -> bool:
        has_scored = not self.records_entropies
        return has_scored and self.config.train.rescore and not self.config.dataflow.url

    @property
    def has_ref_logprobs(self) -> bool:
        return self.branches_against_reference and self.config.algorithm.kl_coef > 0

    def branch(
        self,
        step: int,
        groups: Sequence[Group],
        trainer: Trainer | None,
        tokenizer: PreTrainedTokenizerFast,
    ) -> Branches:
        from flowtrain.algorithms.branching import branch

        assert trainer is not None, "ranks that branch train"
        against_reference = self.branches_against_reference
        return branch(self, step, groups, trainer, tokenizer, against_reference=against_reference)

    @property
    def needs_node_reference(self) -> bool:
        return self.branches_against_reference

    async def node_points(self, roots: Group, seed: int, sampler: NodeSampler) -> list[BranchPoint]:
        from flowtrain.algorithms.branching import node_points

        return await node_points(self.config, roots, seed, sampler)

    def token_credit(self, group: Group) -> Credits:
        return _dual(group, is_one_group=self.config.appo.advantage_groups == "single")

    def token_loss(self, spec: LossSpec) -> LossSpec | TokenLossFn:
        """Return the loss with future-aware advantages (eqs. 7 and 8), if a row of turns suffices
        to compute the factor.
        """
        from flowkernels import future_aware

        if not self._is_future_aware or self._needs_minibatch:
            return spec
        return future_aware(spec, self._future_ratio())

    def minibatch_factor(self) -> MinibatchFactor | None:
        """Return the future-aware factor over whole rollouts, or the one that removes dual-clipped
        sequences from the mean, if the options request either.
        """
        from flowkernels import future_factor

        from flowtrain.trainer.minibatch_factor import MinibatchFactor

        if not self._is_future_aware or not self._needs_minibatch:
            return None
        appo, dual_clip = self.config.appo, self.config.algorithm.dual_clip
        drops = appo.dual_clipped == "drop"
        factor = functools.partial(
            future_factor, future=self._future_ratio(), dual_clip=dual_clip, leaves_mean=drops
        )
        return MinibatchFactor(factor, joins_turns=appo.future_scope == "rollout")

    @property
    def _is_future_aware(self) -> bool:
        return self.config.appo.future_coef != 0

    @property
    def _needs_minibatch(self) -> bool:
        appo = self.config.appo
        return appo.future_scope == "rollout" or appo.dual_clipped == "drop"

    def _future_ratio(self) -> FutureRatio:
        from flowkernels import FutureRatio

        appo = self.config.appo
        return FutureRatio(
            appo.future_coef, appo.future_half_life, appo.future_low, appo.future_high
        )

    def defaults(self, chosen: Options) -> Values:
        clip = {} if chosen.m2po is not None else {"clip_high": 0.28}
        return super().defaults(chosen) | clip | {"dual_clip": 3.0, "equal_groups": "drop"}

    def check(self) -> None:
        super().check()
        self._refuse_options_of_samples()
        config, appo, rollout = self.config, self.config.appo, self.config.rollout
        if appo.num_roots >= rollout.group_size:
            raise UserError(
                f"appo.num_roots={appo.num_roots} must be below "
                f"rollout.group_size={rollout.group_size}, which includes the branches"
            )
        if rollout.num_engine_ranks:
            raise UserError(
                f"rollout.num_engine_ranks={rollout.num_engine_ranks} must be 0 with "
                "algorithm.name = 'appo', whose sampling ranks also score"
            )
        if appo.future_low > appo.future_high:
            raise UserError(
                f"appo.future_low={appo.future_low} must be at most "
                f"appo.future_high={appo.future_high}"
            )
        if appo.future_scope == "rollout" and config.train.minibatch_size:
            raise UserError(
                f"train.minibatch_size={config.train.minibatch_size} splits the turns of a "
                "rollout over several updates, which appo.future_scope='rollout' cannot span; set "
                "train.num_minibatches, which splits by question"
            )
        if config.algorithm.loss == "gspo" and appo.future_coef:
            raise UserError(
                "algorithm.loss='gspo' has no ratio per token; set appo.future_coef = 0"
            )

    def check_nodes(self) -> None:
        """Raise UserError if the log-probs that a node divides, the sampler's and another policy's,
        do not belong to the same kind of distribution.
        """
        config, rollout = self.config, self.config.rollout
        if config.appo.rule != "score":
            return
        for key, neutral in (("top_k", 0), ("top_p", 1.0)):
            if (value := getattr(rollout, key)) != neutral:
                raise UserError(
                    f"rollout.{key}={value} changes the sampler's distribution, so nodes cannot "
                    f"use its log-probs with appo.rule='score'; set {neutral}, or another rule"
                )
        scorer = config.appo.scorer
        if scorer and (scorer not in config.engines or config.engines[scorer].kind != "openai"):
            endpoints = [name for name, chat in config.engines.items() if chat.kind == "openai"]
            raise UserError(
                f"appo.scorer={scorer!r} must be an endpoint of [engines] (it has {endpoints}), "
                "or empty, so that each node scores with a copy of model.path"
            )
        is_vllm = rollout.engine == "vllm"
        asks_vllm = scorer if config.appo.omega == "reference" else is_vllm
        if asks_vllm and rollout.temperature != 1.0:
            raise UserError(
                f"rollout.temperature={rollout.temperature} must be 1, because vLLM provides the "
                f"log-probs of appo.omega={config.appo.omega!r} at temperature 1 only"
            )

    def check_agent(self, kind: AgentKind) -> None:
        policy = self.config.train.policy
        if kind.trains and policy != kind.trains[0]:
            raise UserError(
                f"train.policy={policy!r} must be {kind.trains[0]!r} with algorithm.name = 'appo', "
                "which branches within the responses that turns begin with"
            )
        if not kind.can_branch:
            agent = self.config.agent
            key = "environment" if agent.environment else "name"
            raise UserError(
                "algorithm.name='appo' rewinds rollouts and branches, which "
                f"agent.{key}={getattr(agent, key)!r} cannot do"
            )

    def check_inputs(self, tasks: TaskSet, tools: Mapping[str, Tool]) -> None:
        if stuck := [name for name, tool in tools.items() if tool.card.is_stateful]:
            raise UserError(
                f"algorithm.name='appo' rewinds rollouts; {stuck[0]!r} of agent.tools is stateful "
                "and cannot be rewound (docs/tools.md)"
            )


def _dual(group: Group, *, is_one_group: bool) -> Credits:
    """Return the advantages of the roots' tokens: the root's own plus the mean advantage of the
    branches that leave later; branches are not trained.

    `is_one_group`: normalise the rewards of roots and branches together.
    """
    roots = [(n, t) for n, t in enumerate(group.trajectories) if not t.error and t.branch is None]
    branches = [(t.branch, reward_of(t)) for t in group.finished if t.branch is not None]
    root_rewards = [reward_of(root) for _, root in roots]
    branch_rewards = [reward for _, reward in branches]
    if is_one_group:
        advantages = normalise(root_rewards + branch_rewards)
    else:
        advantages = normalise(root_rewards) + normalise(branch_rewards)
    branches_of = defaultdict[int, list[tuple[int, int, float]]](list)
    for (point, _), advantage in zip(branches, advantages[len(roots) :], strict=True):
        branches_of[point.parent].append((point.turn, point.token, advantage))
    credits = {
        n: [
            _of_turn(number, len(turn.call.response_ids), advantage, branches_of[n])
            for number, turn in enumerate(root.turns)
        ]
        for (n, root), advantage in zip(roots, advantages, strict=False)
    }
    return [credits.get(n) for n, t in enumerate(group.trajectories) if not t.error]


def _of_turn(
    turn: int, num_tokens: int, advantage: float, branches: Sequence[tuple[int, int, float]]
) -> list[float]:
    """Return the advantages of a turn's tokens. `branches`: turn, token and advantage of each
    branch of the rollout, which shares the tokens before.
    """
    # A branch that left in a later turn shares all tokens of this one.
    shared = [(num_tokens if at > turn else token, a) for at, token, a in branches if at >= turn]
    by_token = [[a for end, a in shared if token < end] for token in range(num_tokens)]
    return [advantage + (fmean(values) if values else 0.0) for values in by_token]
