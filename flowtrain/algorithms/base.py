"""The algorithm of a run: the one object that knows what training by it needs.

The loop asks it in the order of a step: how many rollouts of a question begin with it
(`num_roots`), which hints they may read (`hints`), where rollouts branch (`branch`), what is
trained (`advantages`), and under which loss (`loss_spec`, `token_loss`). A new algorithm is a
subclass that says where it differs; one of another package is named by an entry point (`registry`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from pydantic import ValidationError

from flowtrain.config import Algorithm as Options
from flowtrain.config import Config, Section
from flowtrain.types import BranchPoint, Group, SampleId, TrainBatch, UserError

if TYPE_CHECKING:
    from flowkernels import LossSpec, TokenLossFn
    from transformers import PreTrainedTokenizerFast

    from flowtrain.agents.hints import Hints
    from flowtrain.agents.registry import AgentKind
    from flowtrain.engines.protocol import Engine, Scorer
    from flowtrain.tasks.sets import TaskSet
    from flowtrain.tools import Tool
    from flowtrain.training.minibatch_factor import MinibatchFactor
    from flowtrain.training.token_scores import Scored
    from flowtrain.training.trainer import Trainer


class Branches(NamedTuple):
    """The branch points of a step."""

    points: Sequence[Sequence[BranchPoint]]
    """Points of each group, at most as many as it lacks rollouts."""
    logprobs: Mapping[SampleId, Scored]
    """Log-probs that the search has computed, of turns that will be trained."""


class NodeSampler(NamedTuple):
    """The means of a rollout node to choose branch points with, beside the rollouts themselves."""

    tokenizer: PreTrainedTokenizerFast
    vocab_size: int
    """Ids that the model knows."""
    engine: Engine
    """The policy's, with the newest weights of the node."""
    reference: Scorer | None
    """The policy that training started from, where `Algorithm.needs_node_reference`."""


class Algorithm(ABC):
    """The interface of an algorithm, with Flow-GRPO's answers; subclasses override what differs."""

    options_type: ClassVar[type[Section]] = Section
    """Options of its own, which `algorithm.options` holds; by default there are none."""

    def __init__(self, config: Config) -> None:
        """Check the config, and fill in the clips that it leaves unset.

        Raises UserError for options that the algorithm does not have or cannot work with.
        """
        chosen = config.algorithm
        self.options = self._options(chosen)
        unset = {k: v for k, v in self.clips(chosen).items() if getattr(chosen, k) is None}
        filled = chosen.model_copy(update=unset)
        self.config = config.model_copy(update={"algorithm": filled})
        """The config of the run, as it is stored and as every part of the run reads it."""
        self.check()

    @abstractmethod
    def advantages(self, groups: Sequence[Group]) -> TrainBatch:
        """Turn this rank's scored groups of a step into samples with advantages and weights."""

    @property
    def num_roots(self) -> int:
        """Number of rollouts of a question that begin with it; branches fill up the group."""
        return self.config.rollout.group_size

    @property
    def needs_reference(self) -> bool:
        """Tell whether training keeps a frozen copy of the policy that it started from."""
        return self.config.algorithm.kl_coef > 0

    @property
    def records_entropies(self) -> bool:
        """Tell whether engines record the entropy of every sampled token."""
        return False

    @property
    def has_old_logprobs(self) -> bool:
        """Tell whether `branch` returns the trainer's own log-probs of all that will be trained."""
        return False

    @property
    def has_ref_logprobs(self) -> bool:
        """Tell whether `branch` returns the reference policy's log-probs of all that will be
        trained.
        """
        return False

    def hints(self, step: int) -> Hints | None:
        """Return the rule by which rollouts of `step` get hints; None: they get none."""
        return None

    def branch(
        self,
        step: int,
        groups: Sequence[Group],
        trainer: Trainer | None,
        tokenizer: PreTrainedTokenizerFast,
    ) -> Branches:
        """Choose where rollouts of a step branch; by default nowhere. Collective.

        Args:
            groups: this rank's groups, of `num_roots` rollouts each.
            trainer: scores tokens under the policy of now; None on a rank that only samples.
            tokenizer: of the policy.
        """
        return Branches([[] for _ in groups], {})

    @property
    def needs_node_reference(self) -> bool:
        """Tell whether rollout nodes score by the policy that training started from."""
        return False

    async def node_points(self, roots: Group, seed: int, sampler: NodeSampler) -> list[BranchPoint]:
        """Choose where rollouts of a work item branch on a rollout node; by default nowhere."""
        return []

    def loss_spec(self) -> LossSpec:
        """Build the token loss that `[algorithm]` describes."""
        from flowkernels import LossSpec

        a = self.config.algorithm
        assert a.clip_low is not None and a.clip_high is not None, "filled in by __init__"
        return LossSpec(
            a.loss,
            clip_low=a.clip_low,
            clip_high=a.clip_high,
            dual_clip=a.dual_clip,
            kl_coef=a.kl_coef,
            kl=a.kl,
            entropy_coef=a.entropy_coef,
            tis=a.tis,
            mis=a.mis,
        )

    def token_loss(self, spec: LossSpec) -> LossSpec | TokenLossFn:
        """Return the loss of a mini-batch, whose clips M2PO may have changed in `spec`."""
        return spec

    def minibatch_factor(self) -> MinibatchFactor | None:
        """Return what advantages are multiplied by where it takes a look at a whole mini-batch,
        which costs a forward pass; None: nothing does.
        """
        return None

    def clips(self, chosen: Options) -> dict[str, float]:
        """Return the defaults of `clip_low`, `clip_high` and `dual_clip`, where there is one."""
        if chosen.m2po is not None:
            clips = {"clip_low": 0.95, "clip_high": 20.0}
        else:
            clips = {"clip_low": 0.2, "clip_high": 0.3 if chosen.mode == "released" else 0.2}
        return clips | ({"dual_clip": 3.0} if chosen.mode == "released" else {})

    def check(self) -> None:
        """Raise UserError for a config that the algorithm cannot work with."""
        if self.config.dataflow.url:
            self.check_nodes()

    def check_nodes(self) -> None:  # noqa: B027  # most algorithms have nothing to check
        """Raise UserError where rollout nodes cannot make this algorithm's rollouts."""

    def check_agent(self, kind: AgentKind) -> None:  # noqa: B027
        """Raise UserError for an agent whose rollouts the algorithm cannot do with."""

    def check_inputs(  # noqa: B027
        self, tasks: TaskSet, tools: Mapping[str, Tool]
    ) -> None:
        """Raise UserError for training tasks or tools that the algorithm cannot work with."""

    def _options(self, chosen: Options) -> Any:
        try:
            return self.options_type.model_validate(chosen.options)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = ".".join(map(str, ("algorithm.options", *first["loc"])))
            raise UserError(f"{key}={first['input']!r}: {first['msg']}") from None
