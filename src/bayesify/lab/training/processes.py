"""What happens to the processes of distributed training when one of them ends, and to Ctrl-C inside Lightning."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

MAIN_VARIABLE = "BAYESIFY_MAIN_PROCESS"
"""The environment variable that tells processes started by Lightning which process started them."""


@contextmanager
def followed_by_children() -> Iterator[None]:
    """Let processes that are started in the meantime end with this one; see `end_with_main_process`."""
    if MAIN_VARIABLE in os.environ:  # this is one of them
        yield
        return
    os.environ[MAIN_VARIABLE] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ[MAIN_VARIABLE]


def end_with_main_process() -> None:
    """In a process that Lightning started: end when the main process is killed.

    Otherwise it would wait for the main process for half an hour, if the two have not met yet.
    """
    main = os.environ.get(MAIN_VARIABLE)
    if main is None or os.name != "posix":  # elsewhere the parent's number does not change with its end
        return

    def watch() -> None:
        while os.getppid() == int(main):
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="end-with-main-process").start()


@contextmanager
def kept_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt for a Ctrl-C before the first batch.

    Lightning turns it into an exit with code 1, as of an error, and ignores every later Ctrl-C.
    """
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit as end:
        if not isinstance(end.__context__, KeyboardInterrupt):
            raise
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)
        raise KeyboardInterrupt from end
