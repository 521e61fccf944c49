"""`tfdp train`: fine-tunes a language model privately on a file of texts, and writes its card."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from tfdp.plan import Plan
    from tfdp.spec import PrivacySpec
    from tfdp.spec.fields import PrivacyUnit
    from tfdp.workflow import TextRecords, TrainingResult

_EXAMPLE = """Examples:

```
tfdp train --spec privacy.yaml --data mails.jsonl --model gpt2:tiny --out run/
tfdp train --spec privacy.yaml --data mails.csv.gz --text-field body --id-field sender \\
    --model gpt2_base_en --lora-rank 8 --sequence-length 256 --out run/
```

`--model`: `gpt2:tiny` is a small GPT-2 with random weights, for trying things out; `gpt2:demo` is the small public
model of `tfdp demo`; anything else is a KerasHub preset (downloaded) or the directory of one.

Stopped, or killed? The same call goes on from the last checkpoint. The ledger of the run never forgets a step.
"""


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("train", epilog=_EXAMPLE)(train)


def train(
    spec: Annotated[str, typer.Option(metavar="PATH", help="The privacy spec.")],
    data: Annotated[str, typer.Option(metavar="PATH", help="Texts: .jsonl, .csv or .tsv, also .gz.")],
    model: Annotated[str, typer.Option(metavar="NAME", help="gpt2:tiny, gpt2:demo, a KerasHub preset or directory.")],
    out: Annotated[str, typer.Option(metavar="DIR", help="Run directory: model, ledger and card.")],
    text_field: Annotated[str, typer.Option(help="Field or column with the text.")] = "text",
    id_field: Annotated[
        str | None,
        typer.Option(help="Field or column with the owner; by default the spec's id_field.", show_default=False),
    ] = None,
    drop_missing: Annotated[
        bool, typer.Option("--drop-missing", help="Leave records without an id out instead of refusing them.")
    ] = False,
    lora_rank: Annotated[
        int | None,
        typer.Option(min=1, help="Train adapters of this rank only; without it, all weights.", show_default=False),
    ] = None,
    sequence_length: Annotated[int, typer.Option(min=2, help="Tokens of a text that are used.")] = 128,
    optimizer: Annotated[str, typer.Option(help="Any optimizer of Keras, by name.")] = "adamw",
    learning_rate: Annotated[float, typer.Option(help="Its learning rate.")] = 1e-3,
    save_every: Annotated[
        int | None,
        typer.Option(min=1, help="Steps between two checkpoints; by default an epoch.", show_default=False),
    ] = None,
    holdout: Annotated[
        float,
        typer.Option(
            min=0.0, max=0.9, help="Share of the units set aside for the perplexity: not trained on, not covered."
        ),
    ] = 0.1,
    canaries: Annotated[
        int,
        typer.Option(min=0, help="Units with made-up secrets for tfdp audit; a coin lets each into the data."),
    ] = 0,
    canary_pattern: Annotated[
        str | None, typer.Option(help="Their text; each # is a random digit.", show_default=False)
    ] = None,
    canary_repetitions: Annotated[int, typer.Option(min=1, help="How often the text of one stands in the data.")] = 1,
) -> None:
    """Fine-tune a language model with differential privacy, and write its model card.

    One text is one privacy unit, or the texts with one id are, as the spec claims: then at most max_records_per_unit of
    them are used, chosen by its selection and protected by its method. A claim about a sequence packs all texts into
    sequences; one about a document of several records cuts its texts into pieces. Reviews the spec first, then trains
    under it: every step is in the ledger before it runs, and the run stops where the budget ends. How long it trains,
    with which noise and batches, stands in the spec alone. Exits with 1 when the spec, the data or the run is refused.
    """
    from rich.console import Console

    from tfdp.auditing.canaries import PATTERN, Canaries
    from tfdp.cli.networks import network
    from tfdp.cli.startup import quiet_start
    from tfdp.datasets.notes import read_note, scope_for
    from tfdp.findings import errors
    from tfdp.review import review
    from tfdp.sampling.claims import checked_units, claims_whole_unit
    from tfdp.spec import PrivacySpec
    from tfdp.spec.numbers import shown
    from tfdp.workflow.canaries import with_canaries
    from tfdp.workflow.records import read_text_records, split_held_out
    from tfdp.workflow.run_record import DataSource, ModelSource, start_record

    if not learning_rate > 0:
        raise typer.BadParameter(f"Expected --learning-rate above 0. Received: {learning_rate}.")
    console = Console(highlight=False, soft_wrap=True)
    reviewed = PrivacySpec.from_file(spec)
    findings = review(reviewed)
    for finding in findings:
        console.print(str(finding), style="red" if finding.severity == "error" else "yellow", markup=False)
    if errors(findings):
        raise typer.Exit(1)
    unit = reviewed.claim.privacy_unit
    if unit.kind == "sequence" and unit.sequence_length != sequence_length:
        raise typer.BadParameter(
            f"Expected --sequence-length {unit.sequence_length}, which the spec claims. Received: {sequence_length}."
        )
    chosen = _chosen_id_field(reviewed, id_field)
    deduplicated = scope_for(read_note(data), chosen)
    group_field = reviewed.evaluation.group_field if reviewed.evaluation else None
    records = read_text_records(
        data, text_field=text_field, id_field=chosen, group_field=group_field, drop_missing=drop_missing
    )
    records, held_out = split_held_out(records, holdout)
    members = records
    drawn = None
    if canaries:
        drawn = Canaries.draw(canaries, pattern=canary_pattern or PATTERN, repetitions=canary_repetitions)
        records = with_canaries(records, drawn, reviewed.claim.privacy_unit)

    with quiet_start():
        from tfdp.workflow import plan_for, steps_done, train_text_model
        from tfdp.workflow.units import packed, splits_documents

    if unit.kind == "sequence":  # how many there are is for the tokenizer to say
        start = network(model, lora_rank)
        num_units = len(packed(start, records, sequence_length))
    else:
        num_units = records.num_units if claims_whole_unit(unit) else len(records)
    plan = plan_for(reviewed, num_units)
    done = steps_done(out, plan)
    if claims_whole_unit(unit) and not splits_documents(unit):
        checked_units(plan, records.unit_ids)  # before anything is written
    record = start_record(
        out,
        data=DataSource(
            path=os.path.abspath(data),
            text_field=text_field,
            id_field=chosen,
            group_field=group_field,
            drop_missing=drop_missing,
            holdout=holdout,
        ),
        model=ModelSource(
            name=model,
            lora_rank=lora_rank,
            sequence_length=sequence_length,
            optimizer=optimizer,
            learning_rate=learning_rate,
        ),
        members=members,
        non_members=held_out,
        canaries=drawn,
        begun=done > 0,
    )
    if record.canaries is not None:  # a run that goes on keeps those that it began with
        records = with_canaries(members, record.canaries.canaries, reviewed.claim.privacy_unit)
    _print_plan(console, plan, records, held_out, done, canaries)
    if unit.kind != "sequence":
        start = network(model, lora_rank)
    command = ["tfdp", "train", "--spec", spec, "--data", data, "--model", model, "--out", out]
    result = train_text_model(
        plan,
        start,
        records,
        out,
        held_out=held_out,
        sequence_length=sequence_length,
        optimizer=optimizer,
        learning_rate=learning_rate,
        save_freq=save_every or "epoch",
        details={
            "model_name": model if lora_rank is None else f"{model}, LoRA of rank {lora_rank}",
            "data_source": f"{os.path.basename(data)}, field {text_field}"
            + (
                f"; {canaries} of the units are canaries of an audit, of which coins kept about half out"
                if canaries
                else ""
            ),
            "deduplication_scope": deduplicated,
            "command": shlex.join(command) + f" (sequence length {sequence_length}, {optimizer}, rate "
            f"{shown(learning_rate)})",
        },
    )
    _print_result(console, result)


def _chosen_id_field(spec: PrivacySpec, given: str | None) -> str | None:
    """The field that names the unit: the spec's, which the option may repeat but not change."""
    stated = spec.claim.privacy_unit.id_field
    if given is not None and stated is not None and given != stated:
        raise typer.BadParameter(
            f"Expected --id-field {stated}, which the spec names (claim.privacy_unit.id_field). Received: {given}. "
            "What a unit is, is for the spec to say."
        )
    return stated or given


def _print_plan(
    console: Any, plan: Plan, records: TextRecords, held_out: TextRecords, done: int, canaries: int
) -> None:
    from tfdp.spec.numbers import rounded_up, shown

    unit = plan.privacy_unit
    most = "" if plan.truncated_batch_size is None else f", at most {plan.truncated_batch_size}"
    sampled = "units" if plan.num_records is None else "records"
    rows = {
        "privacy unit": f"{unit.kind}: {unit.description}",
        "units": f"{plan.num_units} to train on, {held_out.num_units} held out (not trained on, not covered)",
        "records": f"{len(records)} texts, {_how_bounded(unit)}",
        "sampling": f"{plan.scheme}{most}, q = {shown(plan.expected_batch_size)} / {plan.population} {sampled} = "
        f"{plan.sampling_probability:.4g}",
        "steps": f"{plan.steps} in {plan.epochs} epochs of {plan.steps_per_epoch}",
        "noise multiplier": f"{shown(plan.noise_multiplier)}, clip norm {shown(plan.clip_norm)}" + _how_clipped(plan),
        "epsilon": f"{rounded_up(plan.epsilon(plan.steps), 4)} of {shown(plan.target_epsilon)} at delta "
        f"{shown(plan.delta)} ({plan.adjacency}, {plan.accountant})",
    }
    if canaries:
        rows["canaries"] = f"{canaries} of these units, each let in by a coin; tfdp audit looks for them"
    if done:
        spent = rounded_up(plan.epsilon(done), 4)
        rows["already spent"] = f"{done} steps, epsilon {spent}; the run goes on from its checkpoint"
    _print_table(console, "Plan", rows)


def _how_clipped(plan: Plan) -> str:
    from tfdp.spec.numbers import shown

    if plan.adaptive_clipping is not None:
        adaptive = plan.adaptive_clipping
        return (
            f" at first, then towards quantile {shown(adaptive.quantile)}: noise multiplier "
            f"{shown(adaptive.gradient_noise_multiplier)} of the gradients, {shown(adaptive.count_noise)} of the count"
        )
    return "" if plan.per_layer is None else ", per layer"


def _how_bounded(unit: PrivacyUnit) -> str:
    most = unit.max_records_per_unit or 1
    if unit.kind == "example":
        return "each a unit"
    if unit.kind == "sequence":
        return f"packed into sequences of {unit.sequence_length} tokens, each a unit"
    chosen = "" if unit.selection is None else f" ({unit.selection})"
    how = {"group_privacy": "clipped singly and accounted together", "user_wise_dp_sgd": "averaged, then clipped"}
    of_one = how[unit.method] if unit.method in how and most > 1 else "clipped"
    pieces = " pieces" if unit.kind == "document" and most > 1 else ""
    return f"at most {most}{pieces} of a {unit.kind}{chosen}, {of_one}"


def _print_result(console: Any, result: TrainingResult) -> None:
    from tfdp.spec.numbers import rounded_up, shown

    plan = result.plan
    rows = {
        "epsilon spent": f"{rounded_up(result.epsilon, 4)} of {shown(plan.target_epsilon)} at delta "
        f"{shown(plan.delta)}",
        "steps": f"{result.steps} of {plan.steps}",
        "time": f"{result.seconds:.0f} s",
    }
    if result.before is not None and result.after is not None:
        interval = result.after.interval()
        between = "" if interval is None else f" (95% interval {interval[0]:.4g} to {interval[1]:.4g})"
        rows["perplexity before"] = f"{result.before.perplexity:.4g}"
        rows["perplexity after"] = f"{result.after.perplexity:.4g}{between}"
        rows["measured on"] = f"{result.after.num_records} held-out records: exact, not covered by epsilon"
    rows |= {
        "card": f"{result.paths['html']}",
        "model": f"{result.paths['model']}",
        "ledger": f"{result.paths['ledger']}",
    }
    _print_table(console, "Result", rows)


def _print_table(console: Any, title: str, rows: dict[str, str]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, show_header=False, title_justify="left")
    for name, value in rows.items():
        table.add_row(name, Text(value, overflow="fold"))
    console.print(table)
