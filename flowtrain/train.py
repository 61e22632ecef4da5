"""Train a planner in the flow:  torchrun --nproc_per_node 8 -m flowtrain.train --config configs/quickstart.toml

One step, top to bottom, is the system. Each verb is one call into one file:

    take      tasks/cursor.py           the next questions
    collect   rollout/collect.py        G rollouts of each: planner, executor, verifier, generator around a memory
    branch    training/branching.py     APPO: where another choice would have mattered; further rollouts start there
    score     rewards/                  one reward per rollout, from its final answer
    deal      algorithms/, placement.py the reward as an advantage of every turn; each turn to a rank that trains
    pack      training/tree.py          all turns in token trees
    train     training/trainer.py       clipped ratio + KL, backward, AdamW
    publish   weights/publisher.py      what changed in the weights, as an immutable version
    load      weights/reader.py         the engine samples with them from now on
    log       report/                   metrics, rollouts, progress

With `dataflow.url` the first four are the work of nodes (`python -m flowtrain.rollout`), which go on while this trains:

    receive   feed.py                   the batch of the step, none of its tokens staler than dataflow.max_staleness
"""

from __future__ import annotations

from flowtrain.algorithms import screen
from flowtrain.clock import Clock
from flowtrain.command import INTERRUPTED, Interrupt, run_command
from flowtrain.config import Config
from flowtrain.rewards import score, shuffle_rewards
from flowtrain.rollout.collect import collect, collect_branches
from flowtrain.seeds import derive_seed
from flowtrain.session import Session
from flowtrain.training.tree import pack
from flowtrain.training.world import end_process
from flowtrain.types import Group


def train(config: Config) -> int:
    """From the newest checkpoint of the run, or from `model.path`, to `train.num_steps`."""
    with Interrupt() as interrupt, Session(config, interrupt) as run:
        gather = receive if config.dataflow.url else sample
        for step in range(run.start_step + 1, config.train.num_steps + 1):
            clock = Clock()
            groups = gather(run, step, clock)
            if groups is None:
                run.save(step - 1)
                return INTERRUPTED
            with clock("collect"):
                if config.algorithm.shuffle_rewards:
                    groups = shuffle_rewards(groups, derive_seed(config.run.seed, "shuffle", step))
                batch = screen(run.algorithm(groups, run.num_questions), run.max_positions)
                samples = run.deal(batch.samples)
            with clock("train"):
                rows = pack(samples, config.train.num_minibatches, config.train.token_budget)
                stats = run.train(step, rows)
            with clock("publish"):
                run.publish(step)
            with clock("load"):
                run.load(step)
            run.log(step, groups, batch, stats, clock)
            if run.is_interrupted():
                run.save(step)
                return INTERRUPTED
        run.finish()
    return 0


def sample(run: Session, step: int, clock: Clock) -> list[Group] | None:
    """Rollouts of the next questions, made here and now."""
    tasks = run.cursor.take(run.num_questions)
    with clock("collect"):
        groups = collect(run.flow(step), tasks, **run.collect_options(step))
    with clock("branch"):
        points = run.branch_points(step, groups)
    with clock("collect"):
        return score(collect_branches(run.flow(step), groups, points, **run.branch_options(step)), run.judge)


def receive(run: Session, step: int, clock: Clock) -> list[Group] | None:
    """Rollouts that nodes have made and scored meanwhile; None when the run is asked to end while it waits for them."""
    with clock("collect"):
        return run.receive(step)


if __name__ == "__main__":
    end_process(run_command("flowtrain.train", train))
