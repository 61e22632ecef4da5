"""What `[algorithm]`, `[appo]` and `[infoflow]` ask for, as the parts of a run understand it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from flowkernels import FutureRatio, LossSpec
from transformers import PreTrainedTokenizerFast

from flowtrain.agents.hints import Hints
from flowtrain.algorithms import appo, flow_grpo, infoflow
from flowtrain.algorithms.branching import BranchRule
from flowtrain.config import Config
from flowtrain.training.trainer import OptimSpec
from flowtrain.types import Group, TrainBatch


def loss_spec(config: Config) -> LossSpec:
    """The token loss of `[algorithm]`."""
    a = config.algorithm
    assert a.clip_low is not None and a.clip_high is not None, "filled in by the config"
    return LossSpec(
        a.loss,
        a.clip_low,
        a.clip_high,
        a.dual_clip,
        a.kl_coef,
        a.kl,
        a.entropy_coef,
        tis=a.tis,
        mis=a.mis,
    )


def optim_spec(config: Config) -> OptimSpec:
    t = config.train
    has_old, has_ref = scored_before(config)
    rescore = t.rescore and not has_old
    return OptimSpec(
        t.lr,
        (t.beta1, t.beta2),
        t.weight_decay,
        t.grad_clip,
        rescore,
        config.algorithm.m2po,
        has_ref,
    )


def algorithm(config: Config) -> Callable[[Sequence[Group], int], TrainBatch]:
    """(scored groups, number of groups over all ranks) -> what is trained."""
    num_minibatches, policy = config.train.num_minibatches, config.train.policy
    if config.algorithm.name == "appo":
        return lambda groups, num_groups: appo(
            groups, num_minibatches, num_groups, trains_branches=config.appo.rule == "arpo"
        )
    if config.algorithm.name == "infoflow":
        options = config.infoflow
        splits = options.hint_group == "split"
        return lambda groups, num_groups: infoflow(
            groups,
            options.sub_goal_weight,
            splits,
            config.algorithm.mode,
            num_minibatches,
            num_groups,
            policy,
        )
    return lambda groups, num_groups: flow_grpo(
        groups, config.algorithm.mode, num_minibatches, num_groups, policy
    )


def hints(config: Config, step: int) -> Hints | None:
    """Of a training step, where the algorithm has them; fewer from step to step."""
    i = config.infoflow
    rate = i.hint_rate * max(0.0, 1 - (step - 1) / max(i.hint_until * config.train.num_steps, 1))
    return (
        Hints(rate, i.hint_turn, i.hint_patience)
        if config.algorithm.name == "infoflow" and rate > 0
        else None
    )


def branches_against_reference(config: Config) -> bool:
    """Whether places to branch are chosen by how far the policy has come from the one that training
    started from.
    """
    return config.algorithm.name == "appo" and (config.appo.rule, config.appo.omega) == (
        "score",
        "reference",
    )


def sampler_tells_entropies(config: Config) -> bool:
    """Whether places to branch are chosen by the sampler's own entropies and log-probs: where these
    are the trainer's but for rounding.
    """
    return (config.algorithm.name, config.rollout.engine, config.model.dtype) == (
        "appo",
        "torch",
        "float32",
    )


def scored_before(config: Config) -> tuple[bool, bool]:
    """Whether what is trained has been scored when places to branch were sought: (by the policy, by
    the reference), where the loss asks.
    """
    # ARPO trains branches too, which nobody has scored.
    has_old = (
        config.algorithm.name == "appo"
        and config.appo.rule != "arpo"
        and not sampler_tells_entropies(config)
    )
    return has_old and config.train.rescore, branches_against_reference(
        config
    ) and config.algorithm.kl_coef > 0


def future_ratio(config: Config) -> FutureRatio | None:
    """The future-aware factor of the advantages, where the algorithm has one."""
    a = config.appo
    is_on = config.algorithm.name == "appo" and a.rule != "arpo" and a.future_coef > 0
    return (
        FutureRatio(a.future_coef, a.future_half_life, a.future_low, a.future_high)
        if is_on
        else None
    )


def branch_rule(config: Config) -> BranchRule:
    a = config.appo
    return BranchRule(a.rule, a.spread, a.spacing, a.gamma, a.clip, a.keep_token)


def blank_tokens(tokenizer: PreTrainedTokenizerFast, num_vocab: int) -> torch.Tensor:
    """[V] bool: ids that decode to white space and punctuation alone, which are no decision; ids
    without a text neither.
    """
    texts = tokenizer.batch_decode([[index] for index in range(min(len(tokenizer), num_vocab))])
    blank = [not any(c.isalnum() for c in text) for text in texts]
    return torch.tensor(blank + [True] * (num_vocab - len(blank)), dtype=torch.bool)
