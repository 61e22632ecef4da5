"""Train a planner in the flow:  torchrun --nproc_per_node 8 -m flowtrain.train --config
configs/quickstart.toml

One step, top to bottom, is the system. Each verb is one call into one file:

    take      tasks/cursor.py           the next questions collect   agents/collect.py        G
    rollouts of each: planner, executor, verifier, generator around a memory branch
    algorithms/branching.py     APPO: where another choice would have mattered; further rollouts
    start there score     rewards/                  one reward per rollout, from its final answer
    deal      algorithms/, placement.py the reward as an advantage of every turn; each turn to a
    rank that trains pack      training/tree.py          all turns in token trees train
    training/trainer.py       clipped ratio + KL, backward, AdamW publish   weights/publisher.py
    what changed in the weights, as an immutable version load      weights/reader.py         the
    engine samples with them from now on log       report/                   metrics, rollouts,
    progress

With `dataflow.url` the first four are the work of nodes (`python -m flowtrain.node`), which go on
while this trains:

    next_batch   batch_source.py                   the batch of the step, none of its tokens staler
    than dataflow.max_staleness
"""

from __future__ import annotations

from flowtrain.agents.collect import collect, collect_branches
from flowtrain.algorithms import filter_samples
from flowtrain.config import Config
from flowtrain.config.command import INTERRUPTED, Interrupt, run_command
from flowtrain.rewards import score, shuffle_rewards
from flowtrain.run.run import Run
from flowtrain.training.tree import pack
from flowtrain.training.world import end_process
from flowtrain.types import Group
from flowtrain.utils.seeds import derive_seed
from flowtrain.utils.step_timer import StepTimer


def train(config: Config) -> int:
    """From the newest checkpoint of the run, or from `model.path`, to `train.num_steps`."""
    with Interrupt() as interrupt, Run(config, interrupt) as run:
        gather = next_batch if config.dataflow.url else sample
        for step in range(run.start_step + 1, config.train.num_steps + 1):
            timer = StepTimer()
            groups = gather(run, step, timer)
            if groups is None:
                run.save(step - 1)
                return INTERRUPTED
            with timer("collect"):
                if config.algorithm.shuffle_rewards:
                    groups = shuffle_rewards(groups, derive_seed(config.run.seed, "shuffle", step))
                batch = filter_samples(run.algorithm(groups, run.num_questions), run.max_positions)
                samples = run.deal(batch.samples)
            with timer("train"):
                rows = pack(samples, config.train.num_minibatches, config.train.token_budget)
                stats = run.train(step, rows)
            with timer("publish"):
                run.publish(step)
            with timer("load"):
                run.load(step)
            run.log(step, groups, batch, stats, timer)
            if run.is_interrupted():
                run.save(step)
                return INTERRUPTED
        run.finish()
    return 0


def sample(run: Run, step: int, timer: StepTimer) -> list[Group] | None:
    """Rollouts of the next questions, made here and now."""
    tasks = run.cursor.take(run.num_questions)
    with timer("collect"):
        groups = collect(run.flow(step), tasks, **run.collect_options(step))
    with timer("branch"):
        points = run.branch_points(step, groups)
    with timer("collect"):
        return score(
            collect_branches(run.flow(step), groups, points, **run.branch_options(step)), run.judge
        )


def next_batch(run: Run, step: int, timer: StepTimer) -> list[Group] | None:
    """Rollouts that nodes have made and scored meanwhile; None when the run is asked to end while
    it waits for them.
    """
    with timer("collect"):
        return run.next_batch(step)


if __name__ == "__main__":
    end_process(run_command("flowtrain.train", train))
