"""What one wrapped model keeps: its plan, pager, hooks, optimizer and events."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ts_core.config import WrapOptions
from ts_core.device import Device
from ts_core.engine import residence
from ts_core.engine.activations import Activations
from ts_core.engine.attention import AttentionChoice
from ts_core.engine.casts import Casts
from ts_core.engine.experts import ExpertPaging
from ts_core.engine.experts_stored import StoredExperts
from ts_core.engine.no_copies import NO_COPY, NoCopies
from ts_core.engine.replay import BlockReplay
from ts_core.engine.runner import BlockRunner
from ts_core.engine.tables import HostTables
from ts_core.engine.turns import Turns, in_backward
from ts_core.errors import StateError
from ts_core.memory.ledger import Reservation
from ts_core.optim import OffloadAdamW
from ts_core.schedule import Plan
from ts_core.store import ImageStore, ParamPager, TrainedHome
from ts_core.store.plain_mode import plain_mode
from ts_core.transfer import CopyEngine

if TYPE_CHECKING:
    from ts_core.engine.adapting import PlacementAdapter

ATTRIBUTE = "_trainstream_session"


class EventLog:
    """Decisions in plain words, printed as they happen when asked for."""

    def __init__(self, verbose: bool) -> None:
        self.lines: list[str] = []
        self._verbose = verbose

    def __call__(self, text: str) -> None:
        """Add one line."""
        self.lines.append(text)
        if self._verbose:
            print(f"trainstream: {text}", file=sys.stderr)


class TrainStreamSession:
    """The streaming state of a wrapped model; `model._trainstream_session`.

    Attributes:
        activations: where each block's activations are; None for a model without blocks.
        events: decisions so far, in plain words.
        config: the options of wrap().
        plan: where each block lives.
        optimizer: the OffloadAdamW.
        state_on_device: the plan counts optimizer state on the device.
        trains_pageable: weights are trained that may stream.
        peer: pooled peer memory (None in this version).
    """

    peer = None

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        config: WrapOptions,
        device: Device,
        copies: CopyEngine,
        plan: Plan,
        log: EventLog,
    ) -> None:
        self.config = config
        self.device = device
        self.copies = copies
        self.plan = plan
        self.blocks = list(blocks)
        self.log = log
        self.optimizer: OffloadAdamW | None = None
        self.pager: ParamPager | None = None
        self.store: ImageStore | None = None
        self.runner: BlockRunner | None = None
        self.activations: Activations | None = None
        self.replay: BlockReplay | None = None
        self.experts: ExpertPaging | None = None
        self.stored_experts: StoredExperts | None = None
        self.tables: HostTables | None = None
        self.quantized: dict[str, Any] = {}
        self.moments = "float32"
        self.state_on_device = False
        self.trains_pageable = False
        self.patches: list[Any] = []
        self.attention: AttentionChoice | None = None
        self.adapter: PlacementAdapter | None = None
        self.resident_reservation: Reservation | None = None
        self.turns = Turns(device)
        self.casts: Casts | None = None  # outlives a runner, with what it has seen
        self._handles: list[RemovableHandle] = []
        self._model: weakref.ref[nn.Module] | None = None
        self._no_copies: NoCopies | None = None
        self._limit: Callable[[], object] | None = None
        if config.vram_limit_bytes is not None:  # it ends with the session, closed or not
            limit = weakref.finalize(self, device.set_limit, None)
            limit.atexit = False
            self._limit = limit

    @property
    def adapting(self) -> bool:
        """Whether placement is still being tuned."""
        parts = (self.adapter, self.activations)
        return any(part is not None and part.adapting for part in parts)

    @property
    def events(self) -> list[str]:
        """Decisions so far, in plain words."""
        return self.log.lines

    @property
    def homes(self) -> list[TrainedHome]:
        """Of the trained weights in paged blocks."""
        return [] if self.pager is None else self.pager.homes()

    @property
    def steps(self) -> int:
        """Optimizer steps done."""
        return 0 if self.optimizer is None else self.optimizer.steps_done

    def hook_blocks(self) -> None:
        """Hooks on the blocks for the pager and the activations there are now, in place of old."""
        if self.runner is not None:
            self.runner.remove()
            self.runner = None
        if self.pager is not None or self.activations is not None:
            self.runner = BlockRunner(
                self.blocks, self.pager, self.activations, self.replay, self.turns, self.casts
            )

    def hook_model(self, model: nn.Module) -> None:
        """Make reads of trained weights wait for their updates in flight."""

        def settle(*_: Any) -> None:
            if self.optimizer is not None:
                self.optimizer.synchronize()

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        @plain_mode
        def begin(_: nn.Module, args: Any, kwargs: Any) -> None:
            if self._shared:
                self.turns.begin_pass()
            if self.optimizer is not None:
                if torch.is_grad_enabled() and not in_backward():
                    self.optimizer.drop_failed_backward()
                    self.optimizer.let_go()
                    if self.adapter is not None:
                        self.adapter.between_steps()
                if not self.optimizer.reads_wait:
                    self.optimizer.synchronize()
            if self.runner is not None:
                self.runner.new_pass(args, kwargs)
            if self.adapter is not None and torch.is_grad_enabled() and not in_backward():
                self.adapter.forward_begins()
            if self.experts is not None:
                self.experts.new_pass()

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def end(*_: Any) -> None:
            self.turns.end_pass()
            if self.optimizer is not None and torch.is_grad_enabled() and not in_backward():
                self.optimizer.weights_read()

        def zero_grad(set_to_none: bool = True) -> None:
            if self.optimizer is not None:
                self.optimizer.zero_grad(set_to_none)
            type(model).zero_grad(model, set_to_none)

        model.__dict__["zero_grad"] = zero_grad  # gradients that have left are dropped too
        self._model = weakref.ref(model)
        self._no_copies = NoCopies([model, *self.blocks])
        self._handles.append(model.register_forward_pre_hook(begin, with_kwargs=True))
        self._handles.append(model.register_forward_hook(end, always_call=True))
        self._handles.append(model.register_state_dict_pre_hook(settle))
        self._handles.append(model.register_load_state_dict_pre_hook(settle))

    @property
    def _shared(self) -> bool:
        """Whether passes use memory that one thread at a time may use."""
        return self.runner is not None or self.experts is not None

    def watch_for_room(self) -> None:
        """offload="auto": after two updates, keep optimizer state on the device if all fits."""
        assert self.optimizer is not None
        session = weakref.ref(self)

        def alone() -> AbstractContextManager[None]:
            here = session()
            return nullcontext() if here is None or not here._shared else here.turns.alone()

        def settle() -> None:
            here = session()
            if here is not None and here.optimizer is not None and not here.optimizer.reads_wait:
                here.optimizer.synchronize()

        self.optimizer.alone = alone
        self.turns.before_forward = settle
        if self.optimizer.processes > 1:
            self.log(
                "offload='auto': optimizer state stays on the host, where gradients of the "
                "processes are averaged"
            )
        elif self.config.offload == "auto" and self.device.separate_memory:
            if not self.optimizer.resident:
                self.optimizer.after_step = functools.partial(residence.consider, self)
        if self.activations is not None:
            activations = weakref.ref(self.activations)

            def waits() -> bool:
                here = activations()
                return here is not None and here.adapting

            self.optimizer.split_waits = waits

    def __deepcopy__(self, memo: Any) -> Any:
        raise StateError(NO_COPY)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError(NO_COPY)

    def close(self) -> None:
        """Remove every hook and give the device memory back."""
        if self.optimizer is not None:
            self.optimizer.detach()
            self.optimizer.split_waits = None
            self.optimizer.alone = nullcontext
        for patch in reversed(self.patches):
            patch.undo()
        self.patches.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._no_copies is not None:
            self._no_copies.remove()
        model = None if self._model is None else self._model()
        if model is not None:
            model.__dict__.pop("zero_grad", None)
        if self.runner is not None:
            self.runner.remove()
        if self.replay is not None:
            self.replay.close()
        if self.attention is not None:
            self.attention.remove()
        if self.activations is not None:
            self.activations.close()
        if self.pager is not None:
            self.pager.close()
        for experts in (self.experts, self.stored_experts):
            if experts is not None:
                experts.close()
        if self.store is not None:
            self.store.close()
        if self.resident_reservation is not None:
            self.resident_reservation.release()
        if self._limit is not None:
            self._limit()
        if self.tables is not None:
            self.tables.restore()
