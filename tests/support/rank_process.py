"""What one process of the rank pool does: wait for a function, run it as one rank of a fresh gloo group, answer.

Started by :mod:`support.ranks` with one end of a socket. Messages to it are a pickled dict (a job), ``FINISH`` or nothing more (the pool is
gone: leave, and take every process started from here along). Its answers are pickled tuples: ``("ready", None)`` at first, ``("ok",
result)`` or ``("error", exception or None, text, clean, when)`` of a job and, once its group is destroyed, ``("finished", None)``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.util
import os
import pickle
import queue
import random
import reprlib
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.checkpoint  # paid once, here, instead of by the first test
from support.ranks import FINISH
from support.warning_filters import apply_warning_filters, warning_filters

_TESTS = str(Path(__file__).resolve().parents[1])


def main(descriptor: int, stacks_path: str) -> NoReturn:
    """Serves jobs until the pool closes its end of the socket."""
    os.set_inheritable(descriptor, False)
    stacks = open(stacks_path, "w", encoding="utf-8")  # noqa: SIM115 - open for the life of the process: the handler writes to it
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    torch.set_num_threads(1)
    connection = Connection(descriptor)
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, inbox), daemon=True, name="inbox").start()
    strays = _Strays()
    connection.send_bytes(pickle.dumps(("ready", None)))
    while True:
        _serve(inbox.get(), connection, inbox, strays)


def _receive(connection: Connection, inbox: queue.SimpleQueue[bytes]) -> None:
    """Reads beside the running job, so that a job that hangs cannot outlive the pool."""
    try:
        while True:
            inbox.put(connection.recv_bytes())
    except (EOFError, OSError):
        os.killpg(os.getpgrp(), signal.SIGKILL)


class _Strays:
    """Errors that reach nobody: of threads without a reader, and raised where Python cannot raise."""

    def __init__(self) -> None:
        self._errors: list[str] = []
        threading.excepthook = self._of_thread
        sys.unraisablehook = self._unraisable

    def _of_thread(self, args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None:
            self._errors.append(f"in thread {args.thread and args.thread.name}:\n{_text_of(args.exc_value)}")

    def _unraisable(self, args: Any) -> None:
        text = _text_of(args.exc_value) if args.exc_value is not None else str(args.exc_type)
        self._errors.append(f"{args.err_msg or 'exception ignored in'} {reprlib.repr(args.object)}:\n{text}")

    def take(self) -> list[str]:
        errors, self._errors = self._errors, []
        return errors


def _serve(message: bytes, connection: Connection, inbox: queue.SimpleQueue[bytes], strays: _Strays) -> None:
    job = pickle.loads(message)
    threads = set(threading.enumerate())
    strays.take()
    try:
        with _surroundings():
            _join_group(job)
            function = _function(job["module"], job["file"], job["qualname"])
            args, kwargs = pickle.loads(job["arguments"])  # after the function's module: its classes may be among them
            result = pickle.dumps(function(*args, **kwargs))
        if errors := strays.take():
            raise StrayError("\n".join(errors))
        answer: tuple[Any, ...] = ("ok", result)
    except BaseException as error:
        # BaseException: DCP's CheckpointException is one, and sys.exit in a rank is a failure like any other.
        failed_at_secs = time.monotonic()
        _leave_group()  # before anything slower: peers that wait for this rank get their error now, not at the group's timeout
        clean = not set(threading.enumerate()) - threads
        answer = ("error", _pickled(error), _text_of(error), clean, failed_at_secs)
    connection.send_bytes(pickle.dumps(answer))
    while inbox.get() != FINISH:
        pass
    _leave_group()
    connection.send_bytes(pickle.dumps(("finished", None)))


class StrayError(Exception):
    """The function returned, but an error of it reached nobody: a thread died, or a destructor failed."""


@contextlib.contextmanager
def _surroundings() -> Iterator[None]:
    """The same warnings, directory, environment and random state for every job, whatever the one before it left behind."""
    apply_warning_filters(warning_filters())
    directory, environment = os.getcwd(), dict(os.environ)
    random.seed(0)
    torch.manual_seed(0)
    try:
        yield
    finally:
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(environment)


def _join_group(job: dict[str, Any]) -> None:
    timeout = timedelta(seconds=job["group_timeout_secs"])
    store = dist.TCPStore("127.0.0.1", job["store_port"], is_master=False, timeout=timeout)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(job["run"], store),
        rank=job["rank"],
        world_size=job["world_size"],
        timeout=timeout,
    )


def _leave_group() -> None:
    if not dist.is_initialized():
        return
    dist.destroy_process_group()
    if "torch.distributed.tensor" in sys.modules:
        # DTensor caches output specs by mesh value; a cached one keeps the mesh, and with it the groups, of an earlier run.
        importlib.import_module("torch.distributed.tensor.debug")._clear_sharding_prop_cache()


def _function(module_name: str, file: str, qualname: str) -> Any:
    value: Any = _module(module_name, file)
    for name in qualname.split("."):
        value = getattr(value, name)
    return value


def _module(name: str, file: str) -> ModuleType:
    """The module under the name that it has in the pool's process, so that its classes pickle both ways.

    Test modules are no part of a package and cannot be imported by that name: they are loaded by path.
    """
    if name in sys.modules:
        return sys.modules[name]
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None and Path(spec.origin).samefile(file):
            return importlib.import_module(name)
    for depth in range(1, name.count(".") + 1):
        parent = ".".join(name.split(".")[:depth])
        sys.modules.setdefault(parent, ModuleType(parent))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None, f"{file} is no Python source"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _pickled(error: BaseException) -> bytes | None:
    """The error as bytes that surely unpickle, or None."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return None
    return data


def _text_of(error: BaseException) -> str:
    """The traceback, and the values of the innermost frame that belongs to the tests: a bare assert says nothing of them."""
    try:
        text = "".join(traceback.format_exception(error))
    except Exception as second:
        text = f"{type(error).__qualname__}, which cannot be printed: {type(second).__qualname__}\n"
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename.startswith(_TESTS)]
    if frames and frames[-1].f_code.co_filename != __file__:
        text += "values there:\n" + "".join(f"    {name} = {_short(value)}\n" for name, value in frames[-1].f_locals.items())
    return text


def _short(value: object) -> str:
    try:
        return reprlib.repr(value)
    except Exception as error:
        return f"<repr failed: {type(error).__qualname__}>"
