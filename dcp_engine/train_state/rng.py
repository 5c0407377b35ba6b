"""The state of every random number generator of this process. No I/O, no communication."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from dcp_engine.compat import dtensor_rng_options, set_dtensor_rng_options
from dcp_engine.errors import InvalidOptionError, StateError
from dcp_engine.train_state.labels import require_type

__all__ = ["Generators", "capture_rng", "restore_rng"]


class Generators:
    """All generators of this process, as an object with a state.

    Args:
        generators: name -> torch generator, besides the global ones.
        numpy_generators: name -> numpy ``Generator``, besides the global one.
    """

    def __init__(
        self, generators: Mapping[str, torch.Generator] | None = None, numpy_generators: Mapping[str, np.random.Generator] | None = None
    ) -> None:
        for argument, given, kind in (
            ("generators", generators, torch.Generator),
            ("numpy_generators", numpy_generators, np.random.Generator),
        ):
            require_type(given, Mapping, argument, f"None or a dict of {kind.__module__}.{kind.__name__} by name")
            for name, generator in (given or {}).items():
                if not isinstance(generator, kind):
                    raise InvalidOptionError(
                        f"{argument}[{name!r}] is no generator", expected=f"{kind.__module__}.{kind.__name__}", found=repr(generator)[:300]
                    )
        self._generators, self._numpy_generators = dict(generators or {}), dict(numpy_generators or {})

    def state_dict(self) -> dict[str, Any]:
        """As :func:`capture_rng`."""
        return capture_rng(self._generators, self._numpy_generators)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As :func:`restore_rng`."""
        restore_rng(state_dict, self._generators, self._numpy_generators)


def capture_rng(
    generators: Mapping[str, torch.Generator] | None = None, numpy_generators: Mapping[str, np.random.Generator] | None = None
) -> dict[str, Any]:
    """All of it, in types that the format holds.

    Python's and numpy's global generators, torch's on the CPU and on every CUDA device (where CUDA is in use: asking would start it),
    DTensor's tracker of tensor-parallel regions (which since 2.11 draws from the device's generator, and has one switch of its own), and
    the given ones.

    Args:
        generators: name -> torch generator on any device.
        numpy_generators: name -> numpy ``Generator``.
    """
    uses_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "cuda": list(torch.cuda.get_rng_state_all()) if uses_cuda else [],
        "dtensor": dtensor_rng_options(),
        "generators": {name: generator.get_state() for name, generator in (generators or {}).items()},
        "numpy_generators": {name: generator.bit_generator.state for name, generator in (numpy_generators or {}).items()},
    }


def restore_rng(
    state: Mapping[str, Any],
    generators: Mapping[str, torch.Generator] | None = None,
    numpy_generators: Mapping[str, np.random.Generator] | None = None,
) -> None:
    """Continue every sequence where :func:`capture_rng` left it. CUDA devices that this process lacks are left out.

    Raises:
        StateError: generators of other names, or of another kind of bits, were captured. Nothing is changed then.
    """
    registered, numpy_registered = dict(generators or {}), dict(numpy_generators or {})
    _check_names("generators", state["generators"], registered)
    _check_names("numpy_generators", state["numpy_generators"], numpy_registered)
    for name, generator in numpy_registered.items():
        kind, found = type(generator.bit_generator).__name__, state["numpy_generators"][name]["bit_generator"]
        if kind != found:
            raise StateError(f"numpy_generators[{name!r}] is of another kind than the saved one", expected=found, found=kind)
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        for device, cuda_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(cuda_state, device)
    set_dtensor_rng_options(state["dtensor"])
    for name, torch_generator in registered.items():
        torch_generator.set_state(state["generators"][name])
    for name, generator in numpy_registered.items():
        generator.bit_generator.state = state["numpy_generators"][name]


def _check_names(argument: str, saved: Mapping[str, Any], registered: Mapping[str, Any]) -> None:
    if saved.keys() != registered.keys():
        raise StateError(
            f"{argument} are not those of the checkpoint",
            expected=sorted(saved),
            found=sorted(registered),
            remedy="register the same generators under the same names",
        )
