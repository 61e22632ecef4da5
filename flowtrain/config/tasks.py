"""Options of the questions and of the passages that answer them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from flowtrain.config.section import Section


class Tasks(Section):
    name: Literal["facts", "gameof24", "verifiers", "file"] = "facts"
    """facts: 1 to 3 turn questions over the shipped corpus; gameof24: all solvable puzzles;
    verifiers: an environment of that package (docs/agents/environments.md); file: questions of your
    own"""
    verifiers: dict[str, Any] = Field(default_factory=dict)
    """name = "verifiers": the environment, as the table [env] of verifiers describes it:
    tasks.verifiers.taskset = {id = "gsm8k"}"""
    path: str = ""
    """name = "file": JSON, JSONL or Parquet with question, answer and optionally id, kind,
    num_turns, choices, scorer; with reward.function any other columns, and no answer is needed; or
    a folder of such files; or a dataset of the Hub, owner/name"""
    split: str = "train"
    """name = "file": the split that is read of a folder or a dataset of the Hub"""
    mixture: dict[str, PositiveFloat] = Field(default_factory=dict)
    """name = "file": several files instead of path, each with its weight; every step draws from all
    of them"""
    preset: Literal[
        "auto",
        "own",
        "search-r1",
        "deepmath",
        "agentflow",
        "gsm8k",
        "math",
        "verl",
        "chat",
        "triviaqa",
        "popqa",
        "browsecomp-plus",
    ] = "auto"
    """name = "file": layout of the files' rows; auto: recognise each file's"""
    question_key: str = ""
    """name = "file": column of the question, if not the preset's; "a.b" looks into an object"""
    answer_key: str = ""
    """name = "file": column of the accepted answers, if not the preset's"""
    scorer: Literal["", "exact", "qa", "f1", "math", "choice", "gameof24"] = ""
    """name = "file": rule for questions that name none; empty: the preset's"""
    corpus: str = ""
    """passages to search: a JSON file shaped like flowtrain/tasks/data/corpus.json; empty: the
    shipped one, about countries and elements, which with name = "file" has to be asked for by the
    word shipped"""
    kinds: tuple[Literal["lookup", "arithmetic", "chain", "sum", "sum4", "sum5"], ...] = (
        "lookup",
        "arithmetic",
        "chain",
        "sum",
    )
    """name = "facts": kinds of questions, in equal parts; sum4 and sum5 take four and five turns"""
    num_train: PositiveInt = 16000
    """training questions to generate; gameof24, file and verifiers use all they have"""
    benchmarks: str = ""
    """folder of benchmark files; training leaves out questions that nearly repeat one of theirs"""
    held_out_share: float = Field(0.1, gt=0, lt=1)
    """name = "file" or "verifiers": share of the questions that is kept for evaluation"""
