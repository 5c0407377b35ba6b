"""What is private elsewhere, and is as the engine takes it to be in the versions at hand."""

from __future__ import annotations

import threading
import time

import pytest

from dcp_engine.compat import limit_start

WAIT_SECS = 60


def test_the_start_of_a_thread_that_never_runs_is_waited_for_so_long_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the limit it would be waited for without end: this tells whether this version of Python still waits as it is taken to."""
    thread = threading.Thread(target=print, daemon=True)
    monkeypatch.setattr(thread, "_bootstrap", lambda: None)
    limit_start(thread, 0.05)
    begin = time.monotonic()
    starter = threading.Thread(target=thread.start, daemon=True)
    starter.start()
    starter.join(WAIT_SECS)
    assert not starter.is_alive()
    assert time.monotonic() - begin >= 0.05
    assert not thread.is_alive()


def test_a_thread_with_a_limited_start_is_like_any_other() -> None:
    done, may_end = threading.Event(), threading.Event()

    def work() -> None:
        done.set()
        may_end.wait(WAIT_SECS)

    thread = threading.Thread(target=work, daemon=True)
    limit_start(thread, WAIT_SECS)
    assert not thread.is_alive()
    thread.start()
    assert thread.is_alive()
    assert thread in threading.enumerate()
    assert done.wait(WAIT_SECS)
    may_end.set()
    thread.join(WAIT_SECS)
    assert not thread.is_alive()
