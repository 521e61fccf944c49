"""`tfdp demo`: the whole way from spec to card on text that every Python carries."""

from __future__ import annotations

import pathlib
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from tfdp.demo.run import DemoResult

_EXAMPLE = """Examples:

```
tfdp demo
tfdp demo --out /tmp/demo --steps 20      # shorter, and noisier
tfdp demo --twin demo-twin && tfdp audit demo-run --against demo-twin
```
"""


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("demo", epilog=_EXAMPLE)(demo)


def demo(
    out: Annotated[str, typer.Option(metavar="DIR", help="A new directory for model, ledger and card.")] = "demo-run",
    steps: Annotated[int, typer.Option(min=1, help="Of each fit; noise is calibrated to them.")] = 48,
    twin: Annotated[
        pathlib.Path | None,
        typer.Option(
            metavar="DIR", help="Keep the model without privacy there, for tfdp audit --against.", show_default=False
        ),
    ] = None,
) -> None:
    """Fine-tune a small GPT-2 on Python's docstrings, without and with privacy, and write its model card.

    Nothing is downloaded: the private data are the standard library's docstrings, one docstring a privacy unit;
    the public model was trained on Python's help topics. A few minutes on two cores.
    """
    from rich.console import Console

    from tfdp.cli.startup import quiet_start

    console = Console(highlight=False, soft_wrap=True)
    began = time.monotonic()
    with quiet_start():
        import keras_hub  # noqa: F401 - its start-up messages belong to the quiet part
        import tensorflow as tf

        from tfdp.demo.run import fresh_directory, run_demo

        tf.config.list_logical_devices()
    directory = fresh_directory(out)
    result = run_demo(
        directory, steps=steps, twin=twin, say=lambda line: console.print(line, style="bold", markup=False)
    )
    _print_result(console, result, time.monotonic() - began)
    if twin is not None:
        console.print(
            f"Do not release {twin}: it is only there to be attacked, by tfdp audit {directory} --against {twin}",
            markup=False,
        )


def _print_result(console: Any, result: DemoResult, seconds: float) -> None:
    from rich.table import Table

    training = result.training
    interval = result.private.interval()
    table = Table(title=f"Perplexity on {result.private.num_records} held-out docstrings", title_justify="left")
    for heading in ("model", "perplexity", "bits per byte", "epsilon", "time of the fit"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    rows = (
        ("public, as it came", result.public, "0", ""),
        ("private", result.private, f"{training.epsilon:.3f}", f"{training.seconds:.0f} s"),
        ("without privacy", result.non_private, "unbounded", f"{result.non_private_seconds:.0f} s"),
    )
    for name, found, epsilon, time_taken in rows:
        table.add_row(name, f"{found.perplexity:.1f}", f"{found.bits_per_byte:.3f}", epsilon, time_taken)
    console.print(table)
    if interval is not None:
        console.print(f"95% interval of the private perplexity over records: {interval[0]:.1f} to {interval[1]:.1f}.")
    console.print(f"The whole demo took {seconds:.0f} s. Now read the card: {training.paths['html']}", markup=False)
