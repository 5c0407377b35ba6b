"""A part of a tensor in DCP's duck protocol, which DCP's planners and ours understand: asks for a slice without a process group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

__all__ = ["Part"]


@dataclass(frozen=True, slots=True)
class Part:
    """The box that one rank holds of a tensor, as a DTensor would describe it.

    Attributes:
        shape: of the whole tensor.
        offsets: where the box begins.
        tensor: its content, which also says its sizes.
    """

    shape: torch.Size
    offsets: torch.Size
    tensor: torch.Tensor

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=self.offsets, sizes=self.tensor.size()),
            properties=TensorProperties.create_from_tensor(self.tensor),
            size=self.shape,
        )
        return [WriteItem(index=MetadataIndex(fqn, self.offsets), type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=self.offsets, sizes=self.tensor.size())]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.tensor
