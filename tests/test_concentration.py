"""How alike unit gradients are, against a loop over pairs and over records."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdp.errors import DataError
from tfdp.spec import PrivacySpec
from tfdp.workflow import TextRecords, build_model, encode_texts
from tfdp.workflow.concentration import concentration_of, measure_concentration

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")


def test_four_fifths_of_the_pairs_lie_within_tau():
    gradients = np.random.default_rng(0).normal(size=(9, 30))
    distances = sorted(np.linalg.norm(a - b) for a, b in itertools.combinations(gradients, 2))
    found = concentration_of(gradients, 2.0)
    assert found.tau == pytest.approx(distances[28])  # 29 of 36 pairs, and 28 are too few
    assert found.ratio == pytest.approx(distances[28] / 2)
    assert found.units == 9


@pytest.mark.parametrize(("spread", "holds"), [(0.0, True), (0.06, True), (0.08, False)])
def test_the_condition_is_a_tenth_of_the_clip_norm(spread, holds):
    """Orthogonal offsets of this length: every pair is sqrt(2) times it apart."""
    gradients = np.ones((6, 6)) + spread * np.eye(6)
    found = concentration_of(gradients, 1.0)
    assert found.ratio == pytest.approx(np.sqrt(2) * spread, abs=1e-6)
    assert found.could_hold is holds
    assert ("worth a look" in found.statement) is holds
    assert "not covered by epsilon" in found.statement


def test_one_unit_is_not_enough():
    with pytest.raises(DataError, match="at least two units"):
        concentration_of(np.ones((1, 3)), 1.0)


def test_units_are_clipped_means_of_their_first_k_records():
    texts = ("the cat sat", "a dog ran home", "on the mat", "what a day", "no", "never again", "so it goes")
    ids = ("a", "a", "a", "b", "c", "c", "d")
    spec = PrivacySpec.from_text("""
schema_version: "1.0"
claim:
  epsilon: 3
  delta: 1e-3
  adjacency: add_or_remove_one
  privacy_unit: {kind: user, description: u, id_field: s, max_records_per_unit: 2, method: user_wise_dp_sgd}
  data_accesses: [training]
data: {num_units: 4, size_is_public: true}
mechanism: {clip_norm: 0.5}
sampling: {scheme: poisson, expected_batch_size: 2, steps: 3}
""")
    model = build_model("gpt2:tiny", lora_rank=1)
    for variable in model.trainable_variables:  # the adapters begin at zero
        variable.assign(variable + 0.02 * np.random.default_rng(1).normal(size=variable.shape))
    found = measure_concentration(model, spec, TextRecords(texts, ids), sequence_length=12)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight")
    gradients = []
    for members in ([0, 1], [3], [4, 5], [6]):
        rows = []
        for index in members:
            x, y, weight = encode_texts(model, [texts[index]], 12)
            with tf.GradientTape() as tape:
                value = loss(y, model(x, training=True), sample_weight=weight)
            parts = tape.gradient(value, [v.value for v in model.trainable_variables])
            rows.append(np.concatenate([np.asarray(part).ravel() for part in parts]))
        mean = np.mean(rows, 0)
        gradients.append(mean * min(1.0, 0.5 / np.linalg.norm(mean)))
    distances = sorted(np.linalg.norm(a - b) for a, b in itertools.combinations(gradients, 2))
    assert found.tau == pytest.approx(distances[4], rel=1e-4)  # 5 of 6 pairs
    assert (found.clip_norm, found.units) == (0.5, 4)
    assert model.preprocessor is not None
