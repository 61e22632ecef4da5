"""Walking over tasks: every task once per epoch, no repeats in a batch, exact resume."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flowtrain.records import Task
from flowtrain.tasks.cursor import TaskCursor

SEEDS = st.integers(0, 5)
SIZES = st.integers(1, 12)


def make_tasks(num_tasks: int) -> list[Task]:
    return [Task(str(index), f"question {index}", ("answer",)) for index in range(num_tasks)]


@given(SIZES, st.integers(1, 15), SEEDS, st.integers(0, 12), st.integers(1, 8))
def test_a_resumed_cursor_goes_on_exactly(
    num_tasks: int, n: int, seed: int, num_before: int, num_after: int
) -> None:
    tasks = make_tasks(num_tasks)
    whole = TaskCursor(tasks, seed)
    for _ in range(num_before):
        whole.take(n)
    resumed = TaskCursor(tasks, seed, whole.position)
    assert resumed.position == num_before * n
    assert [resumed.take(n) for _ in range(num_after)] == [whole.take(n) for _ in range(num_after)]


@given(SIZES, SEEDS, st.lists(st.integers(1, 15), min_size=1, max_size=12))
def test_batches_of_any_size_repeat_nothing_and_resume(
    num_tasks: int, seed: int, sizes: list[int]
) -> None:
    tasks = make_tasks(num_tasks)
    cursor = TaskCursor(tasks, seed)
    for n in sizes:
        resumed = TaskCursor(tasks, seed, cursor.position)
        batch = cursor.take(n)
        assert len(batch) == n and resumed.take(n) == batch
        assert n > num_tasks or len({task.id for task in batch}) == n


@given(SIZES, st.integers(1, 15), SEEDS)
def test_every_epoch_visits_each_task_once(num_tasks: int, n: int, seed: int) -> None:
    cursor = TaskCursor(make_tasks(num_tasks), seed)
    walked = [task.id for _ in range(5 * num_tasks) for task in cursor.take(n)]
    for start in range(0, 5 * num_tasks, num_tasks):
        assert sorted(walked[start : start + num_tasks], key=int) == [
            str(index) for index in range(num_tasks)
        ]


def test_epochs_and_seeds_have_their_own_order() -> None:
    tasks = make_tasks(20)
    cursor = TaskCursor(tasks, 0)
    first, second = cursor.take(20), cursor.take(20)
    assert first != second and first != tasks and first != TaskCursor(tasks, 1).take(20)


def test_position_may_be_set_back() -> None:
    cursor = TaskCursor(make_tasks(7), 0)
    batches = [cursor.take(3) for _ in range(9)]
    cursor.position = 6
    assert [cursor.take(3) for _ in range(7)] == batches[2:]
