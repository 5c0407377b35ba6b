"""A part of a tensor in DCP's duck protocol, which DCP's planners and ours understand: a rank's shard without ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

__all__ = ["Part"]


class Part(torch.Tensor):
    """The box that one rank holds of a tensor, as a DTensor would describe it. Make it with :meth:`of`; do not compute with it.

    It is a tensor, because DCP looks for parts in tensors alone, of the local shape; but its ``size()`` is the whole's, as a DTensor's is.
    """

    local: torch.Tensor
    whole: torch.Size
    offsets: torch.Size

    @classmethod
    def of(cls, local: torch.Tensor, *, whole: torch.Size, offsets: torch.Size) -> Part:
        """A part.

        Args:
            local: its content, which also says its sizes; the memory is shared.
            whole: shape of the whole tensor.
            offsets: where the box begins.
        """
        part = local.as_subclass(cls)
        part.local, part.whole, part.offsets = local, whole, offsets
        return part

    def size(self, dim: int | None = None) -> Any:
        """Of the whole."""
        return self.whole if dim is None else self.whole[dim]

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=self.offsets, sizes=self.local.size()),
            properties=TensorProperties.create_from_tensor(self.local),
            size=self.whole,
        )
        return [WriteItem(index=MetadataIndex(fqn, self.offsets), type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=self.offsets, sizes=self.local.size())]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.local
