"""Options as text: a TOML file over the defaults of `flowtrain.config`, `--section.key value` over
that; and the help.

(pydantic-settings was looked at: its command line prints every option before an error and has no
word for a mistyped key in the file.)
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from types import UnionType
from typing import Any, Literal

from pydantic import ValidationError

from flowtrain.config import Config
from flowtrain.types import UserError


def parse(argv: Sequence[str]) -> Config | None:
    """The config that the command line asks for; None when it asks for `--help`.

    Raises:
        UserError: a file that cannot be read, a key that does not exist, a value that does not fit;
            in one line.
    """
    if "--help" in argv or "-h" in argv:
        return None
    path, overrides = _split(argv)
    return _merged(_read(path) if path else {}, overrides)


def check_allowed(argv: Sequence[str], allowed: Sequence[str]) -> None:
    """Raises UserError for options that are none of `allowed`, keys that may end in "*"."""
    path, overrides = _split(argv)
    refused = [
        key
        for key in ["config"] * bool(path) + list(overrides)
        if not any(fnmatchcase(key, pattern) for pattern in allowed)
    ]
    if refused:
        raise UserError(
            f"--{refused[0]} is the same for the whole run and cannot be set here; what can be: "
            f"{', '.join(allowed)}"
        )


def parse_over(text: str, argv: Sequence[str]) -> Config:
    """Return the config of a TOML text with options over it. Raises UserError as `parse` does."""
    return _merged(_tables(text, "the config of the run"), _split(argv)[1])


def _merged(values: dict[str, dict[str, Any]], overrides: Mapping[str, str]) -> Config:
    for key, text in overrides.items():
        *tables, name = _known(key)
        table = values
        for part in tables:
            table = table.setdefault(part, {})
        table[name] = _value(key, text)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise UserError(_explain(error)) from None


def help_text(module: str) -> str:
    """Every key with its type, default and meaning."""
    lines = [f"python -m {module} [--config FILE.toml] [--section.key VALUE ...]"]
    last = ""
    for section, key, kind, default, meaning in _leaves():
        if section != last:
            lines.append("")
        last = section
        lines += [f"  --{section}.{key} {kind} = {default}", f"        {meaning}"]
    return "\n".join(lines)


def to_toml(config: Config) -> str:
    """The config as a file that `--config` reads; keys that are unset are left out."""
    lines: list[str] = []
    for section, values in config.model_dump().items():
        tables = (
            {f"{section}.{_bare(name)}": table for name, table in values.items()}
            if section in NAMED
            else {section: values}
        )
        for heading, table in tables.items():
            lines.append(f"[{heading}]")
            lines += [
                f"{_bare(key)} = {_toml(value)}"
                for key, value in table.items()
                if value is not None
            ]
            lines.append("")
    return "\n".join(lines)


_SHORT = {"resume": "run.resume"}
NAMED = ("engines", "plugins", "policies")
"""Sections of tables that the user names: [engines.judge], --engines.judge.model."""


def _split(argv: Sequence[str]) -> tuple[str, dict[str, str]]:
    """--config FILE and the overrides, in both forms, `--a.b value` and `--a.b=value`."""
    words = iter(argv)
    found: dict[str, str] = {}
    for word in words:
        if not word.startswith("--"):
            raise UserError(f"{word!r} is not an option; write --section.key value (see --help)")
        key, separator, text = word[2:].partition("=")
        value = text if separator else next(words, None)
        if value is None:
            raise UserError(f"--{key} needs a value")
        found[_SHORT.get(key, key)] = value
    return found.pop("config", ""), found


def _read(path: str) -> dict[str, dict[str, Any]]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"--config {path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"--config {path}: not TOML: {error}") from None
    return _tables(text, f"--config {path}")


def _tables(text: str, origin: str) -> dict[str, dict[str, Any]]:
    """A TOML text whose keys are all known. `origin` is for errors."""
    try:
        values = tomllib.loads(text)
    except (
        ValueError,
        RecursionError,
    ) as error:  # besides bad TOML: an integer of too many digits; brackets nested too deep
        raise UserError(f"{origin}: not TOML: {error}") from None
    for section, table in values.items():
        if not isinstance(table, dict):
            raise UserError(
                f"{origin}: {section!r} must stand in a section: {', '.join(Config.model_fields)}"
            )
        tables = (
            {f"{section}.{name}": named for name, named in table.items()}
            if section in NAMED
            else {section: table}
        )
        for heading, named in tables.items():
            if not isinstance(named, dict):
                raise UserError(f"{origin}: {heading} must be a table of its own, [{heading}]")
            for key in named:
                _known(f"{heading}.{key}")
        if not table and section not in Config.model_fields:
            _known(section)
    return values


def _known(key: str) -> tuple[str, ...]:
    """Split a dotted key, or say what it may be."""
    asked = key
    section, _, rest = key.partition(".")
    path: tuple[str, ...] = (section, rest)
    if section in NAMED:
        table, _, name = rest.partition(".")
        path = (section, table, name)
        if section == "plugins" and table and name:
            return path
        section, key = f"{section}.NAME", f"{section}.NAME.{name}"
    keys = [f"{s}.{k}" for s, k, *_ in _leaves()]
    if key not in keys or not all(path):
        close = difflib.get_close_matches(key, keys, n=1, cutoff=0.8)
        hint = (
            f"did you mean {close[0]}?" if close else f"sections: {', '.join(Config.model_fields)}"
        )
        if section.removesuffix(".NAME") in Config.model_fields and not close:
            hint = (
                f"[{section}] knows "
                f"{', '.join(k.rpartition('.')[2] for k in keys if k.startswith(section + '.'))}"
            )
        raise UserError(f"unknown key {asked}: {hint}")
    return path


def _value(key: str, text: str) -> Any:
    """A TOML value where it is one, else the text itself: `--model.path runs/warm` needs no quotes,
    and `--run.dir 1.10` is no number.
    """
    try:
        value = tomllib.loads(f"x = {text}")["x"]
    except (ValueError, RecursionError):
        return text
    section, _, rest = key.partition(".")
    key = f"{section}.NAME.{rest.partition('.')[2]}" if section in NAMED else key
    is_text = any(
        f"{section}.{name}" == key and kind == "STR" for section, name, kind, *_ in _leaves()
    )
    return text if is_text and not isinstance(value, str) else value


def _explain(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    return f"{key}={first['input']!r}: {message}" if key else message


def _leaves() -> Iterator[tuple[str, str, str, str, str]]:
    """(section, key, type, default, meaning) of every option."""
    defaults = Config().model_dump()
    for section, field in Config.model_fields.items():
        kind: Any = field.annotation
        if section in NAMED:
            section, kind = f"{section}.NAME", typing.get_args(kind)[1]
            if not hasattr(kind, "model_fields"):
                continue  # a plugin's options are its own
            defaults[section] = kind().model_dump()
        for key, leaf in kind.model_fields.items():
            default = defaults[section][key]
            yield (
                section,
                key,
                _kind(leaf.annotation),
                "unset" if default is None else _toml(default),
                leaf.description or "",
            )


def _kind(annotation: Any) -> str:
    """How a type reads in the help."""
    if typing.get_origin(annotation) is Literal:
        return "|".join(map(str, typing.get_args(annotation)))
    if typing.get_origin(annotation) in (UnionType, typing.Union):
        return _kind(typing.get_args(annotation)[0])
    return {tuple: "LIST", dict: "TABLE"}.get(
        typing.get_origin(annotation)
    ) or annotation.__name__.upper()


def _bare(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml(key)


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_bare(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    # TOML takes no surrogate pairs, which is how JSON escapes characters beyond the first plane,
    # and no raw DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
