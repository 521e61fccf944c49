"""A run that is attacked: its canaries, its record, its twin, and all attacks on models whose memory is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf

from tfdp import PrivacySpec, clipped_gradients
from tfdp.auditing import Canaries, audit_in_one_run, exposure_by_chance
from tfdp.errors import DataError, MisuseError
from tfdp.workflow import TextRecords, build_model, encode_texts, read_text_records, split_held_out
from tfdp.workflow.audit import CANARIES, LOSS, RATIO, AuditSettings, audit_run
from tfdp.workflow.canaries import with_canaries, without_absent
from tfdp.workflow.run_record import (
    DataSource,
    ModelSource,
    check_records,
    read_record,
    records_of,
    start_record,
)
from tfdp.workflow.twin import plain_fit

_LENGTH = 100
_MODEL = ModelSource(name="gpt2:tiny", sequence_length=_LENGTH)
_DIGEST = "0" * 64


def _spec(evaluation=None, delta=1e-6, **unit):
    unit = {"kind": "example", "description": "one text"} | unit
    return PrivacySpec.from_dict(
        {
            "schema_version": "1.0",
            "claim": {
                "epsilon": 9.0,
                "delta": delta,
                "privacy_unit": unit,
                "adjacency": "add_or_remove_one",
                "data_accesses": ["training"],
            },
            "data": {"num_units": 40, "size_is_public": True},
            "mechanism": {"clip_norm": 1.0, "noise_multiplier": 1.0},
            "sampling": {"scheme": "poisson", "expected_batch_size": 8.0, "steps": 2},
            **({} if evaluation is None else {"evaluation": evaluation}),
        }
    )


def _user(k, **more):
    return _spec(kind="user", description="one person", id_field="id", max_records_per_unit=k, **more)


def _texts(count, seed, length=70):
    generator = np.random.default_rng(seed)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    return tuple("".join(generator.choice(letters, length)) for _ in range(count))


@pytest.fixture(scope="module")
def tiny():
    return build_model("gpt2:tiny")


class _Memory:
    """Knows the next token wherever it has seen the whole beginning of a text, and nothing else."""

    def __init__(self, tiny, texts):
        x, y, _ = encode_texts(tiny, texts, _LENGTH)
        self._seen, self._next = tf.constant(x["token_ids"]), tf.constant(y)
        self._size = tiny.preprocessor.tokenizer.vocabulary_size()

    def __call__(self, inputs, training):
        same = tf.cast(inputs["token_ids"][:, None] == self._seen[None], tf.float32)
        known = tf.math.cumprod(same, axis=2)  # [batch, texts, positions]
        times = tf.einsum("bnt,ntv->btv", known, tf.one_hot(self._next, self._size))
        return 60.0 * tf.minimum(times, 1.0)  # whatever came next once is as likely as what came next often


class _Blank(_Memory):
    """Finds every token as likely as any other."""

    def __call__(self, inputs, training):
        return tf.zeros((*inputs["token_ids"].shape, self._size))


# Canaries among records.


def test_canaries_are_units_that_the_coins_keep_in_or_out():
    records = TextRecords(("a", "b", "c"), ("u", "v", "u"))
    canaries = Canaries.draw(20, repetitions=2, seed=3)
    unit = _user(2, method="group_privacy").claim.privacy_unit
    joined = with_canaries(records, canaries, unit)
    assert joined.texts[:3] == records.texts
    assert joined.num_units == 2 + 20
    assert len(joined) == 3 + 2 * 20
    for index, coin in enumerate(canaries.included):
        rows = [place for place, text in enumerate(joined.texts) if text == canaries.texts[index]]
        assert len(rows) == 2
        assert {joined.unit_ids[row] for row in rows} == {canaries.owners[index]}
        assert {joined.absent[row] for row in rows} == {not coin}
    assert not any(joined.absent[:3])
    alone = with_canaries(TextRecords(("a",)), Canaries.draw(4, seed=1), _spec().claim.privacy_unit)
    assert (alone.unit_ids, alone.num_units) == (None, 5)
    assert alone.take([0, 4]).absent == (alone.absent[0], alone.absent[4])


def test_what_the_claim_has_no_room_for_is_refused():
    records = TextRecords(("a",), ("u",))
    with pytest.raises(DataError, match="at most 2 repetitions"):
        with_canaries(
            records, Canaries.draw(4, repetitions=3, seed=1), _user(2, method="group_privacy").claim.privacy_unit
        )
    unit = _user(2, method="user_wise_dp_sgd", selection="random_chunk").claim.privacy_unit
    with pytest.raises(DataError, match="packed or cut into pieces"):
        with_canaries(records, Canaries.draw(4, seed=1), unit)


def test_an_absent_record_moves_nothing(tiny):
    """Its clipped gradient is zero to the last bit: the mechanism cannot tell it from a unit that is not there."""
    import keras

    records = TextRecords(("one text", "a canary", "another"), absent=(False, True, False))
    full = encode_texts(tiny, records.texts, 16)
    silent = without_absent(full, records)
    assert (silent[2].sum(axis=1) > 0).tolist() == [True, False, True]
    assert full[2].sum(axis=1).min() > 0
    tiny.compile(
        optimizer="sgd",
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight"),
    )
    only = tf.nest.map_structure(lambda leaf: leaf[1:2], silent)
    sums, _, _ = clipped_gradients(tiny, only, 1.0)
    assert all(not np.any(np.asarray(total)) for total in sums)
    there, _, _ = clipped_gradients(tiny, tf.nest.map_structure(lambda leaf: leaf[1:2], full), 1.0)
    assert any(np.any(np.asarray(total)) for total in there)


def test_the_twin_never_sees_an_absent_record(tiny):
    records = TextRecords(("zzzzqqqq",) + ("only this",) * 4, absent=(True,) + (False,) * 4)
    arrays = without_absent(encode_texts(tiny, records.texts, 16), records)
    seen = []

    class Watched:
        preprocessor = None

        def compile(self, **settings):
            self.optimizer = settings["optimizer"]

        def fit(self, batches, steps_per_epoch, **settings):
            seen.extend(next(iter(batches.take(1)))[0]["token_ids"].numpy() for _ in range(steps_per_epoch))

    model = Watched()
    plain_fit(model, arrays, steps=3, batch_size=4, optimizer="sgd", learning_rate=0.25)
    assert float(model.optimizer.learning_rate) == 0.25
    assert {tuple(row) for batch in seen for row in batch} == {tuple(arrays[0]["token_ids"][1])}
    with pytest.raises(DataError, match="records to train on"):
        plain_fit(model, tf.nest.map_structure(lambda leaf: leaf[:1], arrays), steps=1, batch_size=1)


# The record of a run.


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "d.csv"
    rows = [f"text number {index},p{index % 30},{'ab'[index % 2]}" for index in range(60)]
    path.write_text("\n".join(["text,id,team", *rows]) + "\n")
    source = DataSource(path=str(path), id_field="id", group_field="team", holdout=0.3)
    return path, source, split_held_out(read_text_records(path, id_field="id", group_field="team"), 0.3)


def test_members_and_others_are_found_again_without_a_copy(data, tmp_path):
    path, source, (members, others) = data
    assert {*members.groups, *others.groups} == {"a", "b"}
    record = start_record(tmp_path / "run", data=source, model=_MODEL, members=members, non_members=others)
    content = (tmp_path / "run" / "records.json").read_text()
    assert "text number" not in content
    assert '"p1"' not in content
    assert "do not release" in content
    assert read_record(tmp_path / "run") == record
    found = records_of(record, tmp_path / "run")
    assert [side.texts for side in found] == [members.texts, others.texts]
    assert not set(found[0].unit_ids) & set(found[1].unit_ids)
    assert (record.members, record.non_members) == (members.num_units, others.num_units)
    path.write_text(path.read_text().replace("text number 7,", "text number 8,"))
    with pytest.raises(MisuseError, match="Restore the data"):
        records_of(record, tmp_path / "run")


def test_the_digests_say_nothing_without_their_key(data, tmp_path):
    _, source, (members, others) = data
    runs = [
        start_record(tmp_path / name, data=source, model=_MODEL, members=members, non_members=others) for name in "ab"
    ]
    assert runs[0].member_digest != runs[1].member_digest
    swapped = TextRecords(members.texts[1:] + members.texts[:1], members.unit_ids)
    with pytest.raises(MisuseError, match="another order"):
        check_records(runs[0], swapped, others, tmp_path)


def test_a_run_that_goes_on_keeps_its_canaries(data, tmp_path):
    _, source, (members, others) = data
    run = tmp_path / "run"
    fixed = {"data": source, "model": _MODEL, "members": members, "non_members": others}
    first = start_record(run, **fixed, canaries=Canaries.draw(8))
    again = start_record(run, **fixed, canaries=Canaries.draw(8), begun=True)
    assert again.canaries == first.canaries
    assert again.canaries.canaries.texts == first.canaries.canaries.texts
    for changes, what in (
        ({"canaries": Canaries.draw(9)}, "canaries"),
        ({"canaries": None}, "canaries"),
        ({"model": ModelSource(name="other"), "canaries": Canaries.draw(8)}, "model"),
        ({"data": DataSource(path="x"), "canaries": Canaries.draw(8)}, "data"),
    ):
        with pytest.raises(MisuseError, match=f"Expected the {what} that"):
            start_record(run, **{**fixed, **changes}, begun=True)
    # What lies there of a call that never took a step is replaced.
    assert start_record(run, **fixed, canaries=Canaries.draw(8)).canaries != first.canaries
    with pytest.raises(MisuseError, match="which canaries"):
        start_record(tmp_path / "lost", **fixed, canaries=Canaries.draw(8), begun=True)


@pytest.mark.parametrize("content", [None, "{}", "not json"])
def test_a_run_without_a_record_cannot_be_audited(tmp_path, content):
    if content is not None:
        (tmp_path / "records.json").write_text(content)
    with pytest.raises(DataError, match=r"records\.json, in which tfdp train"):
        read_record(tmp_path)


# The attacks.


def _rows(audit, name):
    return {attack.model: attack for attack in audit.attacks if attack.name == name and attack.group is None}


def test_memory_is_found_and_its_absence_too(tiny):
    members, others = TextRecords(_texts(40, 1)), TextRecords(_texts(30, 2))
    canaries = Canaries.draw(40, pattern="the code is ######", seed=5)
    kept = [text for text, coin in zip(canaries.texts, canaries.included, strict=True) if coin]
    models = {"private": _Blank(tiny, ("a",)), "non_private": _Memory(tiny, (*members.texts, *kept))}
    settings = AuditSettings(candidates=255, prompts=8)
    told = []
    audit = audit_run(
        _spec(delta=1e-3),
        models,
        tiny,
        members,
        others,
        parameters_digest=_DIGEST,
        sequence_length=_LENGTH,
        canaries=canaries,
        settings=settings,
        progress=lambda *state: told.append(state),
    )
    assert audit.skipped == ()
    for name, counts in ((LOSS, (40, 30)), (RATIO, (40, 30)), (CANARIES, (len(kept), 40 - len(kept)))):
        found = _rows(audit, name)
        assert (found["private"].members, found["private"].non_members) == counts
        assert found["non_private"].auc == 1.0
        assert [point.true_positive_rate for point in found["non_private"].tpr_at_fpr] == [1.0, 1.0]
        assert found["non_private"].advantage == 1.0
    # Under the blank model all losses are one number but for rounding, and its ratio is the reference alone.
    for name in (LOSS, RATIO):
        low, high = _rows(audit, name)["private"].auc_interval
        assert low < 0.5 < high

    # Every guess that the coins allow is right; the bound is that at the delta of the claim.
    bound = _rows(audit, CANARIES)["non_private"].epsilon_lower_bound
    expected, without = (
        audit_in_one_run(canaries.included, canaries.included, delta=delta).epsilon for delta in (1e-3, 0.0)
    )
    assert bound == pytest.approx(expected, rel=1e-6)
    assert expected < without - 1e-3
    assert _rows(audit, CANARIES)["private"].epsilon_lower_bound < 1.0
    exposed = {one.model: one for one in audit.exposures}
    assert exposed["non_private"].mean == exposed["non_private"].highest == 8.0
    assert exposed["private"].mean < exposure_by_chance(255) + 1.5
    assert exposed["private"].canaries == len(kept)

    drawn = {(row.model, row.documents): row for row in audit.extractions}
    assert {key: (row.prompts, row.exact) for key, row in drawn.items()} == {
        ("private", "members"): (8, 0),
        ("private", "non_members"): (8, 0),
        ("non_private", "members"): (8, 8),
        ("non_private", "non_members"): (8, 0),
    }
    assert {part for part, _, _ in told} == {"canaries", "membership inference", "extraction"}
    assert all(0 <= done <= total for _, done, total in told)


def test_the_unit_is_attacked_not_the_record(tiny):
    """Every member wrote one text that the model knows and two that it does not; a quarter of the people are "y"."""
    known, unknown, others = _texts(12, 1), _texts(24, 2), _texts(36, 3)
    groups = tuple("y" if index % 12 < 3 else "x" for index in range(36))
    members = TextRecords(known + unknown, tuple(f"m{index % 12}" for index in range(36)), groups=groups)
    strangers = TextRecords(others, tuple(f"n{index % 12}" for index in range(36)), groups=groups)

    def audit(**settings):
        return audit_run(
            _user(3, method="group_privacy", evaluation={"group_field": "team", "min_group_size": 3}),
            {"private": _Memory(tiny, known)},
            tiny,
            members,
            strangers,
            parameters_digest=_DIGEST,
            sequence_length=_LENGTH,
            settings=AuditSettings(prompts=1, **settings),
        )

    everybody = audit()
    found = _rows(everybody, RATIO)["private"]
    assert (found.members, found.non_members, found.auc) == (12, 12, 1.0)
    apart = {each.group: (each.members, each.non_members, each.auc, each.roc) for each in everybody.attacks}
    assert (apart["x"], apart["y"]) == ((9, 9, 1.0, ()), (3, 3, 1.0, ()))
    assert [part.part for part in everybody.skipped] == ["canaries"]
    # Some of the people come with all that they wrote, what the model knows included.
    some = _rows(audit(most_units=8), RATIO)["private"]
    assert (some.members, some.non_members, some.auc) == (8, 8, 1.0)


def test_small_groups_are_not_shown(tiny):
    members = TextRecords(_texts(12, 1), groups=("big",) * 9 + ("small",) * 3)
    others = TextRecords(_texts(12, 2), groups=("big",) * 9 + ("small",) * 3)
    audit = audit_run(
        _spec(evaluation={"group_field": "team", "min_group_size": 5}),
        {"private": _Blank(tiny, ("a",))},
        tiny,
        members,
        others,
        parameters_digest=_DIGEST,
        sequence_length=_LENGTH,
        settings=AuditSettings(most_units=11),
    )
    assert {attack.group for attack in audit.attacks} == {None, "big"}
    assert _rows(audit, LOSS)["private"].members == 11


def test_repeated_canaries_of_single_records_bound_no_single_unit(tiny):
    canaries = Canaries.draw(20, pattern="######", repetitions=4, seed=5)
    audit = audit_run(
        _spec(),
        {"private": _Blank(tiny, ("a",))},
        tiny,
        TextRecords(_texts(4, 1)),
        TextRecords(_texts(4, 2)),
        parameters_digest=_DIGEST,
        sequence_length=_LENGTH,
        canaries=canaries,
        settings=AuditSettings(candidates=15),
    )
    assert _rows(audit, CANARIES)["private"].epsilon_lower_bound is None
    assert audit.exposures[0].repetitions == 4


def test_what_there_is_no_time_or_text_for_is_told(tiny):
    fixed = {"parameters_digest": _DIGEST, "sequence_length": _LENGTH}
    models, members = {"private": _Blank(tiny, ("a",))}, TextRecords(_texts(4, 1, length=10))
    late = audit_run(
        _spec(),
        models,
        tiny,
        members,
        members,
        canaries=Canaries.draw(20, seed=1),
        settings=AuditSettings(seconds=0.0),
        **fixed,
    )
    assert (late.attacks, late.exposures, late.extractions) == ((), (), ())
    reasons = {part.part: part.reason for part in late.skipped}
    assert "time budget" in reasons["canaries"]
    assert "time budget" in reasons["membership inference"]
    short = audit_run(_spec(), models, tiny, members, TextRecords(()), **fixed)
    reasons = {part.part: part.reason for part in short.skipped}
    assert "without canaries" in reasons["canaries"]
    assert "--holdout" in reasons["membership inference"]
    assert "at least 60 tokens" in reasons["extraction"]
    cut = audit_run(
        _spec(), models, tiny, members, members, canaries=Canaries.draw(4, pattern="x" * 99 + "######", seed=1), **fixed
    )
    assert "secret may be cut off" in next(part.reason for part in cut.skipped if part.part == "canaries")
    assert math.isfinite(cut.seconds)
