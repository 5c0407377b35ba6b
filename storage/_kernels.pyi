from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Memory: TypeAlias = bytes | bytearray | memoryview | NDArray[np.generic[Any]]

def pair(
    raw: Memory,
    itemsize: int,
    num_pairs: int,
    base: int,
    low: Memory,
    rest: Memory,
    codes: Memory,
    positions: Memory,
    exponents: Memory,
    /,
) -> tuple[int, int]: ...
def code(exponents: Memory, num_pairs: int, base: int, codes: Memory, positions: Memory, outside: Memory, /) -> int: ...
def unpair(out: Memory, itemsize: int, num_pairs: int, base: int, low: Memory, rest: Memory, codes: Memory, /) -> None: ...
def fold(rest: Memory, /) -> None: ...
def unfold(folded: Memory, rest: Memory, /) -> None: ...
