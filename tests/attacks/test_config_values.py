"""Values that no option takes: one line with the key, exit code 2, and nothing written."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowtrain.config import Config
from flowtrain.config.command import run_command
from tests.attacks.tally import Tally

NUM_VALUES = 300
MOST_CHARS = 1000
"""Of an error's line: nobody reads a megabyte that was a value."""
NO_TEXT = ("\0", "runs/\x1b[2J", "a\x7fb", "\x9b31m", "\u202etxt")


def leaves() -> list[tuple[str, dict[str, Any]]]:
    """Every option by key, with its JSON schema."""
    schema = Config.model_json_schema()

    def resolved(node: dict[str, Any]) -> dict[str, Any]:
        return schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node

    found = []
    for section, field in schema["properties"].items():
        table = resolved(field)
        if "properties" not in table:
            section = {"engines": "engines.judge", "policies": "policies.planner"}.get(section, "")
            if not section:
                continue  # options of plugins are their own
            named = table.get("patternProperties") or {"": table["additionalProperties"]}
            table = resolved(next(iter(named.values())))
        found += [(f"{section}.{key}", leaf) for key, leaf in table["properties"].items()]
    return found


def bad_values(leaf: dict[str, Any]) -> list[Any]:
    """Values that the schema of an option rules out, as TOML or as text."""
    plain = next((each for each in leaf.get("anyOf", ()) if each.get("type") != "null"), leaf)
    kind = plain.get("type")
    if "enum" in plain:
        bad = ["", "no such word", -1, 10**400, [], {"a": 1}, "9" * 10**6, *NO_TEXT]
        return [value for value in bad if value not in plain["enum"]]
    if kind in ("integer", "number"):
        bad: list[Any] = [
            "",
            "abc",
            "nan",
            "inf",
            "-inf",
            "1e400",
            [],
            [1],
            {"a": 1},
            "--",
            *NO_TEXT,
        ]
        bad += ["1.5", 10**30, 10**400, -(10**30)] if kind == "integer" else []
        bad += [plain["minimum"] - 1] if "minimum" in plain else []
        bad += [plain["maximum"] + 1] if "maximum" in plain else []
        bad += [plain["exclusiveMinimum"], -1] if "exclusiveMinimum" in plain else []
        return bad
    if kind == "boolean":
        return ["", "maybe", 2, -1, [], {"a": 1}, "truth", 10**400]
    if kind == "array":
        return [5, "", {"a": 1}, [["a"]], [{"a": 1}], [None], True, ["\0"]]
    if kind == "object":
        return [5, "", [1], "text", True]
    return ["\0", *NO_TEXT, "x" * 10**6]


def attack(argv: list[str]) -> int:
    return run_command("flowtrain.train", lambda config: 0, argv)


def check(capsys: pytest.CaptureFixture[str], argv: list[str], key: str, folder: Path) -> bool:
    """Whether the value was held off: one line with the key and code 2, nothing written."""
    code = attack(argv)
    said = capsys.readouterr()
    lines = said.err.splitlines()
    last = key.rpartition(".")[2]
    return (
        code == 2
        and len(lines) == 1
        and last in lines[0]
        and len(lines[0]) <= MOST_CHARS
        and lines[0].isprintable()
        and not said.out
        and not list(folder.iterdir())
    )


def as_words(value: Any, rng: random.Random) -> str:
    """A value as somebody types it."""
    if isinstance(value, str):
        return value if rng.random() < 0.5 else json.dumps(value)
    return json.dumps(value)


def test_no_bad_value_of_any_option_gets_in(
    campaign: Iterator[int],
    tally: Tally,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    options = leaves()
    assert len(options) > 190
    for seed in campaign:
        rng = random.Random(seed)
        through = []
        # Every option has its turn, before any has a second.
        for number in range(max(NUM_VALUES, len(options))):
            key, leaf = options[number % len(options)]
            bad = bad_values(leaf)
            if key == "reward.function":  # a text is the name of one
                bad = [each for each in bad if not isinstance(each, str)]
            value = rng.choice(bad)
            word = as_words(value, rng)
            argv = [f"--{key}={word}"] if rng.random() < 0.5 else [f"--{key}", word]
            if not check(capsys, argv, key, tmp_path):
                through.append((key, value if len(str(value)) < 99 else "long"))
        tally.add("values of options", max(NUM_VALUES, len(options)), len(through))
        assert not through


FILES: dict[str, bytes] = {
    "nothing that is TOML": b"<html>",
    "bytes": bytes(range(256)) * 9,
    "brackets": b"x = " + b"[" * 10**5,
    "tables in tables": b"[" + b".".join([b"a"] * 10**4) + b"]",
    "a key twice": b"[run]\nseed = 1\nseed = 2",
    "an option without a section": b"seed = 1",
    "a section as a value": b"run = 1",
    "a list of sections": b"[[run]]\nseed = 1",
    "an unknown section": b"[rum]\nseed = 1",
    "an unknown option": b"[run]\nsead = 1",
    "an escape as a section": b'["\\u001b[2J"]\nx = 1',
    "an escape as an option": b'[run]\n"a\\u001b[2J\\nb" = 1',
    "an option in a section of options": b"[run.seed]\nx = 1",
    "a date": b"[run]\nseed = 2020-01-01",
    "a NUL": b'[run]\ndir = "a\\u0000b"',
    "an engine without a name": b"[engines]\nmodel = 1",
    "an engine of an empty name": b'[engines.""]\nmodel = "a"',
    "a megabyte as a key": b"[run]\n" + b"k" * 10**6 + b" = 1",
    "a megabyte as a value": b"[run]\ndevice = '" + b"v" * 10**6 + b"'",
    "a number of a megabyte": b"[run]\nseed = " + b"9" * 10**6,
}


def test_no_hostile_file_gets_in(
    tally: Tally,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    through = []
    for name, content in FILES.items():
        (tmp_path / "config.toml").write_bytes(content)
        if not check(capsys, ["--config", str(tmp_path / "config.toml")], "", tmp_path / "here"):
            through.append(name)
    tally.add("config files", len(FILES), len(through))
    assert not through
