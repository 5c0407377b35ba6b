"""The two names of torch (2.11 to 2.14) that have no public form: an extension that DCP documents, and the type of its writer's reports."""

from torch.distributed.checkpoint._extension import ZStandard as ZStandardExtension
from torch.distributed.checkpoint.filesystem import _StorageInfo as DCPStorageInfo

__all__ = ["DCPStorageInfo", "ZStandardExtension"]
