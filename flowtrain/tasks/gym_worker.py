"""Writes questions of reasoning-gym; a script for a process of its own, started by `gym.py`.

Reads a list of `gym.Draw` as JSON from stdin. Prints one JSON object per line: a question with what
its checker reads, {"question": str, "answer": str | null, "entry": str}, draw after draw; or in
the end {"error": str}. The entry is the text of a Python literal, because JSON has no tuples.

Some data sets walk over sets of strings, so what they ask depends on PYTHONHASHSEED, which must be
the same in every such process. Others print while they make questions; that goes to stderr.
"""

from __future__ import annotations

import ast
import difflib
import json
import sys
from typing import Any, NoReturn


def main() -> None:
    """Answer the request on stdin."""
    draws = json.load(sys.stdin)
    sys.stdout = sys.stderr
    try:
        import reasoning_gym
    except ImportError as error:
        fail(f"tasks.name='reasoning-gym' needs pip install 'flowtrain[gym]' ({error})")
    from reasoning_gym.factory import DATASETS

    for draw in draws:
        name, options = draw["name"], draw["options"]
        where = f"tasks.gym.{draw['key']}"
        if name not in DATASETS or name == "composite":
            close = difflib.get_close_matches(name, DATASETS, n=3)
            hint = f"did you mean {' or '.join(close)}?" if close else "see reasoning-gym's list"
            fail(f"{where}: reasoning-gym has no data set {name!r}; {hint}")
        problem = f"{where}.options={options!r}"
        try:
            made = reasoning_gym.create_dataset(
                name, **options, seed=draw["seed"], size=draw["size"]
            )
            for index in range(draw["size"]):
                problem = f"{where}: question {index} cannot be made"
                send(question(made[index], name, options))
        # Each data set checks its options in its own way, mostly with assert.
        except Exception as error:  # noqa: BLE001
            fail(f"{problem}: {type(error).__name__}: {error}")


def question(entry: dict[str, Any], name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the line of one question; raises ValueError or SyntaxError where its data is
    no Python literal.
    """
    entry = plain(entry)
    text = repr({"name": name, "options": options, "entry": entry})
    if ast.literal_eval(text)["entry"] != entry:
        raise ValueError("its data is no Python literal")
    answer = entry["answer"]
    return {
        "question": entry["question"],
        "answer": None if answer is None else str(answer),
        "entry": text,
    }


def plain(value: Any) -> Any:
    """Return the value with numpy's scalars, and other subclasses, as Python's own types."""
    if isinstance(value, dict):
        return {plain(key): plain(each) for key, each in value.items()}
    for kind in (list, tuple, set):
        if isinstance(value, kind):
            return kind(map(plain, value))
    if isinstance(value, bool):
        return value
    for scalar in (str, int, float):
        if isinstance(value, scalar):
            return scalar(value)
    return plain(value.item()) if hasattr(value, "item") else value


def send(line: dict[str, Any]) -> None:
    """Print a line of the answer."""
    print(json.dumps(line), file=sys.__stdout__, flush=True)


def fail(problem: str) -> NoReturn:
    """Print the error and end."""
    send({"error": " ".join(problem.split())})
    sys.exit(0)


if __name__ == "__main__":
    main()
