"""Extraction: does the model complete documents it was trained on, given how they begin?

As in the report of VaultGemma (2025), after Carlini et al. (2023, "Quantifying memorization"): a prompt of 50 tokens, a
greedy continuation of up to 50, and a match that is exact, or approximate up to an edit distance of a tenth of the
length. Prompts of documents that were not trained on are the control: what they match is style, not memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfdp.auditing.intervals import clopper_pearson
from tfdp.errors import DataError

PREFIX, CONTINUATION, SHORTEST = 50, 50, 10
TOLERANCE = 0.1

NextTokens = Callable[[np.ndarray, int], Any]
"""(tokens [prompts, length], position) -> [prompts], the likeliest token at `position` after all those before it."""


@dataclasses.dataclass(frozen=True)
class Extraction:
    """How many documents came back.

    Attributes:
        prompts: how many documents were long enough to be tried.
        exact: continuations that are the document, token for token.
        approximate: within the edit distance; the exact ones among them.
    """

    prompts: int
    exact: int
    approximate: int

    def interval(self, confidence: float = 0.95) -> tuple[float, float] | None:
        """Of the share of approximate matches (Clopper and Pearson); None without prompts."""
        return clopper_pearson(self.approximate, self.prompts, confidence) if self.prompts else None


def extract(
    documents: Sequence[Any],
    next_tokens: NextTokens,
    *,
    prefix: int = PREFIX,
    continuation: int = CONTINUATION,
    shortest: int = SHORTEST,
    batch_size: int = 64,
) -> Extraction:
    """Prompts with the beginning of each document, and compares what comes with how it goes on.

    Args:
        documents: token arrays; those with fewer than `prefix + shortest` tokens are not tried.
        next_tokens: the model, greedy. Tokens from `position` on are zeros that it must not look at, as no causal model
            does.
        prefix: tokens of the prompt.
        continuation: tokens that are compared, or as many as the document has.
        shortest: fewest tokens to compare: a few are guessed easily.
        batch_size: prompts at a time.
    """
    if prefix < 1 or not 1 <= shortest <= continuation:
        raise DataError(
            f"Expected a prefix of at least 1 token and 1 <= shortest <= continuation. Received: {prefix}, {shortest}, "
            f"{continuation}."
        )
    long = [np.asarray(document)[: prefix + continuation] for document in documents]
    long = [document for document in long if len(document) >= prefix + shortest]
    exact = approximate = 0
    for start in range(0, len(long), batch_size):
        batch = long[start : start + batch_size]
        # Always the same shape, so that a compiled model is traced once.
        tokens = np.zeros((batch_size, prefix + continuation), np.int32)
        tokens[: len(batch), :prefix] = [document[:prefix] for document in batch]
        for position in range(prefix, max(map(len, batch))):
            tokens[:, position] = np.asarray(next_tokens(tokens, position))
        for row, document in zip(tokens, batch, strict=False):
            wanted, received = document[prefix:].tolist(), row[prefix : len(document)].tolist()
            same = wanted == received
            exact += same
            approximate += same or edit_distance(wanted, received) <= TOLERANCE * len(wanted)
    return Extraction(len(long), exact, approximate)


def edit_distance(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Fewest insertions, deletions and replacements that turn one sequence into the other (Levenshtein)."""
    row = list(range(len(other) + 1))
    for index, token in enumerate(one, start=1):
        corner, row[0] = row[0], index
        for column, compared in enumerate(other, start=1):
            changed = min(row[column] + 1, row[column - 1] + 1, corner + (token != compared))
            corner, row[column] = row[column], changed
    return row[-1]
