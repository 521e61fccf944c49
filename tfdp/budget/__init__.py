"""The ledger of a data set: every run on it, and what all of them have spent together.

| guarantee                                         | how                                                            |
|---------------------------------------------------|----------------------------------------------------------------|
| a run is on it before its first step              | `register` appends, flushed to the disk, before the fit begins |
| failed and discarded runs count                   | by the steps on their own ledgers                              |
| a run whose ledger is gone, cut or changed counts | with all the steps that it was planned with; how far each had  |
|                                                   | come is noted as its fits begin and end                        |
| a run that is going on counts                     | with all its planned steps; the lock on its ledger tells       |
| runs that cannot be added up are refused          | one privacy unit and one adjacency for a ledger (PS034)        |
| the cap holds beforehand                          | a run that could exceed it does not begin (PS032)              |
| trials of which only the best is kept cost less   | `declare_trials` draws how many there are, before the first    |

The runs compose under one accountant (`tfdp.accounting.composed_epsilon`), whichever each was planned with. Trials of
hyper-parameters are runs like any other. The file is a chain of lines like the ledger of a run, with the same limits.
A process that is killed notes no end: what is cut off its ledger before the next fit on it begins is not missed.
"""

from __future__ import annotations

from tfdp.budget.registering import WARN_FROM, declare_trials, note_head, register
from tfdp.budget.runs import DatasetBudget, RegisteredRun, read_budget

__all__ = [
    "WARN_FROM",
    "DatasetBudget",
    "RegisteredRun",
    "declare_trials",
    "note_head",
    "read_budget",
    "register",
]
