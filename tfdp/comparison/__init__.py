"""What changed between two specs, or two cards, and whether privacy became weaker.

A table gives every field a rule; a field without one that changed is incomparable, so that nothing passes unseen. The
order of the table is the order of importance: what is protected and against what comes before how much, because epsilon
and delta of another privacy unit are other quantities. No TensorFlow.
"""

from tfdp.comparison.changes import Change, Comparison, Direction
from tfdp.comparison.files import FileComparison, compare_files
from tfdp.comparison.rendering import render_invalid, render_markdown, render_text
from tfdp.comparison.specs import compare_specs

__all__ = [
    "Change",
    "Comparison",
    "Direction",
    "FileComparison",
    "compare_files",
    "compare_specs",
    "render_invalid",
    "render_markdown",
    "render_text",
]
