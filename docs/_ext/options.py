"""The reference of the config: every option, from the same records as `--help all`."""

from __future__ import annotations

from functools import cache

from docs._ext.docstrings import escaped
from flowtrain.config import Config
from flowtrain.config.options import Option, all_options
from flowtrain.config.synonyms import SYNONYMS

UNITS = {
    "_s": "seconds",
    "_ms": "milliseconds",
    "_mb": "MB",
    "_gb": "GB",
    "_bytes": "bytes",
    "_chars": "characters",
    "_tokens": "tokens",
    "_tflops": "TFLOP/s",
}
"""The unit of an option, which its name ends in; other options have none, or their text says it."""


@cache
def names() -> frozenset[str]:
    """Return the names of all options."""
    return frozenset(option.name for option in all_options())


def option_page() -> str:
    """Return the reference as Markdown with a part for each section."""
    parts = []
    for section, field in Config.model_fields.items():
        options = [option for option in all_options() if option.section == section]
        about = " ".join((field.description or "").split())
        entries = "\n".join(map(entry, options))
        parts.append(f"## {section}\n\n{about}\n\n```{{eval-rst}}\n{entries}\n```\n")
    return "\n".join(parts)


def entry(option: Option) -> str:
    """Return an option in reStructuredText."""
    lines = [f".. confval:: {option.name}", f"   :type: ``{option.kind}``"]
    lines += [f"   :default: ``{option.default}``"]
    return "\n".join([*lines, "", f"   {escaped(option.meaning)}{more(option, '``')}", ""])


def more(option: Option, tick: str) -> str:
    """Return an option's unit and its names elsewhere in brackets, with `tick` around code."""
    words = ", ".join(f"{tick}{word}{tick}" for word in SYNONYMS.get(option.name, ()))
    found = [unit_of(option), f"elsewhere: {words}" if words else ""]
    return f" ({'; '.join(filter(None, found))})" if any(found) else ""


def option_list() -> str:
    """Return the reference as Markdown with a list for each section."""
    found: list[str] = []
    for section, field in Config.model_fields.items():
        found += [f"## {section}", "", *filter(None, [" ".join((field.description or "").split())])]
        found += [""] * (found[-1] != "")
        found += [
            f"- `{option.name}`, `{option.kind}`, default `{option.default}`: "
            f"{option.meaning}{more(option, '`')}"
            for option in all_options()
            if option.section == section
        ]
        found.append("")
    return "\n".join(found)


def unit_of(option: Option) -> str:
    """Return the unit that the name of a number says, or ""."""
    if option.kind not in ("INT", "FLOAT"):
        return ""
    return next((unit for end, unit in UNITS.items() if option.name.endswith(end)), "")
