"""What one load knows, from its plan to its last commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.checkpoint.planner import ReadItem

from dcp_engine.planners.catalogue import Catalogue
from dcp_engine.planners.load_report import Cast, LoadReport
from dcp_engine.planners.load_whole import TakenWhole
from dcp_engine.planners.local_shards import LocalTensor
from dcp_engine.planners.ties import TieCheck

__all__ = ["LoadRun"]


@dataclass(slots=True)
class LoadRun:
    """State of one load of one planner. Thread-safety: none; the planner locks."""

    catalogue: Catalogue | None = None
    targets: dict[str, LocalTensor] = field(default_factory=dict)
    """Tensors of which this rank holds a part, but for those taken whole."""
    whole: TakenWhole | None = None
    """Tensors that the reader fills without asking for each."""
    casts: dict[str, Cast] = field(default_factory=dict)
    tie_check: TieCheck = field(default_factory=lambda: TieCheck({}, {}))
    items: Sequence[ReadItem] = field(default_factory=list)
    loaded: tuple[str, ...] = ()
    num_tensor_bytes: int = 0
    staged: dict[object, torch.Tensor] = field(default_factory=dict)
    """Read -> memory of the state, where the reader fills a temporary instead."""
    report: LoadReport | None = None

    def target(self, key: str) -> LocalTensor | None:
        """Where a key's tensor goes; ``None`` where nothing of it is loaded."""
        target = self.targets.get(key)
        return self.whole.describe(key) if target is None and self.whole is not None else target

    def whole_targets(self) -> list[LocalTensor]:
        """Those taken whole, as the others."""
        return [] if self.whole is None else [target for key in self.whole.keys if (target := self.whole.describe(key)) is not None]
