"""One way to treat a model on a machine: how much memory and time a set of paged blocks takes."""

from __future__ import annotations

from ts_core.schedule.plan import (
    KEEP,
    OFFLOAD,
    RECOMPUTE,
    RECORDED_BLOCKS,
    MachineProfile,
    ModelProfile,
    Plan,
    PlanOptions,
    human,
    in_slots,
)
from ts_core.schedule.step_time import step_seconds

# Of free host memory, the most that activations may take.
_ACTIVATION_HOST_SHARE = 0.6


class Case:
    """Inputs of the planner with activations and slots decided; evaluates sets of paged blocks.

    Args:
        model, machine, options: the planner's inputs.
        policy: per block "keep", "offload" or "recompute"; empty when activations are unknown.
        slot_count: the most slots of the ring.
    """

    def __init__(
        self,
        model: ModelProfile,
        machine: MachineProfile,
        options: PlanOptions,
        policy: tuple[str, ...],
        slot_count: int,
    ) -> None:
        self.model = model
        self.machine = machine
        self.options = options
        self.policy = policy
        self.slot_count = slot_count
        self.budget = (
            None
            if machine.device_bytes is None
            else int(machine.device_bytes * (1.0 - options.headroom))
        )
        self.total = sum(model.pageable)
        self.rest = self._rest()

    def _rest(self) -> dict[str, int]:
        """Device memory by use, but for blocks and slots."""
        model, machine, options = self.model, self.machine, self.options
        if options.reserve is not None:
            return {"measured": options.reserve}
        if not machine.counts_fixed:
            return {"fixed": 0, "gradients": 0}
        rest = {"fixed": model.fixed_device}
        if machine.in_use:
            rest["taken_by_others"] = machine.in_use
        if self.policy:
            rest["activations"] = self._held() + min(options.inflight, self._moved())
            if options.replayed:
                rest["recordings"] = RECORDED_BLOCKS * self._largest_recorded()
        else:
            rest["gradients"] = model.trained
            if machine.device_bytes is not None:
                free = max(0, machine.device_bytes - machine.in_use)
                rest["activations_reserve"] = int(free * options.activation_share)
        return rest

    def _held(self) -> int:
        """Bytes that forward leaves on the device for backward."""
        kept = zip(self.model.activations, self.model.inputs, self.policy, strict=True)
        return sum(
            size if what == KEEP else inputs if what == RECOMPUTE else 0
            for size, inputs, what in kept
        )

    def _largest_recorded(self) -> int:
        """Bytes of activations and weight gradients of the largest block that can be replayed."""
        model, blocks = self.model, len(self.policy)
        gradients = model.trained_pageable or (0,)
        if not any(gradients):
            gradients = (model.trained // blocks,)
        sizes = zip(model.activations, self.policy, strict=True)
        replayed = [size for size, what in sizes if what != OFFLOAD]
        return max(replayed) + max(gradients) if replayed else 0

    def _moved(self) -> int:
        """Bytes of activations that go to host memory."""
        sizes = zip(self.model.activations, self.policy, strict=False)
        return sum(size for size, what in sizes if what == OFFLOAD)

    def _workspace(self, paged: tuple[int, ...]) -> int:
        """Temporary bytes at the peak: of the loss, or of some block's backward.

        In backward gradients come while what forward left goes, block by block; what recordings
        keep does not go.
        """
        model, blocks = self.model, len(self.policy)
        again = max(model.activations) if RECOMPUTE in self.policy else 0
        most = model.gradients(paged)
        coming = sum(model.trained_pageable) or model.trained
        going = 0 if self.options.replayed else self._held()
        gradients = max(
            min(done * coming // blocks, most) - (done - 1) * going // blocks
            for done in range(1, blocks + 1)
        )
        return max(model.head, again + model.transient + max(gradients, 0))

    def shortfall(self, paged: tuple[int, ...]) -> int:
        """Bytes over the device's budget with these blocks paged."""
        if self.budget is None:
            return 0
        return max(0, self._on_device(paged)["total"] - self.budget)

    def _on_device(self, paged: tuple[int, ...]) -> dict[str, int]:
        sizes = [self.model.pageable[index] for index in paged]
        predicted = {
            "resident_blocks": self.total - sum(sizes),
            "slots": max(sizes, default=0) * min(self.slot_count, len(paged)),
            **self.rest,
        }
        if "gradients" in self.rest and self.machine.counts_fixed:
            predicted["gradients"] = self.model.gradients(paged)
        if self.options.reserve is not None and self.machine.counts_fixed:
            then = self.model.gradients(self.options.reserved_with)
            predicted["gradients"] = max(0, self.model.gradients(paged) - then)
        if "activations" in self.rest:
            predicted["workspace"] = self._workspace(paged)
        predicted["total"] = sum(predicted.values())
        return predicted

    def plan(self, paged: tuple[int, ...]) -> Plan:
        """The whole plan for these paged blocks."""
        device = self._on_device(paged)
        device_short = self.shortfall(paged)
        if self.budget is not None:
            device["budget"] = self.budget
        host = self._on_host(paged)
        host_short = self._host_shortfall(host)
        failed = "device" if device_short else "host" if host_short else ""
        slots = min(self.slot_count, len(paged))
        slot_bytes = max((self.model.pageable[index] for index in paged), default=0)
        if failed == "device":
            reasons = [self._device_refusal(device, device_short)]
        elif failed == "host":
            reasons = [self._host_refusal(host, host_short)]
        else:
            reasons = self._reasons(paged, device, slots, slot_bytes)
        return Plan(
            paged=paged,
            slot_count=slots,
            slot_bytes=slot_bytes,
            fits=not failed,
            predicted=device,
            shortfall=device_short or host_short,
            reasons=tuple(reasons),
            host=host,
            seconds=step_seconds(self.model, self.machine, paged, slots, self.policy),
            activations=self.policy,
            failed=failed,
            host_tables=self.model.host_tables,
        )

    def _on_host(self, paged: tuple[int, ...]) -> dict[str, int]:
        model, machine = self.model, self.machine
        images = sum(model.pageable[index] for index in paged)
        moved = self._moved()
        optimizer = model.optimizer_bytes(paged, machine.counts_fixed)
        host = {
            "weights": images,
            "optimizer_and_gradients": optimizer,
            "activations": moved,
        }
        loaded = 0
        if not machine.counts_fixed:  # what is yet to be loaded stays in host memory, paged or not
            loaded = max(0, model.to_load - images)
        if loaded:
            host["to_be_loaded"] = loaded
        if model.host_tables:
            host["tables"] = model.host_tables
        budget = None
        if machine.host_available is not None:
            free = max(0, machine.host_available - machine.host_floor)
            budget = free + min(model.in_host, images)
        if self.options.disk:  # frozen blocks go there that may not be locked, or RAM cannot hold
            locked = images if machine.page_lock_bytes is None else machine.page_lock_bytes
            room = images if budget is None else budget - optimizer - moved - loaded
            room -= model.host_tables
            stay = sum(
                model.pageable[index]
                for index in paged
                if index < len(model.trained_pageable) and model.trained_pageable[index]
            )
            host["weights"] = max(stay, min(images, locked, room))
        host["total"] = sum(host.values())
        if budget is not None:
            host["budget"] = budget
        return host

    def _host_shortfall(self, host: dict[str, int]) -> int:
        if "budget" not in host:
            return 0
        for_activations = int(_ACTIVATION_HOST_SHARE * host["budget"])
        return max(0, host["total"] - host["budget"], host["activations"] - for_activations)

    def _reasons(
        self, paged: tuple[int, ...], device: dict[str, int], slots: int, slot_bytes: int
    ) -> list[str]:
        blocks = len(self.model.pageable)
        stay = f"{blocks - len(paged)} of {blocks} blocks resident"
        if self.budget is None:
            found = [f"device memory is unbounded: {stay}"]
        elif not paged:
            found = [f"{stay}: {human(device['total'])} of a budget of {human(self.budget)}"]
        else:
            found = [
                f"{stay}, {len(paged)} paged through {in_slots(slots)} of {human(slot_bytes)}: "
                f"{human(device['total'])} of a budget of {human(self.budget)}"
            ]
        if slots < min(self.options.slot_count, len(paged)):
            found.append("one slot, since two do not fit: each load waits for the block before it")
        if self.model.host_tables:
            found.append(
                f"{human(self.model.host_tables)} of input embeddings in host memory, where a step "
                f"reads the rows it needs"
            )
        if self.policy:
            found.append(
                f"activations: {self.policy.count(KEEP)} blocks keep them, "
                f"{self.policy.count(OFFLOAD)} page them, {self.policy.count(RECOMPUTE)} recompute"
            )
        return found

    def _device_refusal(self, device: dict[str, int], shortfall: int) -> str:
        assert self.machine.device_bytes is not None and self.budget is not None
        return (
            f"the device budget of {human(self.budget)} ({human(self.machine.device_bytes)} less "
            f"the headroom) is short by {human(shortfall)}: {_by_use(device)}."
        )

    def _host_refusal(self, host: dict[str, int], shortfall: int) -> str:
        floor = self.machine.host_floor
        free = f" ({human(floor)} stay free)" if floor else ""
        return (
            f"the host memory budget of {human(host['budget'])}{free} is short by "
            f"{human(shortfall)}: {_by_use(host)}."
        )


def _by_use(sizes: dict[str, int]) -> str:
    return ", ".join(
        f"{name.replace('_', ' ')} {human(size)}"
        for name, size in sizes.items()
        if size and name not in ("total", "budget")
    )
