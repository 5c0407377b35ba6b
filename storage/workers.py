"""Threads that encode, decode, digest and read: persistent, with reusable scratch memory, and with one error policy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self, TypeVar

from dcp_engine.compat import limit_start
from dcp_engine.errors import InvalidOptionError
from dcp_engine.storage.codecs import Scratch

__all__ = ["WorkerPool", "settled"]

_START_SECS = 2.0
"""A thread that has not begun by then is not waited for: others do the work."""

_Result = TypeVar("_Result")
_Item = TypeVar("_Item")


class WorkerPool:
    """A fixed number of threads for the pipelines of one writer or reader.

    Tasks run in the order of submission and must not wait for one another: that is what makes a deadlock impossible. Where the system
    gives no thread (the interpreter is shutting down, a limit of the container), tasks run in the caller's thread instead.

    Args:
        threads: number of threads, at least 1.

    Thread-safety: ``submit``, ``for_each``, ``start_each`` and the scratch leases may be used from any thread; several pipelines may share
    a pool.
    """

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise InvalidOptionError("a worker pool needs threads", expected="threads >= 1", found=threads)
        self.threads = threads
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._idle_scratch: list[Scratch] = []
        self._closed = False
        self._workers: list[threading.Thread] = []
        for index in range(threads):
            worker = _Worker(self._serve, f"dcp-engine-worker-{index}")
            if not worker.begin():
                break  # no (more) threads to be had: those that run suffice, or the caller's thread does the work
            self._workers.append(worker)

    def submit(self, work: Callable[[], _Result]) -> Future[_Result]:
        """Queue ``work`` and return its future, which carries the result or whatever was raised, ``BaseException`` included."""
        future: Future[_Result] = Future()
        with self._lock:
            assert not self._closed, "the worker pool is closed"
            inline = not self._workers
            if not inline:
                self._tasks.put((future, work))
        if inline:
            _run(future, work)
        return future

    def for_each(self, items: Iterable[_Item], work: Callable[[_Item, Scratch], None], *, limit: int) -> None:
        """Call ``work(item, scratch)`` for every item, in order of their start, at most ``limit`` at once.

        Returns when all are done. After the first error no further item is started; when those that run have ended, that error is raised.
        An interrupt of the waiting thread is treated alike, so that no worker touches the caller's memory after this call has ended.
        """
        feed, loops = _Feed(items), list[Future[None]]()
        with settled(loops, feed.stop):
            self._begin(loops, feed, work, limit)
            wait(loops)
        # A future that holds the error, held by a frame that the error's traceback holds, would keep the caller's tensors alive.
        loops.clear()
        feed.raise_error()

    def start_each(self, items: Iterable[_Item], work: Callable[[_Item, Scratch], None], *, limit: int) -> Callable[[], None]:
        """Begin what :meth:`for_each` does, and return the wait for its end, which must be called once, whatever happens meanwhile."""
        feed, loops = _Feed(items), list[Future[None]]()
        with settled(loops, feed.stop):
            self._begin(loops, feed, work, limit)

        def finish() -> None:
            with settled(loops, feed.stop):
                wait(loops)
            loops.clear()
            feed.raise_error()

        return finish

    def _begin(self, loops: list[Future[None]], feed: _Feed[_Item], work: Callable[[_Item, Scratch], None], limit: int) -> None:
        for _ in range(max(1, min(limit, self.threads))):  # one by one, so that an interrupt finds those that have begun
            loops.append(self.submit(lambda: self._drain(feed, work)))

    def lease_scratch(self) -> Scratch:
        """Take a scratch that nobody else uses until it is given back. The most recently used one comes first: its memory is warm."""
        with self._lock:
            if self._idle_scratch:
                return self._idle_scratch.pop()
        return Scratch()

    def return_scratch(self, scratch: Scratch) -> None:
        """Give a leased scratch back, once nothing refers to its memory any more."""
        with self._lock:
            self._idle_scratch.append(scratch)

    def close(self) -> None:
        """Finish what is queued and end the threads. Harmless when repeated."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for _ in self._workers:
                self._tasks.put(None)
        for worker in self._workers:
            worker.join()
        self._idle_scratch.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            _run(*task)
            # While this thread waits for the next task, nothing here may keep a tensor of the last one alive.
            del task

    def _drain(self, feed: _Feed[_Item], work: Callable[[_Item, Scratch], None]) -> None:
        scratch = self.lease_scratch()
        try:
            for item in feed:
                work(item, scratch)
                del item
        except BaseException as error:
            feed.fail(error)
            raise
        finally:
            self.return_scratch(scratch)


class _Worker(threading.Thread):
    """A thread that begins, or is known not to.

    Daemon, so that a pool that nobody closed never keeps the process from exiting.
    """

    def __init__(self, work: Callable[[], None], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self._deciding = threading.Lock()
        self._runs = self._given_up = False
        limit_start(self, _START_SECS)

    def begin(self) -> bool:
        """Start; false where the system gives no thread, or not in time, in which case the work is not begun later either."""
        try:
            self.start()
        except (RuntimeError, MemoryError):
            return False
        if self.is_alive():
            return True
        with self._deciding:
            self._given_up = not self._runs
        return not self._given_up

    def run(self) -> None:
        with self._deciding:
            if self._given_up:
                return
            self._runs = True
        self._work()


@contextmanager
def settled(futures: Iterable[Future[Any]], stop: Callable[[], None] | None = None) -> Iterator[None]:
    """Leave the block only when none of ``futures`` is running: after an error, those that wait are cancelled and the others awaited.

    Args:
        futures: read when the block fails, so it may be a collection that the block still changes.
        stop: called first after an error, to make running tasks end early.
    """
    try:
        yield
    except BaseException:
        if stop is not None:
            stop()
        wait([future for future in futures if not future.cancel()])
        raise


class _Feed(Iterator[_Item]):
    """Hands items to several threads, one at a time, until one of them fails."""

    def __init__(self, items: Iterable[_Item]) -> None:
        self._items = iter(items)
        self._lock = threading.Lock()
        self._stopped = False
        self._error: BaseException | None = None

    def __next__(self) -> _Item:
        with self._lock:
            if self._stopped:
                raise StopIteration
            return next(self._items)

    def stop(self) -> None:
        with self._lock:
            self._stopped = True

    def fail(self, error: BaseException) -> None:
        with self._lock:
            self._stopped = True
            if self._error is None:
                self._error = error

    def raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error


def _run(future: Future[Any], work: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001 - carried to whoever asks for the result; the thread serves on
        future.set_exception(error)
    else:
        future.set_result(result)
