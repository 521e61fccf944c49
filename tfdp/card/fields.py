"""The kinds of values on a card, and the base of its sections."""

from __future__ import annotations

import math
import re
import unicodedata
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator


def clean_text(text: str) -> str:
    """Text without characters that hide, reorder or break what is around them; line breaks become newlines."""
    text = re.sub("\r\n?|[\x0b\x0c\x85\u2028\u2029]", "\n", text)
    return "".join(
        character
        for character in text
        if character in "\n\t\u200c\u200d" or unicodedata.category(character) not in ("Cc", "Cf", "Cs")
    )


Text = Annotated[str, AfterValidator(clean_text), Field(max_length=20_000)]
Count = Annotated[int, Field(ge=0)]
Probability = Annotated[float, Field(ge=0, le=1)]
FileName = Annotated[str, Field(pattern=r"^[^/\\\x00-\x1f]+$")]
"""A file beside the card, never a path that leads elsewhere."""
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Section(BaseModel):
    """Immutable, no unknown fields, no conversion between types, finite numbers."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


class Bound(Section):
    """An upper bound that may not exist."""

    value: Annotated[float, Field(ge=0)] | None
    """The bound, or null."""
    unbounded: bool
    """True where there is no finite bound; value is null then, and only then."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.value is None) != self.unbounded:
            raise ValueError("expected a value, or unbounded: true, and not both")
        return self

    @classmethod
    def of(cls, epsilon: float) -> Bound:
        """From a float where infinity means unbounded."""
        return cls(value=None, unbounded=True) if math.isinf(epsilon) else cls(value=float(epsilon), unbounded=False)


UNBOUNDED = Bound(value=None, unbounded=True)
