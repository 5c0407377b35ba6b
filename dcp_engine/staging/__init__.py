"""Host copies of the training state, so that training may go on while they are written.

``stager`` is DCP's call; ``state`` finds the tensors and builds the copy, ``layout`` says where each goes, ``arena`` and ``buffers`` are
the memory and who has it, ``copy_host`` and ``copy_cuda`` move the bytes, ``split`` takes floats apart on the way, ``digests`` and
``proof`` show that they stayed what they were, ``failure`` carries an error to all ranks, ``handed_out`` knows who has what.
"""

from __future__ import annotations

from dcp_engine.staging.buffers import BufferInfo, BufferState
from dcp_engine.staging.proof import SharedBuffer, StagingProof
from dcp_engine.staging.report import StagingReport
from dcp_engine.staging.stager import DoubleBufferStager

__all__ = ["BufferInfo", "BufferState", "DoubleBufferStager", "SharedBuffer", "StagingProof", "StagingReport"]
