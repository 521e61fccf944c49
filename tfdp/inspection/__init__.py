"""What a person can ask of a model before a private fit: how its gradients are taken, and whether they are right."""

from tfdp.inspection.explanation import Explanation, explain
from tfdp.inspection.verification import Verification, verify

__all__ = ["Explanation", "Verification", "explain", "verify"]
