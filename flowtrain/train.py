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
"""

from __future__ import annotations

from flowtrain.algorithms import screen
from flowtrain.command import INTERRUPTED, Interrupt, run_command
from flowtrain.config import Config
from flowtrain.rewards import score, shuffle_rewards
from flowtrain.rollout.collect import collect, collect_branches
from flowtrain.seeds import derive_seed
from flowtrain.session import Clock, Session
from flowtrain.training.tree import pack
from flowtrain.training.world import end_process


def train(config: Config) -> int:
    """From the newest checkpoint of the run, or from `model.path`, to `train.num_steps`."""
    with Interrupt() as interrupt, Session(config) as run:
        for step in range(run.start_step + 1, config.train.num_steps + 1):
            clock = Clock()
            tasks = run.cursor.take(config.rollout.num_questions)
            with clock("collect"):
                groups = collect(run.flow(step), tasks, **run.collect_options(step))
            with clock("branch"):
                points = run.branch_points(step, groups)
            with clock("collect"):
                groups = score(collect_branches(run.flow(step), groups, points, **run.branch_options(step)), run.judge)
                if config.algorithm.shuffle_rewards:
                    groups = shuffle_rewards(groups, derive_seed(config.run.seed, "shuffle", step))
                batch = screen(run.algorithm(groups, len(tasks)), run.max_positions)
                samples = run.deal(batch.samples)
            with clock("train"):
                rows = pack(samples, config.train.num_minibatches, config.train.token_budget)
                stats = run.train(step, rows)
            with clock("publish"):
                run.publish(step)
            with clock("load"):
                run.load(step)
            run.log(step, groups, batch, stats, clock)
            if run.world.max([interrupt.requested])[0]:
                run.save(step)
                return INTERRUPTED
        run.finish()
    return 0


if __name__ == "__main__":
    end_process(run_command("flowtrain.train", train))
