"""What a process holds, as it grows by known amounts."""

from __future__ import annotations

import mmap
import os
import threading

from benchmarks.usage import usage
from dcp_engine.staging.arena import Arena

MEGABYTE = 1 << 20


def test_descriptors_threads_and_memory_are_seen() -> None:
    before = usage()
    reading, writing = os.pipe()
    ends = threading.Event()
    thread = threading.Thread(target=ends.wait)
    thread.start()
    held = mmap.mmap(-1, 64 * MEGABYTE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # malloc might have pages left from earlier tests
    held.write(bytes(len(held)))
    found = usage()
    assert found.descriptors - before.descriptors == 2
    assert found.threads - before.threads == 1
    assert found.memory_bytes - before.memory_bytes > 0.9 * len(held)
    held.close()
    ends.set()
    thread.join()
    os.close(reading)
    os.close(writing)


def test_shared_memory_without_a_name_is_seen_until_it_is_unmapped() -> None:
    before = usage().shared_bytes
    arena = Arena(8 * MEGABYTE, "shared")
    assert usage().shared_bytes - before == 8 * MEGABYTE
    arena.close()
    assert usage().shared_bytes == before
