"""Results that print as a table."""

from __future__ import annotations

import io
from typing import Any


class Printed:
    """`print`, `rich.print` and a notebook show what `__rich__` returns."""

    def __rich__(self) -> Any:
        raise NotImplementedError

    def __str__(self) -> str:
        from rich.console import Console

        stream = io.StringIO()
        Console(file=stream, width=140).print(self.__rich__())
        return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())

    def __repr__(self) -> str:
        return str(self)
