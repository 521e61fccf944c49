"""Questions to the accountant: asked once, kept where a store is given, and never answered from a wrong table."""

from __future__ import annotations

import itertools
import math

import pytest

from tfdp import accounting
from tfdp.errors import AccountingError
from tfdp.review import costs
from tfdp.spec import PrivacySpec

TEXT = """
schema_version: "1.0"
claim: {epsilon: 2, delta: 1.0e-6, adjacency: add_or_remove_one, data_accesses: [training],
        privacy_unit: {kind: example, description: one text}}
data: {num_units: 60000, size_is_public: true, deduplication: exact}
mechanism: {clip_norm: 1, noise_multiplier: 1.1}
sampling: {scheme: poisson, expected_batch_size: 256, steps: 3}
accountant: {name: rdp}
"""


class Store(dict):
    def __init__(self):
        super().__init__()
        self.asked = 0

    def get(self, question):
        self.asked += 1
        return super().get(str(sorted(question.items())))

    def put(self, question, answer):
        self[str(sorted(question.items()))] = answer


@pytest.mark.parametrize(
    ("scheme", "accountant", "adjacency"),
    sorted(itertools.product(("poisson", "full_batch"), accounting.ACCOUNTANTS, accounting.ADJACENCIES)),
)
def test_the_table_of_what_is_modelled_is_that_of_dp_accounting(scheme, accountant, adjacency):
    q = 1.0 if scheme == "full_batch" else 0.01
    event = accounting.step_event(scheme=scheme, sampling_probability=q, noise_multiplier=1.0, num_units=1000)
    assert accounting.supports(event, accountant, adjacency) == ((scheme, accountant, adjacency) in costs._MODELLED)


def test_an_answer_is_taken_from_the_store_and_put_there():
    spec, store = PrivacySpec.from_text(TEXT), Store()
    with costs.kept_in(store):
        first = costs.epsilon(spec, spec.schedule)
        assert len(store) == 1
        (key,) = store
        store[key] = {"answer": 0.125}
        assert costs.epsilon(spec, spec.schedule) == 0.125
    assert costs.epsilon(spec, spec.schedule) == first, "outside of it nothing is looked up"


@pytest.mark.parametrize(
    "change",
    [
        ("1.1", "1.2"),
        ("256", "257"),
        ("steps: 3", "steps: 4"),
        ("1.0e-6", "2.0e-6"),
        ("rdp", "pld"),
        ("add_or_remove_one", "zero_out"),
    ],
)
def test_whatever_changes_the_answer_changes_the_question(change):
    store = Store()
    with costs.kept_in(store):
        for text in (TEXT, TEXT.replace(*change)):
            spec = PrivacySpec.from_text(text)
            costs.epsilon(spec, spec.schedule)
    assert len(store) == 2


def test_errors_and_infinity_are_answers_too():
    store = Store()
    spec = PrivacySpec.from_text(TEXT.replace("rdp", "pld").replace("1.0e-6", "1.0e-300"))
    with costs.kept_in(store):
        for _ in range(2):
            with pytest.raises(AccountingError):
                costs.epsilon(spec, spec.schedule)
    assert len(store) == 1
    assert costs._number("inf") == math.inf


def test_the_order_of_the_rdp_accountant():
    spec = PrivacySpec.from_text(TEXT)
    order, at_boundary = costs.renyi_order(spec, spec.schedule)
    assert 1 < order < 1000
    assert not at_boundary
    noisy = PrivacySpec.from_text(
        TEXT.replace("noise_multiplier: 1.1", "noise_multiplier: 0.2").replace("steps: 3", "steps: 3515")
    )
    assert costs.renyi_order(noisy, noisy.schedule)[1]
