"""Options of the questions and of the passages that answer them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from flowtrain.config.section import Section


class Tasks(Section):
    name: Literal["facts", "gameof24", "verifiers", "file"] = "facts"
    """facts: 1 to 3 turn questions over the shipped corpus; gameof24: all solvable puzzles;
    verifiers: an environment of that package (docs/agents/environments.md); file: your dataset"""
    verifiers: dict[str, Any] = Field(default_factory=dict)
    """name = "verifiers": the environment, in the format of verifiers' table [env]:
    tasks.verifiers.taskset = {id = "gsm8k"}"""
    path: str = ""
    """name = "file": JSON, JSONL or Parquet with question, answer and optionally id, kind,
    num_turns, choices, scorer; with reward.function any other columns are allowed and answers are
    optional; or a folder of such files; or a dataset of the Hub, owner/name"""
    split: str = "train"
    """name = "file": the split to read from a folder or a dataset of the Hub"""
    mixture: dict[str, PositiveFloat] = Field(default_factory=dict)
    """name = "file": several files with weights instead of path; a step draws from all"""
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
    """name = "file": row format of the files; auto: detected per file"""
    question_key: str = ""
    """name = "file": column of the question, if not the preset's; "a.b" is a field of an object"""
    answer_key: str = ""
    """name = "file": column of the accepted answers, if not the preset's"""
    scorer: Literal["", "exact", "qa", "f1", "math", "choice", "gameof24"] = ""
    """name = "file": scorer of rows that name none; empty: the preset's"""
    corpus: str = ""
    """passages to search: a JSON file shaped like flowtrain/tasks/data/corpus.json; empty: the
    shipped corpus about countries and elements, which name = "file" uses only if this option is the
    word shipped"""
    kinds: tuple[Literal["lookup", "arithmetic", "chain", "sum", "sum4", "sum5"], ...] = (
        "lookup",
        "arithmetic",
        "chain",
        "sum",
    )
    """name = "facts": kinds of questions, in equal parts; sum4 and sum5 take four and five turns"""
    num_train: PositiveInt = 16000
    """training questions to generate; gameof24, file and verifiers use all of theirs"""
    benchmarks: str = ""
    """folder of benchmark files; near-duplicates of their questions are removed from training"""
    held_out_share: float = Field(0.1, gt=0, lt=1)
    """name = "file" or "verifiers": share of the questions held out for evaluation"""
