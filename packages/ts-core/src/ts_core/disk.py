"""Weights in files: folders that go with their process, files read with large reads.

What `wrap(disk_offload=DIRECTORY)` uses, for code of your own.
"""

from __future__ import annotations

from ts_core.store.disk import DiskFile, DiskFolder
from ts_core.store.run_folders import remove_stale_folders

__all__ = ["DiskFile", "DiskFolder", "remove_stale_folders"]
