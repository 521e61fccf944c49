"""Ctrl-C during a fit is noted, and heard between two steps.

| SIGINT                   | what happens                                                                        |
|--------------------------|-------------------------------------------------------------------------------------|
| the first during the fit | is noted, wherever it arrives; the callback stops the fit between two steps         |
| a second one             | `KeyboardInterrupt` at once, as without a private fit                               |
| after the fit            | `KeyboardInterrupt`; a fit that died by an exception has left the handler behind     |

Python's own handler would raise anywhere in Keras's loop. Most of that loop lies between callbacks, where nobody could
record how the fit ended.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

_NOTICE = b"\nCtrl-C: the private fit ends after this step. Once more ends it at once.\n"


class FitInterrupts:
    """The handler of SIGINT for the length of a fit.

    Nothing is changed outside of the main thread, or where somebody else than Python handles the signal.

    Attributes:
        noted: one has arrived since `begin`.
    """

    def __init__(self) -> None:
        self.noted = False
        self._running: Callable[[FrameType | None], bool] = _never

    def begin(self, running: Callable[[FrameType | None], bool]) -> None:
        """Takes the signal over.

        Args:
            running: whether the fit goes on, told from the stack; it must not keep the model alive.
        """
        self.noted = False
        before = signal.getsignal(signal.SIGINT)
        owner = getattr(before, "__self__", None)
        left_behind = isinstance(owner, FitInterrupts) and not owner._running(inspect.currentframe())
        if _in_main_thread() and (before is signal.default_int_handler or left_behind):
            self._running = running
            signal.signal(signal.SIGINT, self._handle)

    def end(self) -> None:
        """Gives the signal back; harmless when repeated. From another thread, the next signal does it."""
        self._running = _never
        if _in_main_thread() and signal.getsignal(signal.SIGINT) == self._handle:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.noted or not self._running(frame):
            self.end()
            signal.default_int_handler(number, frame)
        self.noted = True
        with contextlib.suppress(OSError):  # not print: it could be what was interrupted
            os.write(2, _NOTICE)


def _never(frame: FrameType | None) -> bool:
    return False


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
