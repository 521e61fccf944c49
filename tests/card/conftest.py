"""A run without a training: a ledger of real steps, and a model that saves a few bytes."""

from __future__ import annotations

import datetime
import json
import pathlib

import numpy as np
import pytest

from tfdp.card import export
from tfdp.files import sha256_arrays
from tfdp.ledger import Ledger
from tfdp.plan import make_plan
from tfdp.spec import PrivacySpec

EVALUATION = {
    "metrics": [
        {
            "name": "perplexity",
            "split": "held-out",
            "private": 59.8,
            "interval": [57.9, 61.8],
            "non_private": 47.2,
            "public": 142.6,
            "n": 680,
        }
    ],
    "groups": [
        {"name": "large", "n": 400, "value": 48.0, "before": 120.0, "interval": [46, 50]},
        {"name": "poor", "n": 200, "value": 64.5, "before": 151.0},
        {"name": "tiny", "n": 12, "value": 91.2357, "before": 88.1234},
    ],
    "group_field": "module",
    "group_metric": "perplexity",
    "membership_inference": {
        "threat_model": "black box",
        "members": 500,
        "non_members": 500,
        "auc": 0.513,
        "advantage": 0.031,
        "tpr_at_fpr": {0.01: 0.014},
        "epsilon_lower_bound": 0.21,
        "confidence": 0.95,
    },
}
HISTORY = {"loss": [4.6, 4.3], "val_loss": [4.4, float("nan")], "epsilon": [1.0, 2.0]}
DETAILS = {
    "title": "A small model",
    "model_name": "gpt2-small",
    "intended_use": "Tests.",
    "limits": "Many.",
    "licence": "apache-2.0",
    "citation": "Nobody, 2026.",
    "data_source": "Sentences",
    "command": "tfdp train",
    "hardware": "2 cores",
    "timings": {"training": 12.5},
}


SPEC = {
    "schema_version": "1.0",
    "claim": {
        "epsilon": 8.0,
        "delta": 1e-5,
        "privacy_unit": {"kind": "example", "description": "one sentence"},
        "adjacency": "add_or_remove_one",
        "release": "final_model",
        "data_accesses": ["training"],
    },
    "data": {"num_units": 1000, "size_is_public": True, "deduplication": "exact"},
    "mechanism": {"clip_norm": 0.5, "noise_multiplier": 1.0},
    "sampling": {"scheme": "poisson", "expected_batch_size": 50, "steps": 30},
    "tuning": {"kind": "none"},
    "evaluation": {"min_group_size": 50},
}


class Model:
    """All that export asks of a model."""

    name = "model"

    def __init__(self, weights=b"weights"):
        self._weights = weights

    def get_weights(self):
        return [np.frombuffer(self._weights, np.uint8)]

    def save(self, path):
        pathlib.Path(path).write_bytes(self._weights)


class Run:
    """Makes ledgers and cards in one directory."""

    def __init__(self, directory):
        self.SPEC = SPEC
        self.model = Model()
        self.directory = directory
        self.ledger = directory / "ledger.jsonl"

    def spec(self, **changes):
        """The spec with sections updated."""
        values = json.loads(json.dumps(self.SPEC))
        for section, fields in changes.items():
            values[section] = {**values.get(section, {}), **fields} if isinstance(fields, dict) else fields
        return PrivacySpec.from_dict(values)

    def plan(self, *, seed=None, **changes):
        return make_plan(self.spec(**changes), seed=seed).to_dict()

    def train(self, plan=None, steps=20, path=None, model=None):
        """A ledger of so many steps."""
        with Ledger.create_or_open(path or self.ledger, plan or self.plan(), clock=self.clock) as ledger:
            for _ in range(steps):
                ledger.append_step(ledger.steps + 1)
            if steps:
                ledger.append("fit_end", steps=ledger.steps, weights=sha256_arrays((model or Model()).get_weights()))
        return self

    @staticmethod
    def clock():
        return datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)

    def export(self, **arguments):
        arguments = {"evaluation": EVALUATION, "history": HISTORY, "details": DETAILS, **arguments}
        return export(arguments.pop("model", Model()), self.directory, clock=self.clock, **arguments)

    @property
    def card(self):
        return json.loads((self.directory / "MODEL_CARD.json").read_text(encoding="utf-8"))

    @property
    def markdown(self):
        return (self.directory / "MODEL_CARD.md").read_text(encoding="utf-8")

    @property
    def html(self):
        return (self.directory / "MODEL_CARD.html").read_text(encoding="utf-8")

    def ids(self, severity=None):
        found = self.card["review"]["findings"]
        return {finding["id"] for finding in found if severity in (None, finding["severity"])}

    def change(self, *path_and_value):
        """Writes another value into MODEL_CARD.json."""
        *path, last, value = path_and_value
        card = self.card
        place = card
        for key in path:
            place = place[key]
        place[last] = value
        (self.directory / "MODEL_CARD.json").write_text(
            json.dumps(card, sort_keys=True, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "run")
