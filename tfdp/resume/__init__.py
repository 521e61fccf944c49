"""Going on after an interruption: checkpoints, the place in the run, and Ctrl-C that is heard between two steps.

| after an interruption       | what holds                                                                             |
|-----------------------------|----------------------------------------------------------------------------------------|
| the ledger                  | has every step that was begun; those since the checkpoint are spent and lost           |
| the model and the optimizer | are those of the last whole checkpoint                                                 |
| randomness                  | is drawn anew from the operating system: no seed and no state is in a checkpoint       |
| the end of the run          | the updates that `fit` was asked for, or the last step of the plan, whichever is first |

An older checkpoint put back by hand is a model with fewer updates and the same spent steps.
"""

from __future__ import annotations

from tfdp.resume.checkpoint import Checkpoint, Position, read_checkpoint, restore, write_checkpoint
from tfdp.resume.interrupts import FitInterrupts
from tfdp.resume.run import ResumableRun

__all__ = [
    "Checkpoint",
    "FitInterrupts",
    "Position",
    "ResumableRun",
    "read_checkpoint",
    "restore",
    "write_checkpoint",
]
