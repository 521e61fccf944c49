"""What a person can ask of a model before a private fit: how its gradients are taken, and whether they are right."""

from tfdp.inspection.clip_norms import ClipNormSuggestion, suggest_clip_norm
from tfdp.inspection.explanation import Explanation, explain
from tfdp.inspection.verification import Verification, verify

__all__ = ["ClipNormSuggestion", "Explanation", "Verification", "explain", "suggest_clip_norm", "verify"]
