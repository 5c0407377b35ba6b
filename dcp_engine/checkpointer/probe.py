"""A probe: what the model makes of a fixed input, recorded when it is saved and compared when it is restored."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dcp_engine.checkpointer.rng_guard import eval_rng
from dcp_engine.errors import InvalidOptionError, MalformedCheckpointError, ProbeError
from dcp_engine.train_state.rng import Generators

__all__ = ["PROBE_TOLERANCE", "ProbeRecord", "ProbeResult", "ProbeValue", "compare", "run_probe"]

PROBE_TOLERANCE: Final = 1e-4
"""Largest relative difference on another topology: sums in another order round differently."""

MAX_ELEMENTS: Final = 4096
"""Elements of a value that are kept; of a larger one every n-th."""

MAX_VALUES: Final = 64
"""Values that one probe may give: what is kept of them lies in every manifest."""

_SEED: Final = 0x5EED


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeValue:
    """One value that a probe gave.

    Attributes:
        name: ``"loss"``, ``"output"``, or the probe's own.
        dtype: as torch writes it: ``"torch.bfloat16"``.
        shape: in elements.
        sha256: of all its bytes, in hex.
        kept: little-endian float64 of at most :data:`MAX_ELEMENTS` elements, evenly spread (real and imaginary parts are two of them).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str
    kept: bytes


@dataclass(frozen=True, slots=True)
class ProbeRecord:
    """What a probe gave, in its order."""

    values: tuple[ProbeValue, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for the checkpoint's metadata."""
        return {value.name: [value.dtype, list(value.shape), value.sha256, value.kept] for value in self.values}

    @classmethod
    def from_dict(cls, value: object) -> ProbeRecord:
        """The inverse of :meth:`as_dict`.

        Raises:
            MalformedCheckpointError: this is nothing that :meth:`as_dict` gives.
        """
        try:
            return cls(tuple(_read_value(name, part) for name, part in dict(value).items()))  # type: ignore[call-overload]
        except (TypeError, ValueError) as error:
            raise MalformedCheckpointError(
                "the values of the probe in the checkpoint's metadata are none", expected="those of a save", found=repr(value)[:300]
            ) from error


def _read_value(name: Any, part: Any) -> ProbeValue:
    dtype, shape, sha256, kept = part
    value = ProbeValue(name=name, dtype=dtype, shape=tuple(shape), sha256=sha256, kept=kept)
    texts = all(isinstance(text, str) for text in (value.name, value.dtype, value.sha256))
    if not texts or not all(type(size) is int for size in value.shape) or not isinstance(kept, bytes) or len(kept) % 8:
        raise ValueError("no value of a probe")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """How what a probe gives compares with what was recorded.

    Attributes:
        equal_bits: every byte of every value is the same.
        max_relative_difference: largest difference of two elements of a value, relative to the largest magnitude in it; infinite where a
            value has another name or shape, or is finite on one side only.
        tolerance: largest one that is allowed on another topology.
        ok: equal bits on the same topology, else at most the tolerance.
        text: the same in words.
    """

    equal_bits: bool
    max_relative_difference: float
    tolerance: float
    ok: bool
    text: str


def run_probe(probe: Callable[[], Any], *, modules: Iterable[nn.Module] = (), generators: Generators | None = None) -> ProbeRecord:
    """What a probe gives, without a trace in training.

    It runs in eval mode, without autograd and autocast, from a fixed seed of the global generators. Afterwards every generator, mode,
    gradient and buffer is what it was, and parameters of FSDP2 are sharded; also if the probe raises.

    Args:
        probe: called without arguments. Returns a loss, ``(output, loss)``, or a mapping of values by name; values are tensors (of any
            device; a ``DTensor`` is gathered), numbers and numpy arrays, or nested mappings and sequences of them; None is left out.
        modules: of the model.
        generators: registered ones, to be left alone too.

    Raises:
        ProbeError: the probe raised, or gave what cannot be compared.

    Thread-safety: as training itself. Where the model is sharded, all ranks call this together.
    """
    if not callable(probe):
        raise InvalidOptionError("the probe is not callable", expected="a function without arguments", found=repr(probe)[:300])
    with ExitStack() as stack:
        stack.enter_context(eval_rng(generators, seed=_SEED))
        stack.enter_context(_undisturbed(list(modules)))
        stack.enter_context(torch.no_grad())
        for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            stack.enter_context(torch.autocast(device, enabled=False))
        try:
            given = probe()
        except Exception as error:
            raise ProbeError(
                "the probe raised",
                found=f"{type(error).__name__}: {error}"[:500],
                remedy="call it once before training: it must run as it is",
            ) from error
        return ProbeRecord(tuple(_value(name, value) for name, value in _named(given)))


@contextmanager
def _undisturbed(modules: list[nn.Module]) -> Iterator[None]:
    """Eval mode, and everything back as it was: what the modules' forward passes change, and what a backward pass would."""
    every = [module for root in modules for module in root.modules()]
    modes = [(module, module.training) for module in every]
    grads = [(parameter, parameter.grad) for root in modules for parameter in root.parameters()]
    buffers = [(module, name, buffer, _local(buffer).clone()) for module in every for name, buffer in module.named_buffers(recurse=False)]
    try:
        for root in modules:
            root.eval()
        for parameter, _ in grads:
            parameter.grad = None
        yield
    finally:
        for module in every:
            if isinstance(module, FSDPModule):
                module.reshard()  # a forward pass without a backward one leaves the root's parameters whole
        for module, mode in modes:
            module.training = mode
        for parameter, grad in grads:
            parameter.grad = grad
        for module, name, buffer, content in buffers:
            if getattr(module, name) is not buffer:
                setattr(module, name, buffer)
            # A copy counts as a change, which a graph that is still to run backward would refuse.
            if not torch.equal(_local(buffer), content):
                _local(buffer).copy_(content)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _named(given: object) -> list[tuple[str, object]]:
    if isinstance(given, tuple | list) and len(given) == 2:
        given = {"output": given[0], "loss": given[1]}
    values = list(_flat("", given if isinstance(given, Mapping) else {"loss": given}))
    if not 0 < len(values) <= MAX_VALUES:
        raise ProbeError(
            "the probe gave no values, or too many",
            expected=f"a loss, (output, loss) or a mapping of up to {MAX_VALUES} values",
            found=f"{len(values)} values",
        )
    return values


def _flat(name: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _flat(f"{name}.{key}" if name else str(key), part)
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from _flat(f"{name}.{number}", part)
    elif value is not None:
        yield name, value


def _value(name: str, value: object) -> ProbeValue:
    if not isinstance(value, torch.Tensor | np.ndarray | np.generic | int | float | complex):
        raise ProbeError(
            f"the probe gave a value {name!r} that cannot be compared",
            expected="a tensor, a number or a numpy array",
            found=f"a {type(value).__module__}.{type(value).__qualname__}",
        )
    try:
        # Python's numbers have 64 bits, whatever torch's default is.
        tensor = value if isinstance(value, torch.Tensor) else torch.from_numpy(np.array(value))
        tensor = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
        tensor = tensor.resolve_conj().resolve_neg().cpu().contiguous()
        content: Any = tensor.reshape(-1).view(torch.uint8).numpy()
        elements = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
        kept = elements[:: -(-elements.numel() // MAX_ELEMENTS) or 1]
        numbers = (kept if kept.dtype == torch.float64 else kept.float() if kept.is_floating_point() else kept).double().numpy()
    except (
        RuntimeError,
        TypeError,
        NotImplementedError,
        OverflowError,
    ) as error:  # meta, sparse and quantised tensors, dtypes of less than a byte
        raise ProbeError(f"the probe gave a value {name!r} that cannot be read: {error}", found=f"a {type(value).__name__}") from error
    return ProbeValue(
        name=name,
        dtype=str(tensor.dtype),
        shape=tuple(tensor.shape),
        sha256=hashlib.sha256(content.data).hexdigest(),
        kept=numbers.astype("<f8").tobytes(),
    )


def compare(recorded: ProbeRecord, now: ProbeRecord, *, same_topology: bool, tolerance: float = PROBE_TOLERANCE) -> ProbeResult:
    """Holds what a probe gives against what was recorded. Pure.

    Args:
        recorded: at the save.
        now: after the restore.
        same_topology: demands equal bits.
        tolerance: largest relative difference that is allowed otherwise, at least 0.

    Raises:
        InvalidOptionError: the tolerance is out of range.
    """
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not tolerance >= 0:
        raise InvalidOptionError("the tolerance is out of range", expected="a number of at least 0", found=repr(tolerance)[:300])
    then, here = {value.name: value for value in recorded.values}, {value.name: value for value in now.values}
    if then.keys() != here.keys():
        text = f"it gave {sorted(here)}, and {sorted(then)} when it was recorded: it is another probe"
        return ProbeResult(equal_bits=False, max_relative_difference=float("inf"), tolerance=tolerance, ok=False, text=text)
    differences = {name: _difference(value, here[name]) for name, value in then.items()}
    unequal = {name: difference for name, difference in differences.items() if difference is not None}
    if not unequal:
        text = f"{len(then)} value{'s' if len(then) > 1 else ''}, equal bit for bit"
        return ProbeResult(equal_bits=True, max_relative_difference=0.0, tolerance=tolerance, ok=True, text=text)
    worst = max(unequal, key=lambda name: unequal[name])
    largest = unequal[worst]
    allowed = "equal bits on the same topology" if same_topology else f"{tolerance:.1e} on another topology"
    text = f"{worst} differs by {largest:.1e}, relative to its largest element; allowed: {allowed}"
    return ProbeResult(
        equal_bits=False,
        max_relative_difference=largest,
        tolerance=tolerance,
        ok=not same_topology and largest <= tolerance,
        text=text,
    )


def _difference(then: ProbeValue, now: ProbeValue) -> float | None:
    """None for equal bits, else the relative difference of the elements that were kept."""
    if (then.dtype, then.shape, then.sha256) == (now.dtype, now.shape, now.sha256):
        return None
    old, new = np.frombuffer(then.kept, "<f8"), np.frombuffer(now.kept, "<f8")
    if then.shape != now.shape or old.shape != new.shape:
        return float("inf")
    differ = (old != new) & ~(np.isnan(old) & np.isnan(new))
    old, new = old[differ], new[differ]
    if not old.size:
        return 0.0
    if not (np.isfinite(old).all() and np.isfinite(new).all()):
        return float("inf")
    kept = np.frombuffer(then.kept, "<f8")
    scale = np.abs(kept[np.isfinite(kept)]).max()
    return float(np.abs(new - old).max() / scale) if scale else float("inf")
