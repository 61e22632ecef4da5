"""Train a policy in the flow.

    torchrun --nproc_per_node 8 -m flowtrain.train --config configs/quickstart.toml

A step, top to bottom, shows the whole system:

    verb          room                        what it makes
    take          tasks/cursor.py             the next questions
    collect       agents/collect.py           rollouts of each, on one event loop
    branch        algorithms/                 APPO: where further rollouts leave those at hand
    score         rewards/                    one reward per rollout, from its final answer
    advantages    algorithms/                 an advantage and a loss weight for every token
    pack          trainer/packing.py          all turns as token trees
    balance       trainer/balance.py          to each rank rows that cost as much
    old_logprobs  trainer/trainer.py          of the policy before the step, with train.rescore
    ref_logprobs  trainer/trainer.py          of the reference policy, for the KL term
    train         trainer/trainer.py          clipped ratio + KL, backward, AdamW
    count         trainer/run/run.py          rollouts, what became of every token, and how far the
                                              trainer's log-probs are from the sampler's
    publish       weights/publish/            what changed in the weights, as an immutable version
    load          weights/load/               the engine samples with that version from now on
    evaluate      evaluation/evaluator.py     reward on held-out questions
    keep          replay/log.py               what a replay makes the step of, with log.replay
    log           trainer/run/run_logger.py   metrics, rollouts, progress
    checkpoint    trainer/checkpoint.py       what a run resumes from
    watch         logging/learning_signal.py  a warning where there is nothing to learn from, or
                                              trainer and sampler disagree

With `dataflow.url` nodes (flowtrain/rollouts/node/) do the first four, while this trains:

    next_batch    rollouts/batch_source.py    the batch, none staler than dataflow.max_staleness
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which take seconds
    from flowtrain.config.command import main

    main("flowtrain.train", "flowtrain.train:train")

from flowtrain.agents.collect import collect, collect_branches
from flowtrain.algorithms.dynamic_sampling import joined, mixed_first
from flowtrain.config import Config
from flowtrain.config.command import INTERRUPTED, Interrupt
from flowtrain.records import Rollouts
from flowtrain.replay.log import ReplayLog
from flowtrain.rewards import score, shuffle_rewards
from flowtrain.trainer.run.dry_run import dry_run
from flowtrain.trainer.run.opening import open_run
from flowtrain.trainer.run.remote_teacher import taught
from flowtrain.trainer.run.run import Run
from flowtrain.trainer.run.run_logger import Counted
from flowtrain.utils.seeds import derive_seed
from flowtrain.utils.step_timer import StepTimer


def train(config: Config) -> int:
    """Train from the newest checkpoint of the run, or from `model.path`, to `train.num_steps`."""
    if config.run.dry_run:
        return dry_run(config)
    with Interrupt() as interrupt, open_run(config, interrupt) as run:
        warm_results = run.evaluate_warm()
        interrupt.defer()
        trained_runs = [(policy_run, _replay_log(policy_run)) for policy_run in (*run.beside, run)]
        timer = StepTimer()
        for step in run.steps():
            rollouts = gather(run, step, timer)
            if rollouts is None:
                run.end(step - 1)
                return INTERRUPTED
            counts = [
                learn(policy_run, step, rollouts, log, timer if policy_run is run else StepTimer())
                for policy_run, log in trained_runs
            ]
            timer = StepTimer()
            # After the log: a kill in between leaves too many lines, not too few.
            if run.is_checkpoint_due(step):
                with timer("checkpoint"):
                    run.checkpoint(step)
            # After the checkpoint, so that a run which the gate ends keeps it.
            for (policy_run, _), counted in zip(trained_runs, counts, strict=True):
                policy_run.watch(step, counted)
            if run.is_interrupted():
                run.end(step)
                return INTERRUPTED
        run.finish(warm_results)
    return 0


def _replay_log(run: Run) -> ReplayLog:
    return ReplayLog(run.logger.run_dir, run.config, run.components.placement, run.start_step)


def learn(
    run: Run, step: int, rollouts: Rollouts, replay_log: ReplayLog, timer: StepTimer
) -> Counted:
    """Train a policy by the step's rollouts; others that are trained learn from the same ones."""
    learner = run.learner
    with timer("collect"):
        batch = taught(learner.advantages(rollouts), run.components)
        packed = learner.pack(batch)
    with timer("train"):
        run.sleep()
        rows = learner.balance(packed)
        rows = learner.old_logprobs(rows)
        rows = learner.ref_logprobs(rows)
        train_stats = learner.train(step, rows)
    counted = run.count(step, rollouts, batch, packed, train_stats)
    with timer("publish"):
        publish_metrics = run.publish(step, counted.tokens)
    with timer("load"):
        load_metrics = run.load(step)
    with timer("eval"):
        evaluation = run.evaluate(step)
    replay_metrics = replay_log.keep(step, rollouts, batch)
    run.logger.log(
        step,
        rollouts,
        batch,
        trained=train_stats,
        counted=counted,
        evaluation=evaluation,
        metrics={**publish_metrics, **load_metrics, **replay_metrics, **timer.metrics()},
    )
    return counted


def gather(run: Run, step: int, timer: StepTimer) -> Rollouts | None:
    """Take what nodes have rolled out and scored, or do it here; None when the run is asked to end
    before.
    """
    rollouts: Rollouts | None
    if run.pool:
        with timer("collect"):
            rollouts = run.pool.source.next_batch(step)
    else:
        rollouts = sample(run, step, timer)
    if rollouts is None or not run.config.algorithm.shuffle_rewards:
        return rollouts
    seed = derive_seed(run.config.run.seed, "shuffle", step)
    return rollouts._replace(groups=shuffle_rewards(rollouts.groups, seed))


def sample(run: Run, step: int, timer: StepTimer) -> Rollouts:
    """Roll out the next questions here and now, and with `algorithm.dynamic_sampling` others in
    place of those that teach nothing.
    """
    num_questions, num_asked = run.config.rollout.num_questions, 0
    rollouts, num_missing = Rollouts((), {}, {}), num_questions
    for attempt in range(1 + (run.config.algorithm.dynamic_sampling or 0)):
        rollouts = joined(rollouts, _roll_out(run, step, attempt, num_missing, timer), num_asked)
        num_asked += num_missing
        if run.config.algorithm.dynamic_sampling:
            policy = run.config.train.policy
            rollouts, num_mixed = mixed_first(rollouts, run.components.world, policy)
            num_missing = num_questions - num_mixed
        if not num_missing:
            break
    return rollouts


def _roll_out(run: Run, step: int, attempt: int, num_questions: int, timer: StepTimer) -> Rollouts:
    """Roll out and score the next questions, in one `attempt` of the step's, from 0."""
    config, samplers = run.config.rollout, run.components.placement.samplers
    agent = run.agent_of(step)
    tasks = run.cursor.take(num_questions)
    # The first attempt draws as a run without dynamic sampling does.
    seed_parts = (step, attempt) if attempt else (step,)
    with timer("collect"), run.waiting_for_rollouts(step) as on_rollout:
        groups = collect(
            agent,
            tasks,
            group_size=run.components.algorithm.num_roots,
            seed=derive_seed(run.config.run.seed, "train", *seed_parts),
            max_in_flight=config.max_in_flight,
            rank=samplers.rank,
            num_ranks=samplers.size,
            straggler_share=config.straggler_share,
            straggler_s=config.straggler_s,
            on_done=on_rollout,
        )
    with timer("branch"):
        branches = run.branch(step, groups)
    with timer("collect"):
        groups = collect_branches(
            agent,
            groups,
            branches.points,
            group_size=config.group_size,
            seed=derive_seed(run.config.run.seed, "branch", step),
            max_in_flight=config.max_in_flight,
            straggler_share=config.straggler_share,
            straggler_s=config.straggler_s,
        )
    with timer("collect"):
        groups = score(groups, *run.components.scoring())
    return Rollouts(groups, branches.logprobs, {})
