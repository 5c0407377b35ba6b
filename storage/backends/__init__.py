"""Back ends: where the bytes of a checkpoint live. Local directories by system calls, everything else through fsspec."""

from dcp_engine.storage.backends.base import Buffer, Directory, ReadFile, WriteFile
from dcp_engine.storage.backends.locations import Location, is_remote, is_supported_path, locate, resolve

__all__ = ["Buffer", "Directory", "Location", "ReadFile", "WriteFile", "is_remote", "is_supported_path", "locate", "resolve"]
