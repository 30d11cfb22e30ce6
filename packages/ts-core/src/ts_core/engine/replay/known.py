"""What is known of each block: signatures that came, those watched, and their recordings."""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ts_core.engine.replay.recording import Observed, Recording
from ts_core.engine.replay.watch import ModuleWatch, Weights

# Signatures (shapes, arguments, settings, states of the block) that one block keeps recordings of.
SIGNATURES = 4
_SEEN = 64
# Shapes of one block's arguments, seen once or more often, above which most cannot be kept.
_FEW = 2 * SIGNATURES


@dataclass
class Entry:
    """One signature of one block, in one Python state.

    Attributes:
        key: the signature.
        watch: the Python state.
        refused: whether such calls stay eager.
        observed: what an eager call with it showed.
        recordings: by the addresses of the block's weights, the last used last.
    """

    key: Any
    watch: ModuleWatch | None
    refused: bool = False
    observed: Observed | None = None
    recordings: OrderedDict[tuple[int, ...], Recording] = field(default_factory=OrderedDict)

    def drop(self) -> int:
        """Drop its recordings; how many."""
        count = len(self.recordings)
        self.recordings.clear()
        return count


class KnownBlock:
    """One block.

    Attributes:
        reference: to the block.
        weights: its tensors, once it has been watched.
        seen: how often signatures came, the last ones last.
        entries: of signatures that came again, the last used first.
        recordings: how many were made so far; negative where none can be.
    """

    def __init__(self, block: nn.Module) -> None:
        self.reference = weakref.ref(block)
        self.weights: Weights | None = None
        self.seen: OrderedDict[Any, int] = OrderedDict()
        self.entries: list[Entry] = []
        self.recordings = 0

    def comes_again(self, key: Any) -> bool:
        """Whether a signature has come before; counts it."""
        count = self.seen.pop(key, 0) + 1
        self.seen[key] = count
        while len(self.seen) > _SEEN:
            self.seen.popitem(last=False)
        return count > 1

    def find(self, key: Any) -> Entry | None:
        """The entry of a signature, in the block's present Python state."""
        for number, entry in enumerate(self.entries):
            if entry.key == key and (entry.watch is None or entry.watch.unchanged()):
                if number:
                    self.entries.insert(0, self.entries.pop(number))
                return entry
        return None

    def add(self, entry: Entry) -> int:
        """Keep one more entry; how many recordings went for it."""
        self.entries.insert(0, entry)
        dropped = 0
        while len(self.entries) > SIGNATURES:
            dropped += self.entries.pop().drop()
        return dropped

    def forget(self) -> int:
        """Drop all entries, and what came; how many recordings went."""
        dropped = sum(entry.drop() for entry in self.entries)
        self.entries.clear()
        self.seen.clear()
        self.recordings = min(self.recordings, 0)
        return dropped

    def weights_of(self, block: nn.Module) -> Weights:
        """Its tensors as they are now."""
        if self.weights is None or not _same(self.weights, block):
            self.weights = Weights(block)
        return self.weights

    def too_many_shapes(self) -> int:
        """Of how many shapes batches came, where so many come that few can be kept; else 0."""
        if len(self.seen) <= SIGNATURES:
            return 0
        counts: Counter[tuple[torch.Size, ...]] = Counter()
        for key, count in self.seen.items():
            counts[tuple(layout[0] for layout in key[1])] += count
        again = sum(count > 1 for count in counts.values())
        return 0 if again <= SIGNATURES and len(counts) <= _FEW else len(counts)

    def saved_bytes(self) -> int:
        """Device memory that its recordings hold for backward."""
        return sum(
            recording.size_bytes
            for entry in self.entries
            for recording in entry.recordings.values()
        )


def _same(weights: Weights, block: nn.Module) -> bool:
    now = list(block.parameters())
    return len(now) == len(weights.params) and all(
        a is b for a, b in zip(now, weights.params, strict=True)
    )
