"""Ctrl-C in the middle of a step takes effect when the step is over."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def after_the_step() -> Iterator[None]:
    """Keeps the first SIGINT until the end of the block, and raises `KeyboardInterrupt` there.

    A second one takes effect at once. Nothing is changed outside of the main thread, or where somebody else handles
    the signal.
    """
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    received: list[int] = []

    def keep(number: int, frame: FrameType | None) -> None:
        if received:
            signal.default_int_handler(number, frame)
        received.append(number)

    signal.signal(signal.SIGINT, keep)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if received:
        raise KeyboardInterrupt
