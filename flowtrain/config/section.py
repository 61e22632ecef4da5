"""The base of every table of options."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator

_MAX_CHARS = 1 << 16
_MAX_INT = 1 << 53
"""Greater integers are no counts, and JSON does not carry them everywhere."""
_CONTROL = re.compile("[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class Section(BaseModel):
    """A table of options; an unknown key is an error."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        coerce_numbers_to_str=True,
        allow_inf_nan=False,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _has_sense(cls, value: Any) -> Any:
        """Refuse what no option means, before it reaches a path, a tensor or a terminal."""
        for leaf in _leaves(value):
            if isinstance(leaf, str):
                if len(leaf) > _MAX_CHARS:
                    raise ValueError(f"a text may have {_MAX_CHARS} characters, not {len(leaf)}")
                if control_char := _CONTROL.search(leaf):
                    raise ValueError(
                        f"an option must not contain the character {control_char[0]!r}"
                    )
            elif isinstance(leaf, int) and abs(leaf) > _MAX_INT:
                raise ValueError(f"a number may be at most {_MAX_INT}")
        return value


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value
