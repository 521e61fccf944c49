"""Both methods against the loop, on the text models of KerasHub."""

from __future__ import annotations

import functools
import time
from typing import Any

import numpy as np
import pytest

from tfdp.gradients import combining, uses

COUNT = 8
MODELS = [
    ("gpt2", 0),
    ("gpt2", 2),
    ("llama", 0),
    ("llama", 2),
    ("llama_tied", 0),
    ("bert", 0),
    ("bert", 2),
    ("masked", 0),
]
NAMES = [f"{kind}-{'lora' if lora else 'full'}" for kind, lora in MODELS]


@pytest.fixture(scope="module")
def case(oracle: Any) -> Any:
    """(model, eight records, reference, clip norm that is exactly one unit's norm), made once per model."""

    @functools.cache
    def make(kind: str, lora: int) -> Any:
        model, data = oracle.language_model(kind, lora=lora), oracle.records(kind, COUNT)
        reference = oracle.reference_of(model, data)
        clip_norm = float(np.sort(reference.norms[:3])[1])  # of the first three: one below, one at, one above
        return model, data, reference, clip_norm

    return make


@pytest.mark.parametrize(("kind", "lora"), MODELS, ids=NAMES)
def test_every_model_agrees_with_the_loop(case, oracle, kind, lora):
    model, data, reference, clip_norm = case(kind, lora)
    norms = reference.norms[:3]
    assert norms.min() < clip_norm < norms.max()
    assert clip_norm in norms
    result = oracle.private(model, oracle.rows(data, 0, 3), clip_norm)
    oracle.assert_agrees(result, reference.first(3), clip_norm)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "llama_tied", "masked"])
def test_kernels_formed_in_turn_agree_with_the_loop(case, oracle, monkeypatch, kind):
    """As large kernels are: here all, tied tables too, with padding and a unit that is not finite among the units."""
    formed = []
    turn = combining.formed
    monkeypatch.setattr(uses, "LARGE", 0)
    monkeypatch.setattr(combining, "formed", lambda of_one, *rest: formed.append(of_one) or turn(of_one, *rest))
    model, data, reference, clip_norm = case(kind, 0)
    weight = np.array([1, 0, 1, 1, 0, 1, 1, 0])
    run = oracle.traced(model, clip_norm)
    oracle.assert_agrees(run(data, weight), reference, clip_norm, weight)
    assert len(formed) > 3
    assert any(len(of_one) == 2 for of_one in formed) == (kind != "llama")  # of a table and the kernel tied to it


def test_kernels_formed_in_turn_leave_out_a_unit_that_is_not_finite(case, oracle, monkeypatch):
    monkeypatch.setattr(uses, "LARGE", 0)
    model, data, reference, clip_norm = case("gpt2", 0)
    x, y, sample_weight = oracle.rows(data, 0, 3)
    sample_weight = np.asarray(sample_weight, "float32").copy()
    sample_weight[1] = np.nan
    sums, norms, _ = oracle.private(model, (x, y, sample_weight), clip_norm)
    assert np.isfinite(norms).tolist() == [True, False, True]
    assert oracle.distance(sums, reference.first(3).sums(clip_norm, np.array([1, 0, 1]))) < 1e-4


def test_kernels_formed_in_turn_of_no_unit_are_zeros(case, oracle, monkeypatch):
    monkeypatch.setattr(uses, "LARGE", 0)
    model, data, _, clip_norm = case("gpt2", 0)
    sums, norms, _ = oracle.traced(model, clip_norm)(data, np.zeros(COUNT))
    assert [total.shape for total in sums] == [tuple(variable.shape) for variable in model.trainable_variables]
    assert not np.any(oracle.flat(sums))
    assert not np.any(norms)


@pytest.mark.parametrize(("kind", "lora"), [("gpt2", 0), ("llama", 2), ("bert", 0)])
def test_the_vectorized_path_agrees_with_the_loop(case, oracle, kind, lora):
    model, data, reference, clip_norm = case(kind, lora)
    result = oracle.private(model, oracle.rows(data, 0, 3), clip_norm, method="vectorized")
    oracle.assert_agrees(result, reference.first(3), clip_norm)


@pytest.mark.quick
@pytest.mark.parametrize("method", ["bookkeeping", "vectorized"])
def test_batch_sizes_padding_and_an_empty_microbatch(case, oracle, method):
    model, data, reference, clip_norm = case("gpt2", 0)
    for count in (1, 8):
        run = oracle.traced(model, clip_norm, method=method)
        some = oracle.rows(data, 0, count)
        oracle.assert_agrees(run(some, np.ones(count)), reference.first(count), clip_norm)
    weight = np.array([1, 0, 1, 1, 0, 1, 0, 0])
    oracle.assert_agrees(run(data, weight), reference, clip_norm, weight)
    sums, norms, losses = run(data, np.zeros(COUNT))
    assert not np.any(oracle.flat(sums))
    assert not np.any(norms)
    assert not np.any(losses)


def test_xla_agrees(case, oracle):
    model, data, reference, clip_norm = case("gpt2", 2)
    run = oracle.traced(model, clip_norm, jit_compile=True)
    weight = np.array([1.0, 0.0, 1.0])
    oracle.assert_agrees(run(oracle.rows(data, 0, 3), weight), reference.first(3), clip_norm, weight)


@pytest.mark.parametrize("options", [{}, {"records_per_unit": 2}, {"hybrid": True}], ids=["records", "users", "hybrid"])
def test_xla_compiles_once_and_not_for_every_batch(oracle, options):
    """XLA takes the values of what it holds to be constant into what it compiles: seconds, where a call takes none."""
    model = oracle.language_model("gpt2")
    run = oracle.traced(model, 0.5, jit_compile=True, **options)
    weight, times = np.ones(COUNT // options.get("records_per_unit", 1)), []
    for seed in range(3):
        before = time.process_time()
        run(oracle.records("gpt2", COUNT, seed=seed), weight)
        times.append(time.process_time() - before)
    assert max(times[1:]) < times[0] / 5


@pytest.mark.parametrize("method", ["bookkeeping", "vectorized"])
def test_two_records_a_unit(case, oracle, method):
    model, data, _, _ = case("gpt2", 0)
    reference = oracle.reference_of(model, data, records_per_unit=2)
    clip_norm = float(np.median(reference.norms))
    result = oracle.private(model, data, clip_norm, records_per_unit=2, method=method)
    assert len(result[1]) == COUNT // 2
    oracle.assert_agrees(result, reference, clip_norm)


@pytest.mark.parametrize("method", ["bookkeeping", "vectorized"])
def test_mixed_bfloat16_keeps_norms_and_sums_in_float32(oracle, method):
    """bfloat16 has 8 bits: the forward pass of one record differs from that of a batch by about 2**-8, so 3% here."""
    model = oracle.language_model("gpt2", dtype="mixed_bfloat16")
    data = oracle.records("gpt2", 3)
    reference = oracle.reference_of(model, data)
    clip_norm = float(np.median(reference.norms))
    sums, norms, losses = oracle.private(model, data, clip_norm, method=method)
    assert {s.dtype for s in sums} == {norms.dtype} == {losses.dtype} == {np.dtype("float32")}
    np.testing.assert_allclose(norms, reference.norms, rtol=0.03)
    assert oracle.distance(sums, reference.sums(clip_norm)) < 0.03


def test_full_lora_and_head_together(oracle):
    """What a user does who trains adapters and the classification head: some layers frozen, some with LoRA."""
    model = oracle.language_model("bert", lora=2)
    model.backbone.get_layer("token_embedding").trainable = False
    data = oracle.records("bert", 2)
    reference = oracle.reference_of(model, data)
    paths = " ".join(v.path for v in model.trainable_variables)
    assert "lora_kernel_a" in paths
    assert "logits" in paths
    oracle.assert_agrees(oracle.private(model, data, 0.7), reference, 0.7)
