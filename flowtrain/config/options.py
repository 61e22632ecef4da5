"""Options as text: a TOML file, over one that it includes, over the defaults of `flowtrain.config`;
`--section.key value` over that; and the help.

tomli_w writes files. The command line is our own: that of pydantic-settings prints every option
before an error, and has no word for a mistyped key in the file.
"""

from __future__ import annotations

import json
import os.path
import textwrap
import tomllib
import typing
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from itertools import zip_longest
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple

import tomli_w
from pydantic import ValidationError

from flowtrain.config import Config
from flowtrain.config.shipped import config_path, shipped_configs
from flowtrain.config.synonyms import meant
from flowtrain.records import UserError
from flowtrain.utils.errors import user_error
from flowtrain.utils.text import printable

NAMED = ("engines", "mcp", "plugins", "policies")
"""Sections of tables that the user names: [engines.judge], --engines.judge.model."""
FIRST = (
    *("run.dir", "run.seed", "run.resume", "model.path", "model.dtype", "tasks.name", "tasks.path"),
    *("agent.tools", "agent.max_turns", "rollout.engine", "rollout.num_questions"),
    *("rollout.group_size", "rollout.max_new_tokens", "algorithm.name", "algorithm.kl_coef"),
    *("train.num_steps", "train.lr", "train.num_minibatches", "train.token_budget", "eval.every"),
)
"""Options that people set first, which `--help` shows."""
_INCLUDE = "include"
_SHOW_CONFIG = "show_config"
_SHOWN_CHARS = 100
_SHORT = {"resume": "run.resume"}
_SECTIONS = ", ".join(Config.model_fields)


class Option(NamedTuple):
    """A row of the help."""

    section: str
    name: str
    """Key as on the command line: "train.lr", "engines.NAME.model"."""
    kind: str
    default: str
    meaning: str


class _Values(NamedTuple):
    """Options as files give them."""

    tables: dict[str, dict[str, Any]]
    origins: dict[str, str]
    """The file of each key, for errors."""


def parse(argv: Sequence[str]) -> Config | None:
    """Return the config that the command line asks for, or None when it asks for help.

    Raises:
        UserError: a file that cannot be read, a key that does not exist, a value that does not fit;
            in one line, with the file.
    """
    if help_topic(argv) is not None:
        return None
    path, overrides = _split(argv)
    overrides.pop(_SHOW_CONFIG, None)
    values = _read(config_path(path), f"--config {path}") if path else _Values({}, {})
    return _merged(values, overrides)


def parse_over(text: str, argv: Sequence[str]) -> Config:
    """Return the config of a TOML text with options over it. Raises UserError as `parse` does."""
    origin = "the config of the run"
    return _merged(_checked(_toml(text, origin), origin), _split(argv)[1])


def shows_config(argv: Sequence[str]) -> bool:
    """Return whether the command line asks for its config instead of a run. Raises UserError."""
    value = _split(argv)[1].get(_SHOW_CONFIG, "false")
    if value not in ("true", "false"):
        raise UserError(f"--{_SHOW_CONFIG} {_shown(value)} must be true or false")
    return value == "true"


def check_allowed(argv: Sequence[str], allowed: Sequence[str]) -> None:
    """Raise UserError for options that are none of `allowed`, keys that may end in "*"."""
    path, overrides = _split(argv)
    for key in ["config"] * bool(path) + list(overrides):
        if not any(fnmatchcase(key, pattern) for pattern in allowed):
            raise UserError(
                f"--{key} is fixed for the whole run and cannot be set here; options that can: "
                f"{', '.join(allowed)}"
            )


def to_toml(config: Config) -> str:
    """Write the config as a file that `--config` reads; keys that are unset are left out."""
    return tomli_w.dumps(config.model_dump(exclude_none=True))


def help_topic(argv: Sequence[str]) -> str | None:
    """Return the word after `--help`, "" if there is none, or None if nobody asks for help."""
    for word, following in zip_longest(argv, argv[1:], fillvalue=""):
        flag, _, topic = word.partition("=")
        if flag in ("--help", "-h"):
            return topic or ("" if following.startswith("-") else following)
    return None


def help_text(module: str, topic: str = "") -> str:
    """Describe options with type, default and meaning: those that people set first, those of the
    section `topic`, or "all". Raises UserError for another topic.
    """
    if topic and topic != "all" and topic not in Config.model_fields:
        raise UserError(f"--help {topic}: unknown section; there are all, {_SECTIONS}")
    lines = [
        f"python -m {module} [--config FILE|NAME] [--section.key VALUE ...] [--{_SHOW_CONFIG} true]"
    ]
    for section, field in Config.model_fields.items():
        options = [
            option
            for option in _options().values()
            if option.section == section
            and (topic in ("all", section) or (not topic and option.name in FIRST))
        ]
        if options or topic == section:
            lines += ["", *filter(None, [field.description])]
        for option in options:
            lines.append(f"  --{option.name} {option.kind} = {option.default}")
            lines += textwrap.wrap(
                option.meaning, 100, initial_indent=" " * 8, subsequent_indent=" " * 8
            )
    if not topic:
        names = f"Names for --config: {', '.join(shipped_configs())}"
        closing = f"--help all shows every option, --help SECTION those of a section: {_SECTIONS}"
        lines += ["", *textwrap.wrap(names, 100), "", *textwrap.wrap(closing, 100)]
    return "\n".join(lines)


def all_options() -> tuple[Option, ...]:
    """Return every option, in the order of the help."""
    return tuple(_options().values())


def _split(argv: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Return the file of --config, and the overrides of both forms: --a.b value and --a.b=value."""
    words = iter(argv)
    overrides: dict[str, str] = {}
    for word in words:
        if not word.startswith("--"):
            raise UserError(
                f"{_shown(repr(word))} is not an option; write --section.key value (see --help)"
            )
        key, separator, text = word[2:].partition("=")
        value = text if separator else next(words, None)
        if value is None:
            raise UserError(f"--{_shown(key)} needs a value")
        overrides[_SHORT.get(key, key)] = value
    return overrides.pop("config", ""), overrides


def _read(path: str, origin: str, including: tuple[str, ...] = ()) -> _Values:
    """Read a file over the one that it includes. `including`: the files that include this one."""
    with user_error(origin, OSError), user_error(f"{origin}: not TOML", ValueError):
        text = Path(path).read_text(encoding="utf-8")
    values = _toml(text, origin)
    included = values.pop(_INCLUDE, None)
    file_values = _checked(values, origin)
    if included is None:
        return file_values
    where = f"{origin}: {_INCLUDE}={_shown(repr(included))}"
    if not isinstance(included, str) or not included or "\0" in included:
        raise UserError(f"{where} must be the path of a file, relative to this file")
    # By real paths, because a link may close the circle.
    open_files = (*including, os.path.realpath(path))
    base_path = str(Path(path).parent / included)
    if os.path.realpath(base_path) in open_files:
        raise UserError(f"{where}: the files include each other in a cycle")
    base = _read(base_path, f"{origin}, {_INCLUDE} {_shown(included)}", open_files)
    return _Values(_over(base.tables, file_values.tables), base.origins | file_values.origins)


def _over(base: dict[str, dict[str, Any]], upper: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Put the keys of `upper` over those of `base`; an option whose value is a table is one key."""
    merged = dict(base)
    for section, table in upper.items():
        base_table = merged.get(section, {})
        if section in NAMED:
            table = {name: base_table.get(name, {}) | options for name, options in table.items()}
        merged[section] = base_table | table
    return merged


def _toml(text: str, origin: str) -> dict[str, Any]:
    # RecursionError: brackets nested too deep.
    with user_error(f"{origin}: not TOML", ValueError, RecursionError):
        return tomllib.loads(text)


def _checked(values: dict[str, Any], origin: str) -> _Values:
    """Take the tables of a file, whose keys must all be known. `origin` is for errors."""
    origins = {}
    for section, table in values.items():
        if not isinstance(table, dict):
            raise UserError(f"{origin}: {section!r} must be in a section: {_SECTIONS}")
        if not table and section not in Config.model_fields:
            _path(section, origin)
        tables = {section: table}
        if section in NAMED:
            tables = {f"{section}.{name}": entries for name, entries in table.items()}
        for heading, options in tables.items():
            if not isinstance(options, dict):
                name = _shown(heading)
                raise UserError(f"{origin}: {name} must be a table of its own, [{name}]")
            for key in options:
                origins[".".join(_path(f"{heading}.{key}", origin))] = origin
    return _Values(values, origins)


def _merged(values: _Values, overrides: Mapping[str, str]) -> Config:
    origins = dict(values.origins)
    for key, text in overrides.items():
        *tables, name = path = _path(key)
        table = values.tables
        for part in tables:
            table = table.setdefault(part, {})
        table[name] = _value(key, text)
        # An error about the key is the command line's from now on, not the file's.
        origins.pop(".".join(path), None)
    try:
        return Config.model_validate(values.tables)
    except ValidationError as error:
        raise UserError(explain(error, origins)) from None


def _path(key: str, origin: str = "") -> tuple[str, ...]:
    """Split a dotted key into tables and option, or raise UserError with what it may be."""
    path = tuple(key.split(".", 2 if key.partition(".")[0] in NAMED else 1))
    general = _general(key)
    if all(path) and (general in _options() or (path[0] == "plugins" and len(path) == 3)):
        return path
    section = general.rpartition(".")[0] or general
    siblings = [name[len(section) + 1 :] for name in _options() if name.startswith(f"{section}.")]
    if names := meant(general, _options()):
        hint = f"did you mean {' or '.join(names)}?"
    elif siblings:
        hint = f"[{section}] knows {', '.join(siblings)}"
    else:
        hint = f"sections: {_SECTIONS}"
    where = f"{origin}: " if origin else ""
    raise UserError(f"{where}unknown key {_shown(key)}: {hint}")


def _general(key: str) -> str:
    """Put NAME in place of the name of a table: engines.judge.model is engines.NAME.model."""
    section, _, tail = key.partition(".")
    return f"{section}.NAME.{tail.partition('.')[2]}" if section in NAMED else key


def _value(key: str, text: str) -> Any:
    """Read a TOML value where it is one, else the text itself: `--model.path runs/warm` needs no
    quotes, and `--run.dir 1.10` is no number. A list may be words with commas between them.
    """
    option = _options().get(_general(key))
    kind = option.kind if option else ""
    value = _toml_value(text)
    if kind == "LIST" and isinstance(value, str) and value and text[0] not in "[{":
        return [_toml_value(word.strip()) for word in text.split(",")]
    return text if kind == "STR" and not isinstance(value, str) else value


def _toml_value(text: str) -> Any:
    """Read a TOML value; text that is none stands for itself."""
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except (ValueError, RecursionError):
        return text


def explain(error: ValidationError, origins: Mapping[str, str]) -> str:
    """Say in one line which key has which value, and why it cannot be. `origins`: files of keys."""
    first = error.errors(include_url=False)[0]
    parts = [str(part) for part in first["loc"]]
    message = first["msg"].removeprefix("Value error, ")
    if not parts:
        return message
    keys = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
    where = next((f"{origins[key]}: " for key in keys if key in origins), "")
    return f"{where}{_shown(keys[0])}={_shown(repr(first['input']))}: {message}"


def _shown(text: str) -> str:
    """Shorten and escape any text for a line that a person reads."""
    start = printable(text[:_SHOWN_CHARS], keep="")
    return start if len(text) <= _SHOWN_CHARS else f"{start}... ({len(text):,} characters)"


@cache
def _options() -> dict[str, Option]:
    """Collect every option by name, in the order of `Config`."""
    options = {}
    defaults = Config().model_dump()
    for section, field in Config.model_fields.items():
        kind: Any = field.annotation
        prefix = section
        if section in NAMED:
            prefix, kind = f"{section}.NAME", typing.get_args(kind)[1]
            if not hasattr(kind, "model_fields"):
                continue  # a plugin's options are its own
            defaults[section] = kind().model_dump()
        for key, option_field in kind.model_fields.items():
            default = defaults[section][key]
            options[f"{prefix}.{key}"] = Option(
                section=section,
                name=f"{prefix}.{key}",
                kind=_kind(option_field.annotation),
                default="unset" if default is None else json.dumps(default),
                meaning=" ".join((option_field.description or "").split()),
            )
    return options


def _kind(annotation: Any) -> str:
    """Name a type for the help."""
    origin = typing.get_origin(annotation)
    if origin is Literal:
        return "|".join(map(str, typing.get_args(annotation)))
    if origin in (UnionType, typing.Union):
        return "|".join(_kind(part) for part in typing.get_args(annotation) if part is not NoneType)
    if origin is typing.Annotated:
        return _kind(typing.get_args(annotation)[0])
    return {tuple: "LIST", dict: "TABLE"}.get(origin) or annotation.__name__.upper()
