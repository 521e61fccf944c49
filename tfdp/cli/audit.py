"""`tfdp audit`: attacks a finished run. `tfdp twin`: trains the same without privacy, to be attacked beside it."""

from __future__ import annotations

import pathlib
import warnings
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from tfdp.card import Audit
    from tfdp.workflow import TextRecords
    from tfdp.workflow.run_record import RunRecord

_AUDIT_EXAMPLE = """Examples:

```
tfdp audit run/
tfdp audit run/ --against twin/ --time-budget 10
```

Trained with `tfdp train --canaries 200`, a run also gives a lower bound of epsilon.
"""
_TWIN_EXAMPLE = """Example:

```
tfdp twin run/ --out twin/
tfdp audit run/ --against twin/
```
"""
_Run = Annotated[
    pathlib.Path,
    typer.Argument(metavar="RUN_DIR", help="Folder of a run of tfdp train or tfdp demo.", exists=True, file_okay=False),
]


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command("audit", epilog=_AUDIT_EXAMPLE)(audit)
    app.command("twin", epilog=_TWIN_EXAMPLE)(twin)


def audit(
    run: _Run,
    against: Annotated[
        pathlib.Path | None,
        typer.Option(metavar="DIR", help="Of a twin without privacy, from tfdp twin.", exists=True, show_default=False),
    ] = None,
    time_budget: Annotated[
        float | None,
        typer.Option(min=0.01, metavar="MINUTES", help="What is not done by then is left out.", show_default=False),
    ] = None,
    most_units: Annotated[int, typer.Option(min=2, help="Members, and others, that are attacked.")] = 2000,
    candidates: Annotated[int, typer.Option(min=1, help="Secrets that the one of a canary is ranked among.")] = 1023,
    prompts: Annotated[int, typer.Option(min=1, help="Documents of each side that the model is to complete.")] = 200,
) -> None:
    """Attack a trained model, and put what was found into audit.json and on the card.

    Membership inference on whole privacy units, exposure of canaries and a lower bound of epsilon, extraction of
    training documents; and, as tfdp.verify does, the gradients of a private step against materialised ones. All are
    looks at private data, which no epsilon covers; the card lists them. Exits with 1 when an attack refutes the claim
    (PS053), the gradients are wrong (PS043 to PS045), or the run cannot be audited.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from tfdp.card import attach_audit, load_card
    from tfdp.cli.networks import network
    from tfdp.cli.startup import quiet_start
    from tfdp.ledger import read_ledger
    from tfdp.spec import PrivacySpec
    from tfdp.workflow.run_record import read_record

    console = Console(highlight=False, soft_wrap=True)
    record = read_record(run)
    card = load_card(run / "MODEL_CARD.json")
    members, non_members = _records(record, run)
    spec = PrivacySpec.from_dict(read_ledger(run / card.provenance.ledger_file).spec)
    with quiet_start():
        import keras_hub  # noqa: F401 - to have its start-up messages here

        from tfdp.workflow.audit import AuditSettings, audit_run
    models = {"private": _trained(run / card.provenance.weights_file, card.provenance.weights_digest)}
    if against is not None:
        models["non_private"] = _trained(against / card.provenance.weights_file)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, Any] = {}

        def show(part: str, done: int, total: int) -> None:
            if part not in tasks:
                tasks[part] = bars.add_task(part, total=total)
            bars.update(tasks[part], completed=done)

        found = audit_run(
            spec,
            models,
            network(record.model.name),
            members,
            non_members,
            parameters_digest=card.provenance.parameters_digest,
            sequence_length=record.model.sequence_length,
            canaries=record.canaries.canaries if record.canaries is not None else None,
            trained=_as_trained(record, models["private"]),
            settings=AuditSettings(
                most_units=most_units,
                candidates=candidates,
                prompts=prompts,
                seconds=None if time_budget is None else 60 * time_budget,
            ),
            progress=show,
        )
    paths = attach_audit(run, found)
    _print(console, found)
    wrong = {"PS053", *(one.id for one in (found.gradients.findings if found.gradients is not None else ()))}
    refuted = [one for one in load_card(paths["json"]).review.findings if one.id in wrong]
    for finding in refuted:
        console.print(str(finding), style="bold red", markup=False)
    console.print(
        "These are exact values of private data, which no epsilon covers: the card lists the audit as an access.\n"
        f"Results: {paths['audit']}. Card: {paths['html']}",
        markup=False,
    )
    raise typer.Exit(1 if refuted else 0)


def twin(
    run: _Run,
    out: Annotated[pathlib.Path, typer.Option(metavar="DIR", help="A new directory for the twin.")],
    epochs: Annotated[
        float | None,
        typer.Option(min=0.0, help="By default as many steps as the private run.", show_default=False),
    ] = None,
) -> None:
    """Train the same model on the same data without any privacy, to compare attacks with.

    Canaries are included as their coins fell for the private run. Never release the twin: it keeps what the private
    model is trained not to keep. Exits with 1 when the data are not those of the run any more.
    """
    from rich.console import Console

    from tfdp.card.writing import LEDGER
    from tfdp.cli.networks import network
    from tfdp.cli.startup import quiet_start
    from tfdp.errors import DataError
    from tfdp.ledger import read_ledger
    from tfdp.spec import PrivacySpec
    from tfdp.workflow.canaries import cuts_texts, with_canaries, without_absent
    from tfdp.workflow.run_record import read_record
    from tfdp.workflow.twin import check_new_twin, plain_fit, save_twin

    record = read_record(run)
    check_new_twin(out)
    members, _ = _records(record, run)
    ledger = read_ledger(run / LEDGER)
    unit = PrivacySpec.from_dict(ledger.spec).claim.privacy_unit
    if cuts_texts(unit):
        raise DataError(
            f"Expected a run that was trained on whole texts. Received: pieces of them, as the unit is a {unit.kind}. "
            "Train a twin with model.fit on the same pieces, and save it as model.keras."
        )
    with quiet_start():
        import keras_hub  # noqa: F401 - to have its start-up messages here

        from tfdp.workflow import encode_texts
    records = members
    if record.canaries is not None:
        records = with_canaries(members, record.canaries.canaries, unit)
    model = network(record.model.name, record.model.lora_rank)
    arrays = without_absent(encode_texts(model, records.texts, record.model.sequence_length), records)
    batch_size = max(1, min(len(records), round(ledger.plan["expected_batch_size"])))
    steps = ledger.plan["steps"] if epochs is None else max(1, round(epochs * len(records) / batch_size))
    seconds = plain_fit(
        model,
        arrays,
        steps=steps,
        batch_size=batch_size,
        optimizer=record.model.optimizer,
        learning_rate=record.model.learning_rate,
    )
    save_twin(model, out)
    Console(highlight=False, soft_wrap=True).print(
        f"{steps} steps without privacy took {seconds:.0f} s. Do not release {out}: it is only there to be attacked.",
        markup=False,
    )


def _records(record: RunRecord, run: pathlib.Path) -> tuple[TextRecords, TextRecords]:
    """Members and non-members, as the run had them."""
    from tfdp.workflow.run_record import check_records, records_of

    if record.data.kind == "file":
        return records_of(record, run)
    from tfdp.demo.run import demo_records

    members, non_members = demo_records(record.data.most_units)
    check_records(record, members, non_members, run)
    return members, non_members


def _trained(path: pathlib.Path, digest: str | None = None) -> Any:
    """A saved model, which has to be the one of the card."""
    import keras

    from tfdp.errors import CardError, DataError
    from tfdp.files import sha256_file

    if not path.is_file():
        raise DataError(f"Expected a model at {path}. Received: no file. Name the folder of a run, or of a twin.")
    if digest is not None and sha256_file(path) != digest:
        raise CardError(f"Expected {path} to be the weights that the card names, received others. Export them again.")
    with warnings.catch_warnings():
        # A KerasHub task compiles itself, and Keras then misses the state of an optimizer that nobody will use.
        warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
        return keras.models.load_model(path, compile=False)


def _as_trained(record: RunRecord, private: Any) -> Any:
    """The released weights in the model that was trained: what was saved has merged adapters and nothing frozen."""
    from tfdp.cli.networks import network
    from tfdp.workflow import add_lora

    model = network(record.model.name)
    model.set_weights(private.get_weights())
    if record.model.lora_rank is not None:
        add_lora(model, record.model.lora_rank)
    return model


def _print(console: Any, found: Audit) -> None:
    from rich.table import Table

    from tfdp.card.formats import deviation, interval, lower_bound, number

    if found.gradients is not None:
        console.print(
            f"Gradients of a private step, on {found.gradients.units} units: norms within "
            f"{deviation(found.gradients.norms)} of materialised ones, sums within {deviation(found.gradients.sums)}."
        )
    table = Table(title="Attacks", title_justify="left")
    for heading in ("attack", "model", "members, others", "AUC (interval)", "TPR at 1% FPR", "epsilon >="):
        table.add_column(heading)
    for attack in found.attacks:
        low = [point.true_positive_rate for point in attack.tpr_at_fpr if point.false_positive_rate == 0.01]
        table.add_row(
            attack.name if attack.group is None else f"{attack.name}, group {attack.group}",
            attack.model.replace("_", "-"),
            f"{attack.members}, {attack.non_members}",
            f"{number(attack.auc)} ({interval(attack.auc_interval)})",
            number(low[0]) if low else "",
            "" if attack.epsilon_lower_bound is None else lower_bound(attack.epsilon_lower_bound),
        )
    console.print(table)
    for one in found.exposures:
        console.print(
            f"Exposure of {one.canaries} canaries, {one.model.replace('_', '-')} model: {number(one.mean)} bits on "
            f"average, at most {number(one.highest)}; {number(one.mean_by_chance)} by chance."
        )
    for row in found.extractions:
        what = "training documents" if row.documents == "members" else "other documents"
        console.print(
            f"Extraction, {row.model.replace('_', '-')} model: of {row.prompts} {what}, {row.exact} came back exactly, "
            f"{row.approximate} within a tenth."
        )
    for part in found.skipped:
        console.print(f"Not done: {part.part}: {part.reason}", style="yellow", markup=False)
