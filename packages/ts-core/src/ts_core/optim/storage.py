"""Which memory, link and places an optimizer's buckets use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from ts_core.device import Device, resolve_device
from ts_core.errors import OptionError, StateError
from ts_core.memory.arena import PinnedArena, default_arena
from ts_core.optim.buckets import Bucket
from ts_core.optim.device_places import DevicePlace, DeviceWork, StreamedPlace, StreamRing
from ts_core.optim.layout import FlatLayout, is_sharded, local, partition
from ts_core.optim.places import NAMES, HostPlace, Place
from ts_core.transfer import CopyEngine

_PIECES_PER_HOST_CALL = 16
_PIECES_PER_STREAMED = 4


class Storage:
    """Makes buckets and moves their state between places.

    Args:
        mode: of the optimizer.
        kind: of the moments in host places.
        seed: of stochastic rounding.
        chunk_elems: values per piece.
        pinned: page-lock host state too.
        threads: returns the number of host threads.
    """

    def __init__(
        self,
        mode: str,
        kind: str,
        seed: int,
        chunk_elems: int,
        pinned: bool,
        threads: Callable[[], int],
    ) -> None:
        self.mode = mode
        self.kind = kind
        self.device: Device | None = None
        self.copies: CopyEngine | None = None
        self.arena: PinnedArena = default_arena()
        self._seed = seed
        self._chunk = chunk_elems
        self._pinned = pinned
        self._threads = threads
        self._work: DeviceWork | None = None
        self._rings: dict[bool, StreamRing] = {}

    def use(self, device: Device | None, copies: CopyEngine | None, arena: PinnedArena) -> None:
        """Work for this device, over this link, with this host memory."""
        self.device, self.copies, self.arena = device, copies, arena

    def check_same_device(self, device: Device) -> None:
        """Refuse another device than the one that state was made for."""
        if self.device is not None and self.device.torch_device != device.torch_device:
            raise StateError(
                f"the optimizer has state for {self.device.torch_device}, the session runs on "
                f"{device.torch_device}. Wrap before the first step, or move the model there first."
            )

    def buckets(
        self, params: Sequence[torch.nn.Parameter], group_index: int, first: int
    ) -> Iterator[Bucket]:
        """Buckets for new parameters of one group; `first` is the number there are already."""
        for number, members in enumerate(partition(params)):
            copies = self._link_for(members[0])
            if is_sharded(members[0]) and not local(members[0]).is_contiguous():
                raise OptionError(
                    f"a sharded parameter of shape {tuple(members[0].shape)} is not contiguous on "
                    f"this process. Shard it along its first dimension."
                )
            layout = FlatLayout(members)
            name = "zero_copy" if self.mode == "gpu" else "host"
            place = self._place(name, layout, self._seed * 1_000_003 + first + number)
            yield Bucket(layout, group_index, copies, self.arena, place)

    def move(self, buckets: Sequence[Bucket], places: Sequence[str]) -> None:
        """Give each bucket the place named; state is copied bit for bit."""
        unknown = sorted({name for name in places if name not in NAMES})
        if unknown or len(places) != len(buckets):
            raise OptionError(
                f"places={list(places)!r} is not accepted. Use one of {', '.join(NAMES)} for each "
                f"of the {len(buckets)} buckets."
            )
        if self.kind != "float32" and any(name != "host" for name in places):
            raise OptionError(
                f"{self.kind} moments are kept by host threads only. Use moment_dtype='float32'."
            )
        for number, (bucket, name) in enumerate(zip(buckets, places, strict=True)):
            if bucket.place.name != name:
                bucket.move(self._place(name, bucket.layout, self._seed * 1_000_003 + number))

    def settle(self) -> None:
        """Wait until all state is where it is kept, so that it may be read or written."""
        if self._work is not None:
            self._work.stream.synchronize()
            self._work.copies.synchronize()

    def link_bytes(self) -> dict[str, int]:
        """Bytes that went each way: gradients and values, and streamed state."""
        engines = [self.copies, None if self._work is None else self._work.copies]
        totals = {"d2h": 0, "h2d": 0}
        for engine in engines:
            for name, stats in ({} if engine is None else engine.stats()).items():
                totals[name] += stats.bytes
        return totals

    def ring_bytes(self, master: bool) -> int:
        """Device memory of the buffers that streamed state passes through."""
        return 3 * self._chunk * _PIECES_PER_STREAMED * 4 * (3 if master else 2)

    def device_inflight_bytes(self) -> int:
        """Device memory of gradients that wait for device updates, in the queue and on the stream
        each."""
        assert self.copies is not None
        return self.copies.max_inflight_bytes // 4

    def device_work(self) -> DeviceWork:
        """The stream of device updates, made when first asked for."""
        if self._work is None:
            assert self.copies is not None
            self._work = DeviceWork(self.copies.device, self.device_inflight_bytes())
        return self._work

    def _place(self, name: str, layout: FlatLayout, seed: int) -> Place:
        target = layout.flat()
        if name == "host":
            assert self.copies is not None
            return HostPlace(
                target,
                self.copies,
                self.arena,
                kind=self.kind,
                seed=seed,
                threads=self._threads,
                piece=self._chunk * _PIECES_PER_HOST_CALL,
                pinned=self._pinned,
            )
        if name == "streamed":
            return StreamedPlace(target, self._ring(layout), self.arena)
        return DevicePlace(target, self.device_work(), self.arena, resident=name == "resident")

    def _ring(self, layout: FlatLayout) -> StreamRing:
        master = layout.dtype is not torch.float32
        if master not in self._rings:
            piece = self._chunk * _PIECES_PER_STREAMED
            self._rings[master] = StreamRing(self.device_work(), piece, master)
        return self._rings[master]

    def _link_for(self, param: torch.nn.Parameter) -> CopyEngine:
        here = local(param.data).device
        if self.device is None:
            self.device = resolve_device(here)
        if self.copies is None:
            self.copies = CopyEngine(self.device)
        if here != self.device.torch_device:
            raise StateError(
                f"a parameter of shape {tuple(param.shape)} is on {here}, the optimizer works for "
                f"{self.device.torch_device}. Move the model before the first step."
            )
        return self.copies
