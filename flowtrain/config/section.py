"""What every table of options has in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A table of the file; a key it does not know is an error."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        coerce_numbers_to_str=True,
        allow_inf_nan=False,
    )
