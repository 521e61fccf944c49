"""Files of several specs: which spec became which, and that nothing weaker passes between them."""

from __future__ import annotations

import itertools

import pytest

from tfdp.comparison import Direction, compare_files, compare_specs
from tfdp.comparison.files import FileComparison
from tfdp.spec import PrivacySpec


def spec(units: int = 1000, **claim: object) -> PrivacySpec:
    return PrivacySpec.from_dict(
        {
            "schema_version": "1.0",
            "claim": {
                "epsilon": 4.0,
                "delta": 1e-6,
                "privacy_unit": {"kind": "example", "description": "one text"},
                "adjacency": "add_or_remove_one",
                "data_accesses": ["training"],
                **claim,
            },
            "data": {"num_units": units, "size_is_public": True},
            "mechanism": {"clip_norm": 1.0},
            "sampling": {"scheme": "poisson", "expected_batch_size": 50, "steps": 20},
        }
    )


A, B, C = spec(1000), spec(2000), spec(3000)
WEAK_B, STRONG_B = spec(2000, epsilon=5.0), spec(2000, epsilon=3.0)
WEAK_A = spec(1000, delta=1e-5)


def test_one_spec_each_is_compared_as_before():
    assert compare_files([A], [WEAK_A], old_name="a", new_name="b") == compare_specs(
        A, WEAK_A, old_name="a", new_name="b"
    )


@pytest.mark.parametrize(
    ("old", "new", "documents", "verdicts"),
    [
        ([A, B], [A, B], [(1, 1), (2, 2)], ["unchanged", "unchanged"]),
        ([A, B, C], [C, A, B], [(3, 1), (1, 2), (2, 3)], ["unchanged"] * 3),
        ([A, A], [A, A], [(1, 1), (2, 2)], ["unchanged", "unchanged"]),
        ([A, B], [A, WEAK_B], [(1, 1), (2, 2)], ["unchanged", "weaker"]),
        ([A, B], [STRONG_B, A], [(2, 1), (1, 2)], ["stronger", "unchanged"]),
        ([A, B], [WEAK_A, STRONG_B], [(1, 1), (2, 2)], ["weaker", "stronger"]),
        ([A, B], [A], [(1, 1), (2, None)], ["unchanged", "weaker"]),
        ([A, B], [B], [(2, 1), (1, None)], ["unchanged", "weaker"]),
        ([A], [B, A], [(None, 1), (1, 2)], ["incomparable", "unchanged"]),
        ([A, B, C], [C, STRONG_B], [(3, 1), (2, 2), (1, None)], ["unchanged", "stronger", "weaker"]),
        ([B], [C, STRONG_B], [(None, 1), (1, 2)], ["incomparable", "stronger"]),
    ],
)
def test_which_spec_became_which(old, new, documents, verdicts):
    found = compare_files(old, new)
    assert isinstance(found, FileComparison)
    assert list(found.documents) == documents
    assert [part.verdict.value for part in found.parts] == verdicts


def test_the_verdict_is_never_better_than_its_worst_spec():
    """Over all files of up to three specs: strong only where each old spec has a new one that is as strong."""
    good = (Direction.STRONGER, Direction.UNCHANGED)
    stock = [A, B, WEAK_B, STRONG_B]
    verdicts = {(one, other): compare_specs(stock[one], stock[other]).verdict for one in range(4) for other in range(4)}
    files = [file for count in (1, 2, 3) for file in itertools.combinations_with_replacement(range(4), count)]
    for old, new in itertools.product(files, files):
        if compare_files([stock[i] for i in old], [stock[i] for i in new]).verdict in good:
            orders = itertools.permutations(new, len(old))
            assert any(
                all(verdicts[one, other] in good for one, other in zip(old, order, strict=True)) for order in orders
            ), (old, new)


def test_a_decoy_does_not_hide_a_weaker_spec():
    """The old spec seems to become a stronger one, while what it really became stands beside it as if it were new."""
    found = compare_files([A], [spec(1000, epsilon=3.9), spec(1000, epsilon=50.0)])
    assert found.verdict is Direction.INCOMPARABLE


def test_a_spec_that_is_added_is_one_more_release():
    found = compare_files([A], [A, spec(1000, epsilon=80.0)])
    assert found.verdict is Direction.INCOMPARABLE
    (change,) = found.changes
    assert "one more release" in change.why
    assert "changed specs" not in change.why, "there are none"


def test_json_tells_the_documents():
    values = compare_files([A, B], [WEAK_A], old_name="a", new_name="b").to_dict()
    assert values["verdict"] == "weaker"
    assert [(change["where"], change["old_document"], change["new_document"]) for change in values["changes"]] == [
        ("claim.delta", 1, 1),
        ("spec", 2, None),
    ]
