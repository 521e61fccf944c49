"""Counts of the data against the spec, each rule both ways."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from tfdp.review.catalogue import BASE
from tfdp.review.contributions import Contributions, compare
from tfdp.spec import PrivacySpec

USER = BASE.replace(
    "    kind: example\n",
    "    kind: user\n    id_field: account\n    max_records_per_unit: 8\n    method: user_wise_dp_sgd\n",
)


def found(text: str = BASE, **counts: object) -> list[tuple[str, str]]:
    spec = PrivacySpec.from_text(text)
    return [(finding.id, finding.where) for finding in compare(spec, Contributions(**counts))]


@pytest.mark.parametrize(
    ("text", "counts", "expected"),
    [
        (BASE, {}, []),
        (BASE, {"has_user_id": True}, [("PS007", "claim.privacy_unit.kind")]),
        (BASE, {"has_user_id": False, "max_records_per_unit": 1}, []),
        (BASE, {"max_records_per_unit": 2}, [("PS007", "claim.privacy_unit.kind")]),
        (USER, {"has_user_id": True, "max_records_per_unit": 8}, []),
        (USER, {"max_records_per_unit": 9}, [("PS014", "claim.privacy_unit.max_records_per_unit")]),
        (USER.replace("method:", "selection: random\n    method:"), {"max_records_per_unit": 9}, []),
        (BASE, {"duplicates": 0}, []),
        (BASE, {"duplicates": 3}, [("PS008", "data.deduplication")]),
        (USER, {"duplicates": 3}, []),
        (BASE, {"num_units": 60000}, []),
        (BASE, {"num_units": 59999}, [("PS014", "data.num_units")]),
        (BASE, {"num_units": 200}, [("PS014", "data.num_units"), ("PS013", "sampling.expected_batch_size")]),
        (BASE, {"num_records": 7}, []),
        (BASE.replace("  size", "  num_records: 70000\n  size"), {"num_records": 7}, [("PS014", "data.num_records")]),
        (BASE, {"clip_norm_source": "default"}, []),
        (BASE, {"clip_norm_source": "private"}, [("PS041", "mechanism.clip_norm")]),
    ],
)
def test_counts(text, counts, expected):
    assert found(text, **counts) == expected


@pytest.mark.parametrize("counts", [{"num_units": True}, {"num_units": "3"}, {"units": 3}, {"duplicates": -1}])
def test_the_file_is_as_strict_as_a_spec(counts):
    with pytest.raises(ValidationError):
        Contributions(**counts)


def test_the_page_shows_every_field():
    import json

    from tfdp.review.pages import page

    shown = json.loads(page().split("```json\n")[1].split("```")[0])
    assert set(shown) == set(Contributions.model_fields)
    Contributions.model_validate(shown)
