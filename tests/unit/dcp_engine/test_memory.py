from __future__ import annotations

import pytest

from dcp_engine.errors import LimitExceededError
from dcp_engine.memory import require_memory


@pytest.mark.parametrize("num_bytes", [0, 1, 1 << 20])
def test_a_size_that_the_machine_has_is_allowed(num_bytes: int) -> None:
    require_memory(num_bytes, what="a state")


@pytest.mark.parametrize("num_bytes", [1 << 60, 1 << 100])
def test_a_size_beyond_the_machine_is_refused_with_both_sizes(num_bytes: int) -> None:
    with pytest.raises(LimitExceededError, match="a state is larger than this machine's memory") as caught:
        require_memory(num_bytes, what="a state", tensor="model.w")
    assert caught.value.tensor == "model.w"
    assert caught.value.found == f"{num_bytes} bytes"
