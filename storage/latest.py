"""LATEST: a hint at the newest step of a root, which is never trusted without a look at what it names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from dcp_engine.errors import MalformedCheckpointError
from dcp_engine.storage.envelope import is_nonce
from dcp_engine.storage.limits import MAX_STEP
from dcp_engine.storage.texts import encode_text, parse_text

__all__ = ["LATEST_NAME", "LatestHint"]

LATEST_NAME: Final = "LATEST"
_STEP = re.compile(r"0|[1-9][0-9]{0,18}", re.ASCII)


@dataclass(frozen=True, slots=True)
class LatestHint:
    """The content of LATEST.

    Attributes:
        step: that was the newest when it was written.
        nonce: of the attempt that wrote it, so that another checkpoint under its name is not taken for it.
    """

    step: int
    nonce: str

    def encode(self) -> bytes:
        """The bytes of LATEST."""
        return encode_text("latest", [("step", str(self.step)), ("nonce", self.nonce)])

    @classmethod
    def decode(cls, data: bytes, *, path: str) -> LatestHint:
        """Parses LATEST. Raises ``CorruptCheckpointError`` kinds, ``UnsupportedVersionError``."""
        fields = parse_text(data, "latest", file=LATEST_NAME, path=path)
        if [name for name, _ in fields] == ["step", "nonce"]:
            step, nonce = fields[0][1], fields[1][1]
            if _STEP.fullmatch(step) and int(step) <= MAX_STEP and is_nonce(nonce):
                return cls(int(step), nonce)
        raise MalformedCheckpointError("not a LATEST", file=LATEST_NAME, path=path, expected="a step and a nonce", found=fields)
