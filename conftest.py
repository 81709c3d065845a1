"""Loads the pytest plugin; everything it offers is in harness/suite/plugin.py."""

import contextlib
import signal

pytest_plugins = ["harness.suite.plugin"]


def pytest_configure() -> None:
    """Signals that tests send to what they start: a shell's background job and nohup make all children deaf to them."""
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            with contextlib.suppress(ValueError):  # not in the main thread
                signal.signal(number, usual)
