"""Which memory, link and places an optimizer's buckets use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from ts_core.device import Device, resolve_device
from ts_core.device.base import Event
from ts_core.errors import OptionError, OutOfBudgetError, StateError
from ts_core.memory.arena import PinnedArena, default_arena
from ts_core.optim.buckets import Bucket
from ts_core.optim.device_places import DevicePlace, DeviceWork
from ts_core.optim.device_update import DeviceState
from ts_core.optim.homed import HomedLayout
from ts_core.optim.layout import PAD, FlatLayout, is_sharded, local, partition
from ts_core.optim.newest_first import SubmitNewest
from ts_core.optim.parts import PartSums, Submit
from ts_core.optim.places import NAMES, HostPlace, Place
from ts_core.optim.shared_place import SharedPlace
from ts_core.store.homes import TrainedHome
from ts_core.transfer import CopyEngine

_PIECES_PER_HOST_CALL = 16


class Storage:
    """Makes buckets and moves their state between places.

    Args:
        mode: of the optimizer.
        kind: of the moments in host places.
        seed: of stochastic rounding.
        chunk_elems: values per piece.
        pinned: page-lock host state too.
        threads: returns the number of host threads.
        say: told when state cannot be where it was wanted.

    Attributes:
        homes: the trained weights that live in images of paged blocks.
        submit: queues work on the host thread of the updates.
        submit_newest: the same, the newest first, as host updates during backward are.
        link_share, near_share: of the values in a "shared" place, as in `Piece`.
    """

    def __init__(
        self,
        mode: str,
        kind: str,
        seed: int,
        chunk_elems: int,
        pinned: bool,
        threads: Callable[[], int],
        say: Callable[[str], None],
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
        self._say = say
        self._work: DeviceWork | None = None
        self._bases: dict[torch.nn.Parameter, int] = {}
        self._next_base = 0
        self.homes: Mapping[torch.nn.Parameter, TrainedHome] = {}
        self._said_not_pinned = False
        self.submit: Submit | None = None
        self.submit_newest: SubmitNewest[Event | None] | None = None
        self.link_share = 0.5
        self.near_share = 0.0
        self._parts: PartSums | None = None

    def use(self, device: Device | None, copies: CopyEngine | None, arena: PinnedArena) -> None:
        """Work for this device, over this link, with this host memory."""
        self.device, self.copies, self.arena = device, copies, arena
        self._parts = None

    def check_same_device(self, device: Device) -> None:
        """Refuse another device than the one that state was made for."""
        if self.device is not None and self.device.torch_device != device.torch_device:
            raise StateError(
                f"the optimizer has state for {self.device.torch_device}, the session runs on "
                f"{device.torch_device}. Wrap before the first step, or move the model there first."
            )

    def buckets(self, params: Sequence[torch.nn.Parameter], group_index: int) -> Iterator[Bucket]:
        """Buckets for parameters of one group."""
        for layout in self.layouts(params):
            place = self._first_place(layout)
            assert self.copies is not None
            yield Bucket(layout, group_index, self.copies, self.arena, self._part_sums(), place)

    def layouts(self, params: Sequence[torch.nn.Parameter]) -> list[FlatLayout]:
        """Flat memory for parameters of one group, those in images of paged blocks last."""
        self._number(params)
        elsewhere = [param for param in params if param not in self.homes]
        found = [self._layout(members) for members in partition(elsewhere)]
        found += [HomedLayout(self.homes[param]) for param in params if param in self.homes]
        for layout in found:
            layout.bases = [self._bases[param] for param in layout.params]
        return found

    def _part_sums(self) -> PartSums:
        if self._parts is None:
            assert self.copies is not None and self.submit is not None
            limit = self.copies.max_inflight_bytes
            self._parts = PartSums(self.copies, self.arena, self.submit, limit)
        return self._parts

    def _number(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Give new parameters their random bits, in order and apart from each other."""
        for param in params:
            if param not in self._bases:
                self._bases[param] = self._next_base
                self._next_base += -(-param.numel() // PAD) * PAD

    def _layout(self, members: Sequence[torch.nn.Parameter]) -> FlatLayout:
        self._check_link(members[0])
        if is_sharded(members[0]) and not local(members[0]).is_contiguous():
            raise OptionError(
                f"a sharded parameter of shape {tuple(members[0].shape)} is not contiguous on "
                f"this process. Shard it along its first dimension."
            )
        return FlatLayout(members)

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
        moves = [each for each in zip(buckets, places, strict=True) if self._is_elsewhere(*each)]
        # What leaves device memory makes room for what comes.
        for bucket, name in sorted(moves, key=lambda each: self._grows_by(*each)):
            self._move(bucket, name)

    def _is_elsewhere(self, bucket: Bucket, name: str) -> bool:
        if isinstance(bucket.place, SharedPlace) and name == "shared":
            return bucket.place.cuts != self._cuts(bucket.layout.numel)
        return bucket.place.name != name

    def _grows_by(self, bucket: Bucket, name: str) -> float:
        """Device memory that its state takes in this place beyond what it takes now."""
        numel = bucket.layout.numel
        near = {"resident": numel, "shared": self._cuts(numel)[0]}.get(name, 0)
        return near / max(numel, 1) * bucket.state_bytes - bucket.place.device_bytes()

    def _move(self, bucket: Bucket, name: str) -> None:
        if bucket.place.device_bytes() and name in ("resident", "shared"):
            # By way of the link's memory, so that the device never has two copies.
            bucket.move(self._place("zero_copy", bucket.layout, bucket.place))
        place = self._place(name, bucket.layout, bucket.place)
        if place is not bucket.place:
            bucket.move(place)

    def let_go(self) -> None:
        """Keep no gradients for the device's updates: later work waits for those."""
        if self._work is not None:
            self._work.let_go()

    def settle(self) -> None:
        """Wait until the device has finished with all state, so that it may be read or written."""
        if self._work is not None:
            self._work.synchronize()

    def _first_place(self, layout: FlatLayout) -> Place:
        """Device updates where they may be wanted: what they take is measured before a split."""
        assert self.copies is not None
        linked = self.copies.device.separate_memory
        wanted = self.mode == "gpu" or (self.mode in ("auto", "hybrid") and linked)
        if not wanted or self.kind != "float32" or not self._addressable(layout):
            return self._place("host", layout)
        try:
            return self._place("zero_copy", layout)
        except OutOfBudgetError as error:
            if self.mode == "gpu":
                raise
            self.mode = "cpu"
            self._say(f"optimizer state stays with host threads: {error}")
            return self._place("host", layout)

    def _addressable(self, layout: FlatLayout) -> bool:
        """Whether the device may update the values where they are."""
        assert self.copies is not None
        if not isinstance(layout, HomedLayout) or layout.home.addressable(self.copies.device):
            return True
        if not self._said_not_pinned:
            self._said_not_pinned = True
            self._say(
                "weights of paged blocks that could not be page-locked are updated by host "
                "threads, since the device cannot reach them"
            )
        return False

    def splits(self) -> bool:
        """Whether state may be split between places after some steps."""
        assert self.copies is not None
        linked = self.copies.device.separate_memory  # else one memory, and no link between places
        return linked and (
            self.mode == "hybrid" or (self.mode == "auto" and self.kind == "float32")
        )

    def device_inflight_bytes(self) -> int:
        """Device memory of gradients that device updates are still to read."""
        assert self.copies is not None
        return self.copies.max_leaving_bytes // 2

    def device_work(self) -> DeviceWork:
        """The streams of device updates, made when first asked for."""
        if self._work is None:
            assert self.copies is not None
            self._work = DeviceWork(self.copies.device, self.device_inflight_bytes())
        return self._work

    def _place(self, name: str, layout: FlatLayout, before: Place | None = None) -> Place:
        """Between "zero_copy" and "shared" the state in page-locked memory stays what it is."""
        linked = before.link if isinstance(before, SharedPlace) else before
        if not (isinstance(linked, DevicePlace) and linked.over_link):
            linked = None
        in_place = isinstance(layout, HomedLayout)
        near, first = self._cuts(layout.numel)
        if name == "shared" and (in_place or not near < first < layout.numel):
            name = "zero_copy"
        target = layout.flat()
        if name == "host":
            return self._host_place(target, in_place)
        if name == "zero_copy" and linked is not None:
            return linked
        if name != "shared":
            return DevicePlace(target, self.device_work(), self.arena, name, in_place)
        assert self.copies is not None and self.submit_newest is not None
        link = linked or DevicePlace(target, self.device_work(), self.arena, "zero_copy")
        close = None
        if near:
            close = DevicePlace(target[:near], self.device_work(), self.arena, "resident")
        rest_of_state = link.state.slice(first, layout.numel)
        host = self._host_place(target[first:], False, rest_of_state)
        gradient_h = None
        if self.copies.device.separate_memory:
            rest = layout.numel - first
            gradient_h = self.arena.empty((rest,), layout.dtype, tag="gradients")
        return SharedPlace(
            close,
            link,
            host,
            first,
            self.device_work(),
            self.copies,
            gradient_h,
            self.submit_newest,
            self._piece,
        )

    def _cuts(self, numel: int) -> tuple[int, int]:
        """`SharedPlace.cuts` of so many values."""
        near = int(numel * self.near_share) // PAD * PAD
        return near, near + int((numel - near) * self.link_share) // PAD * PAD

    @property
    def _piece(self) -> int:
        """Values per call of the host's update, and per copy."""
        return self._chunk * _PIECES_PER_HOST_CALL

    def _host_place(
        self, target: torch.Tensor, in_place: bool, state: DeviceState | None = None
    ) -> HostPlace:
        assert self.copies is not None
        return HostPlace(
            target,
            self.copies,
            self.arena,
            kind=self.kind,
            seed=self._seed,
            threads=self._threads,
            piece=self._piece,
            pinned=self._pinned,
            in_place=in_place,
            state=state,
        )

    def _check_link(self, param: torch.nn.Parameter) -> None:
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
