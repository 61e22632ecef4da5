"""The algorithm of a run: one object that defines everything specific to training with it.

A step calls its methods in this order: the number of rollouts that start from the question
(`num_roots`), the hints for them (`hints`), the branch points (`branch`), the training samples
(`advantages`, usually by `credit`) and the loss (`loss_spec`, `token_loss`). A new algorithm is a
subclass that overrides the methods in which it differs: `algorithm.name = "mine.py:Mine"`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, cast

from pydantic import ValidationError

from flowtrain.algorithms.advantages import (
    Average,
    Credits,
    broadcast,
    make_batch,
    reward_of,
    rewards_to_go,
)
from flowtrain.config import Algorithm as Options
from flowtrain.config import Config, Section
from flowtrain.records import (
    BranchPoint,
    FinishReason,
    Group,
    SampleId,
    Scored,
    TrainBatch,
    Trajectory,
    UserError,
)
from flowtrain.utils import plugins

if TYPE_CHECKING:
    from flowkernels import LossSpec, TokenLossFn, Tokens
    from flowkernels.loss_spec import LossType
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

    from flowtrain.agents.registry import AgentKind
    from flowtrain.inference.protocol import Engine, Scorer
    from flowtrain.tasks.sets import TaskSet
    from flowtrain.tasks.sub_goals import Hints
    from flowtrain.tools import Tool
    from flowtrain.trainer.distillation import DistillSpec
    from flowtrain.trainer.distributed import World
    from flowtrain.trainer.minibatch_factor import MinibatchFactor
    from flowtrain.trainer.trainer import Trainer


Values = dict[str, Any]
"""Options of `[algorithm]` by name."""


class Branches(NamedTuple):
    """The branch points of a step."""

    points: Sequence[Sequence[BranchPoint]]
    """Branch points of each group, at most one per missing rollout."""
    logprobs: Mapping[SampleId, Scored]
    """Log-probs of trained turns that the search for branch points has computed."""


class NodeSampler(NamedTuple):
    """The resources of a rollout node for choosing branch points."""

    tokenizer: PreTrainedTokenizerFast
    vocab_size: int
    """Number of token ids of the model."""
    engine: Engine
    """The engine of the policy, with the newest weights of the node."""
    reference: Scorer | None
    """The initial policy of the training, if `Algorithm.needs_node_reference`."""


class Algorithm:
    """The interface of an algorithm. Subclasses implement `credit` and override other methods as
    needed.
    """

    options_type: ClassVar[type[Section]] = Section
    """The algorithm's own options, read from [plugins.NAME]; by default none."""

    whitens: ClassVar[bool] = False
    """Whether advantages are normalised over all tokens of the batch."""

    def __init__(self, config: Config) -> None:
        """Check the config, and set unset options to `defaults`.

        Raises UserError for unknown or unsuitable options.
        """
        chosen = config.algorithm
        self.options = self._options(config)
        self.own_loss = _own_loss(chosen)
        """The function that `algorithm.loss` names in a file; None: a loss of flowkernels."""
        self.config = config  # `defaults` reads it
        default_values = {
            key: value
            for key, value in self.defaults(chosen).items()
            if key not in chosen.model_fields_set or getattr(chosen, key) is None
        }
        filled_options = chosen.model_copy(update=default_values)
        self.config = config.model_copy(update={"algorithm": filled_options})
        """The config of the run, as it is stored and as every part of the run reads it."""
        self.check()

    def __str__(self) -> str:
        """Name the algorithm as the config does."""
        return self.config.algorithm.name

    def with_config(self, config: Config) -> Self:
        """Return the algorithm for another config of the run, with the same options of its own."""
        copied = copy.copy(self)
        copied.config = config
        return copied

    @property
    def average(self) -> Average:
        """Return the kind of mean that the objective takes."""
        return "rollout"

    def credit(self, rewards: Sequence[float]) -> Sequence[float]:
        """Return the advantages of a group's finished rollouts, given their rewards."""
        raise NotImplementedError(f"{type(self).__name__} does not implement credit")

    def token_credit(self, group: Group) -> Credits:
        """Return the advantages of every turn of a group's finished rollouts: one number per turn,
        or one per token of its response; None for a rollout to exclude from training. By default
        every turn gets the advantage of its rollout or, with `algorithm.turn_credit = "to_go"`, the
        advantage of the reward still to come.
        """
        if self.config.algorithm.turn_credit == "to_go":
            return rewards_to_go(group, self.credit)
        return broadcast(group, self.credit([reward_of(rollout) for rollout in group.finished]))

    def advantages(self, groups: Sequence[Group]) -> TrainBatch:
        """Return a step's scored groups of this rank as samples with advantages and weights."""
        options, rollout = self.config.algorithm, self.config.rollout
        if options.overlong_buffer:
            groups = [self._punished(group) for group in groups]
        return make_batch(
            groups,
            self.token_credit,
            average=self.average,
            drops_equals=self._drops_equals,
            num_minibatches=self.config.train.num_minibatches,
            num_groups=rollout.num_questions,
            policy=self.config.train.policy,
            most_tokens=self.config.agent.max_turns * rollout.max_new_tokens,
            leaves_out=self._is_overlong if options.overlong == "mask" else lambda _: False,
        )

    def observe(self, groups: Sequence[Group], world: World) -> None:
        """Update the algorithm's state from the rewards of a step, after its advantages are
        computed; collective.
        """

    def state(self) -> str:
        """Return the algorithm's state for a checkpoint; "" if stateless."""
        return ""

    def restore(self, state: str) -> None:
        """Restore the algorithm's state from a checkpoint."""

    @property
    def _drops_equals(self) -> bool:
        return self.config.algorithm.equal_groups == "drop"

    def _is_overlong(self, trajectory: Trajectory) -> bool:
        """Return whether a rollout ran into a limit of tokens."""
        calls = (turn.calls.get(self.config.train.policy) for turn in trajectory.turns)
        reasons = [call.finish_reason for call in calls if call is not None]
        return trajectory.truncated == "prompt" or FinishReason.LENGTH in reasons

    def _punished(self, group: Group) -> Group:
        """Return the rewards less DAPO's length penalty (eq. 13) for the longest response of each
        rollout.
        """
        limit, policy = self.config.rollout.max_new_tokens, self.config.train.policy
        buffer = self.config.algorithm.overlong_buffer

        def punished(trajectory: Trajectory) -> Trajectory:
            if trajectory.error:
                return trajectory
            calls = [turn.calls.get(policy) for turn in trajectory.turns]
            longest = max((len(call.response_ids) for call in calls if call), default=0)
            excess = max(0, longest - (limit - buffer))
            return replace(trajectory, reward=reward_of(trajectory) - excess / buffer)

        return replace(group, trajectories=tuple(map(punished, group.trajectories)))

    @property
    def num_roots(self) -> int:
        """Number of rollouts that start from the question; branches fill the rest of the group."""
        return self.config.rollout.group_size

    @property
    def needs_reference(self) -> bool:
        """Return whether training keeps a frozen copy of the initial policy."""
        return self.config.algorithm.kl_coef > 0

    @property
    def records_entropies(self) -> bool:
        """Return whether engines record the entropy of every sampled token."""
        return False

    @property
    def has_old_logprobs(self) -> bool:
        """Return whether `branch` returns the trainer's log-probs of all trained turns."""
        return False

    @property
    def has_ref_logprobs(self) -> bool:
        """Return whether `branch` returns the reference policy's log-probs of all trained turns."""
        return False

    def hints(self, step: int) -> Hints | None:
        """Return the rule that gives hints to rollouts of `step`; None: no hints."""
        return None

    def branch(
        self,
        step: int,
        groups: Sequence[Group],
        trainer: Trainer | None,
        tokenizer: PreTrainedTokenizerFast,
    ) -> Branches:
        """Return the branch points of a step's rollouts; by default none. Collective.

        Args:
            groups: this rank's groups, of `num_roots` rollouts each.
            trainer: scores tokens under the current policy; None on a rank that only samples.
            tokenizer: the policy's tokenizer.
        """
        return Branches([[] for _ in groups], {})

    @property
    def needs_node_reference(self) -> bool:
        """Return whether rollout nodes need the initial policy for scoring."""
        return False

    async def node_points(self, roots: Group, seed: int, sampler: NodeSampler) -> list[BranchPoint]:
        """Return the branch points of a work item's rollouts on a rollout node; by default none."""
        return []

    def loss_spec(self) -> LossSpec:
        """Return the token loss that `[algorithm]` describes."""
        from flowkernels import LossSpec

        options = self.config.algorithm
        assert options.clip_low is not None and options.clip_high is not None, "set by __init__"
        return LossSpec(
            "clip" if options.has_own_loss else cast("LossType", options.loss),
            clip_low=options.clip_low,
            clip_high=options.clip_high,
            dual_clip=options.dual_clip,
            kl_coef=options.kl_coef,
            kl=options.kl,
            entropy_coef=options.entropy_coef,
            tis=options.tis,
            mis=options.mis,
        )

    def token_loss(self, spec: LossSpec) -> LossSpec | TokenLossFn:
        """Return the loss of a mini-batch; M2PO may have narrowed the clips in `spec`."""
        from flowkernels import by_autograd

        return spec if self.own_loss is None else by_autograd(self.own_loss)

    def minibatch_factor(self) -> MinibatchFactor | None:
        """Return the factor of the advantages that depends on a whole mini-batch, at the cost of
        one forward pass; None: no such factor.
        """
        return None

    @property
    def reference_path(self) -> str:
        """Return the folder of the reference model; "": the initial policy."""
        return ""

    def distill_spec(self) -> DistillSpec | None:
        """Return the specification of the distillation from a teacher; None: no teacher whose
        distributions the trainer compares.
        """
        return None

    def for_teacher(
        self, batch: TrainBatch, groups: Sequence[Group], tokenizer: PreTrainedTokenizerFast
    ) -> TrainBatch:
        """Return the batch with the prompts for the teacher filled in."""
        return batch

    def defaults(self, chosen: Options) -> Values:
        """Return the values of `[algorithm]` options that the config leaves unset."""
        if chosen.m2po is not None:
            clips = {"clip_low": 0.95, "clip_high": 20.0}
        else:
            clips = {"clip_low": 0.2, "clip_high": 0.3 if chosen.mode == "released" else 0.2}
        mode_values = {"dual_clip": 3.0} if chosen.mode == "released" else {}
        return clips | mode_values | {"equal_groups": "keep"}

    def check(self) -> None:
        """Raise UserError for a config that the algorithm does not support."""
        options, algorithm_type = self.config.algorithm, type(self)
        names = ("credit", "token_credit", "advantages")
        if all(getattr(algorithm_type, name) is getattr(Algorithm, name) for name in names):
            raise UserError(f"algorithm.name={options.name!r} does not implement credit(rewards)")
        if algorithm_type.advantages is not Algorithm.advantages:
            self._refuse_options_of_samples()
        if options.has_own_loss and algorithm_type.token_loss is not Algorithm.token_loss:
            raise UserError(
                f"algorithm.loss={options.loss!r} cannot be combined with "
                f"algorithm.name={options.name!r}, which defines its own factors in the loss"
            )
        if options.dynamic_sampling and self.config.dataflow.url:
            raise UserError(
                f"algorithm.dynamic_sampling={options.dynamic_sampling} must be 0 with "
                "dataflow.url; set dataflow.group_filter = 'mixed', which drops such groups while "
                "nodes continue with other questions"
            )
        if options.dynamic_sampling and not self._drops_equals:
            raise UserError(
                f"algorithm.dynamic_sampling={options.dynamic_sampling} requires "
                "algorithm.equal_groups = 'drop', because other questions replace such groups"
            )
        if options.overlong_buffer > self.config.rollout.max_new_tokens:
            raise UserError(
                f"algorithm.overlong_buffer={options.overlong_buffer} must be at most "
                f"rollout.max_new_tokens={self.config.rollout.max_new_tokens}"
            )
        beside = self.config.trained_beside
        if beside and self.num_roots != self.config.rollout.group_size:
            raise UserError(
                f"policies.{beside[0]}.trained=true cannot be combined with "
                f"algorithm.name={options.name!r}, whose branches start in calls of a single "
                "policy"
            )
        if self.config.dataflow.url:
            self.check_nodes()

    def _refuse_options_of_samples(self) -> None:
        options = self.config.algorithm
        for key in ("overlong", "overlong_buffer", "dynamic_sampling", "turn_credit"):
            if (value := getattr(options, key)) not in ("train", 0, None, "rollout"):
                raise UserError(
                    f"algorithm.{key}={value!r} cannot be combined with "
                    f"algorithm.name={options.name!r}, which builds its samples differently"
                )

    def check_nodes(self) -> None:  # most algorithms have nothing to check
        """Raise UserError if rollout nodes cannot produce this algorithm's rollouts."""

    def check_agent(self, kind: AgentKind) -> None:
        """Raise UserError for an agent whose rollouts the algorithm does not support."""

    def check_inputs(self, tasks: TaskSet, tools: Mapping[str, Tool]) -> None:
        """Raise UserError for training tasks or tools that the algorithm does not support."""

    def _options(self, config: Config) -> Any:
        name = config.algorithm.name
        try:
            return self.options_type.model_validate(config.options_of(name))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = ".".join(map(str, ("plugins", name.rpartition(":")[2], *first["loc"])))
            raise UserError(f"{key}={first['input']!r}: {first['msg']}") from None


def _own_loss(chosen: Options) -> Callable[[Tokens], Tensor] | None:
    """Import and return a user's loss function. Raises UserError for a missing function, and for
    options that only built-in losses have.
    """
    if not chosen.has_own_loss:
        return None
    origin = f"algorithm.loss={chosen.loss!r}"
    for key in ("tis", "mis", "entropy_coef"):
        if value := getattr(chosen, key):
            raise UserError(f"algorithm.{key}={value} cannot be combined with {origin}")
    name, loss = plugins.load_object(chosen.loss, origin)
    if not callable(loss):
        raise UserError(f"{origin}: {name!r} is a {type(loss).__name__}, not a function")
    return loss
