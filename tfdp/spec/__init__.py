"""The privacy spec: fields, reading with places, and nothing that imports TensorFlow."""

from __future__ import annotations

from tfdp.spec.fields import (
    Accountant,
    Budget,
    Claim,
    Data,
    Evaluation,
    Mechanism,
    PrivacyUnit,
    Sampling,
    Tuning,
    Waiver,
)
from tfdp.spec.privacy_spec import PrivacySpec
from tfdp.spec.schedule import Schedule
from tfdp.spec.schema import json_schema

__all__ = [
    "Accountant",
    "Budget",
    "Claim",
    "Data",
    "Evaluation",
    "Mechanism",
    "PrivacySpec",
    "PrivacyUnit",
    "Sampling",
    "Schedule",
    "Tuning",
    "Waiver",
    "json_schema",
]
