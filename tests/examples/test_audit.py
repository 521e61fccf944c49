from __future__ import annotations

import importlib.util
import pathlib
import sys

import numpy as np
import pytest

from tfdp import PrivacySpec
from tfdp.auditing import Canaries
from tfdp.demo.public_model import load_tokenizer
from tfdp.findings import errors
from tfdp.review import review
from tfdp.workflow import plan_for, read_text_records, split_held_out

_PATH = pathlib.Path(__file__).parents[2] / "examples" / "audit.py"


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """What the example would call, as {command: [arguments]}, in order."""
    specification = importlib.util.spec_from_file_location("audit_example", _PATH)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    called = {}
    monkeypatch.setattr(module, "_call", lambda name, *arguments: called.update({name: list(arguments)}))
    monkeypatch.setattr(sys, "argv", ["audit.py", "--out", str(tmp_path / "out")])
    module.main()
    return called


def test_data_spec_and_canaries_fit_each_other(commands):
    """What `tfdp train` would refuse after minutes, or cut: the number of units, and the end of a secret."""
    assert list(commands) == ["train", "twin", "audit"]
    train = commands["train"]
    option = dict(zip(train[::2], train[1::2], strict=True))
    members, others = split_held_out(read_text_records(option["--data"]), option["--holdout"])
    spec = PrivacySpec.from_file(option["--spec"])
    assert not errors(review(spec))
    canaries = Canaries.draw(option["--canaries"], pattern=option["--canary-pattern"])
    plan = plan_for(spec, len(members) + canaries.count)
    assert plan.epsilon(plan.steps) <= 8.0 * (1 + 1e-6)
    assert 0.8 < len(members) / len(others) < 1.25
    longest = max(len(np.asarray(load_tokenizer()(text))) for text in canaries.texts)
    assert longest + 2 <= option["--sequence-length"]
    assert commands["twin"] == [option["--out"], "--out", option["--out"].with_name("twin")]
    assert commands["audit"] == [option["--out"], "--against", option["--out"].with_name("twin")]
