"""Matrix products in float32, also where TensorFlow would use TensorFloat-32.

Its products, the default on newer GPUs, are good to 1e-3 only: with norms as wrong as that, a unit could move the sum
by more than the clip norm. The setting is one of the process, and fits may run in several threads.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import tensorflow as tf

_lock = threading.Lock()
_users = 0
_before = True


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """No TensorFloat-32 within the block. The last block to end, in any thread, restores what the first one found."""
    global _users, _before
    with _lock:
        if _users == 0:
            _before = tf.config.experimental.tensor_float_32_execution_enabled()
            tf.config.experimental.enable_tensor_float_32_execution(False)
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                tf.config.experimental.enable_tensor_float_32_execution(_before)
