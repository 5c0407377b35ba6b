"""The same faults between the real S3 driver and a real S3 API server, through a proxy that breaks connections."""

from __future__ import annotations

import functools
import random
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import s3fs
from support.checkpoints import MANIFEST, publish, write_files
from support.fault_proxy import FAULTS, FaultProxy
from support.s3 import make_bucket, storage_options
from support.store_outcomes import judge, seen, whole_nonce

from dcp_engine.errors import CommitStateUnknownError, DcpEngineError, StorageError
from dcp_engine.storage.backends import conditions
from dcp_engine.storage.publish import open_publisher

__all__ = ["SCENARIOS", "run_into", "try_point"]

SCENARIOS = ("save", "overwrite", "load")
_NUM_SAMPLED = 12
_STALL_SECS = 0.6
# The driver's own patience would make a run take hours. The engine's is what is tried here.
_DRIVER = {"config_kwargs": {"retries": {"total_max_attempts": 1}}}


def run_into(facts: Counter[str], bad: list[str], *, full: bool, rng: random.Random) -> None:
    """Tries a sample of all points, or all of them with ``full``, and adds what it put and found."""
    with s3_proxy() as proxy:
        everything = [
            (scenario, fault, at, sticky)
            for scenario in SCENARIOS
            for at in range(count_requests(proxy, scenario))
            for fault in FAULTS
            for sticky in (False, True)
        ]
        facts["requests x faults through sockets"] = len(everything)
        for point in everything if full else rng.sample(everything, _NUM_SAMPLED):
            put, found = try_point(proxy, *point)
            facts["through sockets"] += put > 0
            bad += [f"{text}: through sockets, {point}" for text in found]


@contextmanager
def s3_proxy() -> Iterator[FaultProxy]:
    """A proxy before the S3 API server of this process."""
    proxy = FaultProxy(storage_options()["client_kwargs"]["endpoint_url"])
    try:
        with mock.patch.object(s3fs.S3FileSystem, "retries", 2):
            yield proxy
    finally:
        proxy.close()


def count_requests(proxy: FaultProxy, scenario: str) -> int:
    """Requests of a scenario without faults."""
    num_requests, found = try_point(proxy, scenario, None)
    assert found == [], found
    return num_requests


@functools.cache
def _bucket() -> str:
    return make_bucket()


def try_point(proxy: FaultProxy, scenario: str, fault: str | None, at: int = 0, sticky: bool = False) -> tuple[int, list[str]]:
    """Puts the fault; returns how many were really put (without one: the requests that were made), and what was broken."""
    url = f"s3://{_bucket()}/{uuid.uuid4().hex}/x"
    direct = storage_options()
    options: dict[str, Any] = {**direct, **_DRIVER, "client_kwargs": {"endpoint_url": proxy.endpoint}}
    if str(fault).endswith("stalls"):
        options["request_timeout_secs"] = _STALL_SECS
    old = None if scenario == "save" else publish(url, storage_options=direct).nonce
    conditions.forget()
    proxy.plan(fault, at, sticky=sticky)
    found = _load(url, options, old) if scenario == "load" else _save(url, options, direct, proxy, old, settles=at % 2 == 0)
    number = proxy.requests if fault is None else proxy.put
    proxy.plan(None)
    try:
        following = publish(url, storage_options=direct, overwrite=True).nonce
        proxy.settle()
        if (there := seen(url, direct)) != following:
            found.append(f"the next save was published and {there} is there")
    except DcpEngineError as error:
        found.append(f"the next save failed: {error}")
    return number, found


def _load(url: str, options: dict[str, Any], old: str | None) -> list[str]:
    try:
        found = whole_nonce(url, options)
    except StorageError:
        return []
    except DcpEngineError as error:
        return [f"a checkpoint that is there was called {type(error).__name__}"]
    return [] if found == old else [f"a load found {found}"]


def _save(url: str, options: dict[str, Any], direct: dict[str, Any], proxy: FaultProxy, old: str | None, *, settles: bool) -> list[str]:
    publisher = open_publisher(url, storage_options=options, overwrite=old is not None)
    ref, error, found = None, None, []
    try:
        ref = publisher.begin()
        publisher.commit(ref, MANIFEST, write_files(publisher, ref))
    except DcpEngineError as failure:
        error = failure
        if ref is not None and not isinstance(failure, CommitStateUnknownError):
            publisher.abort(ref)
    except Exception as failure:
        found.append(f"an error that is not the engine's: {failure!r}")
    new = ref.nonce if ref is not None else None
    found += judge(error, seen(url, direct), old=old, new=new, rival=None)
    if settles:  # else late requests take effect after the next save
        proxy.settle()
        found += [f"later: {text}" for text in judge(error, seen(url, direct), old=old, new=new, rival=None)]
    return found
