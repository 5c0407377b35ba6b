"""Turns what a run records, tensors and objects, into numbers and texts that are equal exactly if the values are. No I/O."""

from __future__ import annotations

import hashlib
import reprlib
import struct
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dcp_engine.errors import InvalidOptionError
from dcp_engine.testing.records import Scalar
from dcp_engine.train_state.rng import capture_rng

__all__ = [
    "digest",
    "fingerprint",
    "generator_digests",
    "learning_rates",
    "number",
    "sample_ids",
    "scalar",
    "scaler_values",
    "state_digests",
]


def number(value: Any, *, name: str) -> float:
    """A float of a number, or of a tensor with one element. A sharded tensor is gathered: all its ranks call it.

    Raises:
        InvalidOptionError: it is no number; names it.
    """
    if isinstance(value, torch.Tensor):
        value = (value.full_tensor() if isinstance(value, DTensor) else value).detach()
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidOptionError(
            f"{name} is no number", expected="a number, or a tensor with one element", found=repr(value)[:300]
        ) from error


def scalar(value: Any, *, name: str) -> Scalar:
    """A plain value as it is, floats of tensors and arrays with one element, else a text with the digest."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        return float(value)
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.dtype.is_floating_point:
        return number(value, name=name)
    return fingerprint(value)


def learning_rates(value: Any) -> tuple[float, ...]:
    """Of an optimizer's groups; or a number, or several, as they are."""
    if value is None:
        return ()
    if isinstance(value, Optimizer):
        value = [group["lr"] for group in value.param_groups]
    values = value if isinstance(value, list | tuple) else [value]
    return tuple(number(rate, name="lr") for rate in values)


def scaler_values(value: Any) -> dict[str, Scalar]:
    """What a ``GradScaler`` keeps; or a scale, under that name."""
    if value is None:
        return {}
    if hasattr(value, "state_dict"):
        return {name: scalar(part, name=f"scaler.{name}") for name, part in value.state_dict().items()}
    return {"scale": number(value, name="scaler")}


def sample_ids(value: Any) -> tuple[int, ...] | str | None:
    """Ids as ints; a text, such as a digest, as it is."""
    if value is None or isinstance(value, str):
        return value
    try:
        return tuple(int(sample) for sample in value)
    except (TypeError, ValueError) as error:
        raise InvalidOptionError(
            "batch holds no sample ids", expected="ints, a tensor of them, or a text", found=repr(value)[:300]
        ) from error


def generator_digests() -> dict[str, str]:
    """A digest of the state of each global generator of this process: one that was drawn from has another one."""
    states = capture_rng()
    named = {name: states[name] for name in ("python", "numpy", "torch")}
    named |= {f"cuda:{number}": state for number, state in enumerate(states["cuda"])}
    return {name: digest(state) for name, state in named.items()}


def state_digests(state: Any) -> dict[str, str]:
    """A digest of each value of a state, by its key: dots between the elements. Sharded tensors by what this rank holds.

    Args:
        state: a ``TrainState``, or anything with ``state_dict()``, or a mapping.
    """
    tree = state.state_dict() if hasattr(state, "state_dict") else state
    if not isinstance(tree, Mapping):
        raise InvalidOptionError("state is none", expected="a TrainState, a Stateful or a dict", found=repr(state)[:300])
    return {key: digest(value) for key, value in _leaves("", tree)}


def fingerprint(value: Any) -> str:
    """A short text with a digest, equal for equal values."""
    shown = value.flatten()[:3].tolist() if isinstance(value, torch.Tensor | np.ndarray) else value
    return f"{reprlib.repr(shown)} #{digest(value)[:12]}"


def digest(value: Any) -> str:
    """Hexadecimal digits, equal for equal types and bits."""
    hasher = hashlib.blake2b(digest_size=16)
    for part in _parts(value):
        hasher.update(struct.pack("<Q", len(part)))
        hasher.update(part)
    return hasher.hexdigest()


def _leaves(key: str, value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, part in value.items():
            yield from _leaves(f"{key}.{name}" if key else str(name), part)
    else:
        yield key, value


def _parts(value: Any) -> Iterable[bytes]:
    if isinstance(value, Mapping):
        yield b"mapping %d" % len(value)
        for key, part in value.items():
            yield from _parts(key)
            yield from _parts(part)
    elif isinstance(value, list | tuple):
        yield b"%s %d" % (type(value).__name__.encode(), len(value))
        for part in value:
            yield from _parts(part)
    elif isinstance(value, torch.Tensor):
        local = (value.to_local() if isinstance(value, DTensor) else value).detach().cpu().contiguous()
        yield f"{value.dtype} {tuple(value.shape)} {tuple(local.shape)}".encode()
        yield local.reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray | np.generic):
        yield f"{value.dtype} {value.shape}".encode()
        yield value.tobytes()
    elif isinstance(value, float):
        yield struct.pack("<d", value)
    elif isinstance(value, bytes | bytearray):
        yield bytes(value)
    else:
        yield f"{type(value).__qualname__} {value!r}".encode()
