"""A real S3 API server on loopback, moto's, and s3fs and boto3 pointed at it. One a process, started by the first test that wants it."""

from __future__ import annotations

import functools
import logging
import uuid
from typing import Any

import boto3
from botocore.config import Config
from moto.server import ThreadedMotoServer

__all__ = ["boto_client", "make_bucket", "storage_options"]

_CREDENTIALS = {"key": "loopback", "secret": "loopback"}


@functools.cache
def _endpoint() -> str:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    return f"http://{host}:{port}"


def storage_options() -> dict[str, Any]:
    """Keyword arguments for s3fs."""
    return {**_CREDENTIALS, "client_kwargs": {"endpoint_url": _endpoint()}}


@functools.cache
def boto_client() -> Any:
    """A plain client of the same server, to look at objects without the code under test and without fsspec."""
    return boto3.client(
        "s3",
        endpoint_url=_endpoint(),
        region_name="us-east-1",
        aws_access_key_id=_CREDENTIALS["key"],
        aws_secret_access_key=_CREDENTIALS["secret"],
        config=Config(retries={"max_attempts": 1}),
    )


def make_bucket() -> str:
    """A fresh bucket's name."""
    name = f"bucket-{uuid.uuid4().hex}"
    boto_client().create_bucket(Bucket=name)
    return name
