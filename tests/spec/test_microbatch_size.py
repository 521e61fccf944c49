"""`sampling.microbatch_size`: a number of units, or auto."""

from __future__ import annotations

import json

import pytest

from tfdp.review.catalogue import BASE
from tfdp.spec import PrivacySpec

_HELP = (
    "Correct it; microbatch_size: Units per forward pass, or auto: the fastest number, by a short timed search on "
    "made-up data. Has no effect on privacy. Such as: microbatch_size: 32"
)
_ALONE = "Write 16: a number alone, without anything around it."
_NUMBER = "Write the number: true and false are not 1 and 0 here."


def _written(value):
    return BASE.replace("sampling:\n", f"sampling:\n  microbatch_size: {value}\n")


@pytest.mark.parametrize(
    ("written", "value"), [("auto", "auto"), ("'auto'", "auto"), ("16", 16), ("1", 1), ("null", None)]
)
def test_what_it_may_be(written, value):
    spec = PrivacySpec.from_text(_written(written))
    assert spec.sampling.microbatch_size == value
    again = PrivacySpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert (again, again.digest) == (spec, spec.digest)


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("0", f"PS000 error: {{}}: expected a whole number of at least 1, received 0. {_HELP}"),
        ("-3", f"PS000 error: {{}}: expected a whole number of at least 1, received -3. {_HELP}"),
        ("1.5", f"PS000 error: {{}}: expected a whole number or auto, received 1.5. {_HELP}"),
        ("automatic", "PS000 error: {}: expected a whole number or auto, received 'automatic'. Did you mean auto?"),
        ("Auto", "PS000 error: {}: expected a whole number or auto, received 'Auto'. Did you mean auto?"),
        ("fast", f"PS000 error: {{}}: expected a whole number or auto, received 'fast'. {_HELP}"),
        (
            "16 units",
            f"PS000 error: {{}}: expected a whole number or auto, received '16 units'. {_ALONE}",
        ),
        ("'16'", "PS002 error: {}: expected a whole number or auto, received '16'. Write 16 without quotes."),
        (
            "true",
            f"PS002 error: {{}}: expected a whole number or auto, received true. {_NUMBER}",
        ),
        ("[auto]", f"PS000 error: {{}}: expected a whole number or auto, received a list. {_HELP}"),
    ],
)
def test_what_it_may_not_be(written, told):
    specs, (finding,) = PrivacySpec.all_from_text(_written(written))
    assert specs == []
    assert str(finding).partition(" ")[2] == told.format("sampling.microbatch_size")
    line = _written(written).splitlines()[finding.line - 1]
    assert line[finding.column - 1 :].startswith(written.strip("'")) or written in line
