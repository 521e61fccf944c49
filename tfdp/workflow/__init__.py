"""A whole private fine-tuning job as a few plain functions: what `tfdp train`, the demo and the examples share.

    records = read_text_records("mails.jsonl", text_field="body", id_field="sender")
    records, held_out = split_held_out(records)
    model = build_model("gpt2:tiny")
    result = train_text_model(plan_for(spec, records.num_units), model, records, "run/", held_out=held_out)

None of them knows anything that cannot be done with the public parts alone: `make_plan`, `poisson_batches`,
`dp_optimizer`, `PrivacyCallback`, `export`.
"""

from __future__ import annotations

from tfdp.workflow.fitting import private_fit
from tfdp.workflow.job import TrainingResult, plan_for, steps_done, train_arrays, train_text_model
from tfdp.workflow.language_models import add_lora, build_model, encode_texts
from tfdp.workflow.records import TextRecords, read_text_records, split_held_out
from tfdp.workflow.units import record_perplexities, records_for

__all__ = [
    "TextRecords",
    "TrainingResult",
    "add_lora",
    "build_model",
    "encode_texts",
    "plan_for",
    "private_fit",
    "read_text_records",
    "record_perplexities",
    "records_for",
    "split_held_out",
    "steps_done",
    "train_arrays",
    "train_text_model",
]
