"""Habits of users and of model code, each replayed or eager but never different in a bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ts_core.testing.replay import WIDTH, Block, batches, plain_steps, warm


def test_results_handed_out_stay_what_they_were(both: Callable[..., Any]) -> None:
    def drive(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
        outputs = [model(x) for x in batches(6)]
        kept = [y.detach().clone() for y in outputs]
        del outputs[:2]
        with torch.no_grad():
            outputs[-1].add_(1.0)  # the user's own memory
        return [*outputs[:-1], *kept]

    pair = both([Block(), Block()], drive)
    assert pair.report["replayed_forwards"] > 0


def test_two_forwards_before_one_backward(both: Callable[..., Any]) -> None:
    """What backward needs lies at fixed places, once: the second forward runs eagerly."""

    def drive(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
        found = warm(model, optimizer)
        for x, z in zip(batches(3), list(batches(6))[3:], strict=True):
            (model(x).square().mean() - model(z).square().mean()).backward()
            optimizer.step()
        return found

    pair = both([Block(0.2), Block(0.2)], drive)
    assert list(pair.report["eager"]) == ["a block runs again before the backward of its last call"]
    both([Block(0.2), Block(0.2)], drive, recompute=True)


def test_backward_of_a_backward(both: Callable[..., Any]) -> None:
    def drive(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
        found = []
        for k, x in enumerate(batches(5)):
            x.requires_grad_()
            loss = model(x).square().sum()
            (gradient,) = torch.autograd.grad(loss, x, create_graph=k > 2)
            if k > 2:
                gradient.square().sum().backward()
                optimizer.zero_grad()
                found.append(x.grad)
            found.append(gradient.detach())
        return found

    for recompute in (False, True):  # second derivatives are summed in another order
        pair = both([Block(0.2), Block()], drive, close=True, recompute=recompute)
        assert any("create_graph=True" in reason for reason in pair.report["eager"])


def test_second_backward_of_a_kept_graph(both: Callable[..., Any]) -> None:
    def drive(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
        found = warm(model, optimizer)
        first, second = batches(2)
        first.requires_grad_()
        loss = model(first).square().sum()
        loss.backward(retain_graph=True)
        found.append(first.grad.clone())
        loss.backward(retain_graph=True)  # the replay's memory is still that of `loss`
        found.append(first.grad.clone())
        model(second).square().sum().backward()  # and now it is not
        loss.backward()
        found.append(first.grad.clone())
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        return found

    pair = both([Block(0.2), Block(0.2)], drive, accumulation_steps=5)
    assert any("second backward" in reason for reason in pair.report["eager"])
    both([Block(0.2), Block(0.2)], drive, recompute=True, accumulation_steps=5)


def test_evaluation_between_forward_and_backward(both: Callable[..., Any]) -> None:
    def drive(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
        found = []
        for x in batches(6):
            loss = model(x).square().sum()
            model.eval()
            with torch.no_grad():
                found.append(model(x + 1))
            model.train()
            loss.backward()
            optimizer.step()
        return found

    for recompute in (False, [0]):
        pair = both([Block(0.3), Block(0.3)], drive, recompute=recompute, param_offload=True)
        assert pair.report["replayed_forwards"] > pair.report["replayed_backwards"] > 0
        assert pair.report["eager"] == {}


def test_a_forward_that_raises_half_way(both: Callable[..., Any]) -> None:
    def drive(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
        found = warm(model, optimizer)
        bad = torch.randn(3, WIDTH)
        hook = model.layers[1].register_forward_pre_hook(_raise)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                model(bad)
        hook.remove()
        return found + plain_steps(model, optimizer)

    for options in ({}, {"param_offload": True}, {"recompute": True}):
        pair = both([Block(0.1), Block(0.1), Block()], drive, **options)
        assert pair.report["replayed_backwards"] > 0


def _raise(*_: Any) -> None:
    raise ZeroDivisionError


def test_a_backward_that_raises_half_way(both: Callable[..., Any]) -> None:
    def drive(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
        found = warm(model, optimizer)
        x = torch.randn(3, WIDTH, requires_grad=True)
        y = model.layers[0](x)
        y.register_hook(_raise)
        with pytest.raises(ZeroDivisionError):
            model.layers[1](y).sum().backward()
        optimizer.zero_grad()
        return found + plain_steps(model, optimizer)

    pair = both([Block(0.1), Block(0.1)], drive, eager=False)
    assert pair.report["replayed_backwards"] > 0


def test_shapes_that_change_keep_few_recordings(both: Callable[..., Any]) -> None:
    def drive(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
        found = []
        for turn in range(3):
            for length in (2, 3, 4, 5, 6, 7):
                y = model(torch.full((length, WIDTH), 0.1 * turn))
                y.square().sum().backward()
                optimizer.step()
                found.append(y.detach())
        for _ in range(4):
            found += [model(torch.ones(7, WIDTH)).detach(), model(torch.ones(2, WIDTH)).detach()]
        return found

    pair = both([Block(), Block()], drive)
    assert pair.report["replayed_forwards"] > 0
    replay = pair.model._trainstream_session.replay
    assert all(len(block.entries) <= 4 for block in replay._blocks)


def test_weights_that_the_user_writes(both: Callable[..., Any]) -> None:
    """In place, through .data, by replacing the tensor or the parameter."""

    def drive(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
        found = warm(model, optimizer)
        for layer in model.layers:
            with torch.no_grad():
                layer.base.weight.mul_(0.5)
        found += plain_steps(model, optimizer, 1)
        model.layers[0].base.weight.data.add_(0.25)
        found += plain_steps(model, optimizer, 1)
        model.layers[1].base.weight.data = torch.ones(WIDTH, WIDTH)
        found += plain_steps(model, optimizer, 3)
        model.layers[1].base.bias = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        return found + plain_steps(model, optimizer, 3)

    for options in ({}, {"param_offload": True}):
        assert both([Block(), Block()], drive, **options).report["replayed_backwards"] > 0


def test_a_weight_written_between_forward_and_backward_raises(both: Callable[..., Any]) -> None:
    def drive(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
        found = warm(model, optimizer)
        x = torch.randn(3, WIDTH, requires_grad=True)
        loss = model(x).sum()
        with torch.no_grad():
            model.layers[0].base.weight.mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        optimizer.zero_grad()
        return found + plain_steps(model, optimizer)

    both([Block(), Block()], drive, eager=False)


def test_an_argument_written_between_forward_and_backward_raises(both: Callable[..., Any]) -> None:
    def drive(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
        found = warm(model, optimizer)
        x = torch.randn(3, WIDTH, requires_grad=True)
        middle = x * 1.0
        loss = model(middle).sum()
        with torch.no_grad():
            middle.mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        optimizer.zero_grad()
        return found

    both([Block(), Block()], drive, eager=False)


class Attention(Block):
    """Takes what decoder layers take."""

    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        scale: float = 1.0,
        extra: Any = None,
        **kwargs: Any,
    ) -> Any:
        y = self.mixed(x)
        if position_embeddings is not None:
            cos, sin = position_embeddings
            y = y * cos + y.roll(1, -1) * sin
        q = y[None, None]
        y = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)[0, 0] * scale
        if extra is not None:
            y = y + extra["more"][0][1]
        return (x + y, {"norm": y.detach().norm()}, None, 7)


def test_keywords_tuples_masks_none_and_numbers(both: Callable[..., Any]) -> None:
    def drive(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
        found = []
        for k, x in enumerate(batches(6)):
            angles = torch.arange(float(WIDTH)) * (k + 1)
            mask = torch.ones(3, 3).tril().log()[None, None].expand(2, 1, 3, 3)[:1]
            y = model(
                x.requires_grad_(),
                mask if k % 2 else mask.clone(),
                position_embeddings=(angles.cos(), angles.sin()[None].expand(3, WIDTH)),
                scale=0.5,
                extra={"more": [(None, x.detach()[:, :1])], "flag": True},
                unused=None,
            )
            y.square().sum().backward()
            optimizer.step()
            found += [y.detach(), x.grad]
        return found

    pair = both([Attention(), Attention()], drive, recompute=[1])
    assert pair.report["replayed_backwards"] >= 4 and pair.report["eager"] == {}


class Cache:
    def update(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_a_cache_object_stays_eager(both: Callable[..., Any]) -> None:
    def drive(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
        return plain_steps(model, optimizer, 4, cache=Cache())

    pair = both([Attention(), Attention()], drive)
    assert pair.report["replayed_forwards"] == 0
    assert any("is a Cache" in line for line in pair.events)


def test_flags_adapters_and_hooks_that_change_later(both: Callable[..., Any]) -> None:
    seen: list[int] = []

    def drive(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
        found = warm(model, optimizer)
        for layer in model.layers:
            layer.adapted = False
        with torch.no_grad():
            found += [model(x) for x in batches(4)]
        for layer in model.layers:
            layer.adapted = True
        model.layers[0].scaling["default"] = 2.0
        found += plain_steps(model, optimizer, 2)
        seen.clear()
        hook = model.layers[0].base.register_forward_hook(lambda *_: seen.append(1))
        found += plain_steps(model, optimizer, 4)
        hook.remove()
        assert len(seen) == 4
        model.eval()
        found += [model(x).detach() for x in batches(4)]
        model.train()
        model.layers[1].down.weight.requires_grad_(False)
        return found + plain_steps(model, optimizer, 4)

    pair = both([Block(0.2), Block(0.2)], drive)
    assert any("have hooks" in reason for reason in pair.report["eager"])


def test_hooks_of_parameters_fire_once_and_only_where_there_is_a_gradient(
    both: Callable[..., Any],
) -> None:
    class Unused(Block):
        def __init__(self) -> None:
            super().__init__()
            self.idle = nn.Parameter(torch.ones(3))

    def drive(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        for layer in model.layers:
            layer.idle.register_hook(_raise)
            layer.down.weight.register_hook(lambda grad: seen.append(grad.clone()))
            layer.up.weight.register_hook(lambda grad: grad * 2)
        found = plain_steps(model, optimizer, 5)
        assert len(seen) == 10
        return found + seen

    pair = both([Unused(), Unused()], drive)
    assert pair.report["replayed_backwards"] > 0


def test_gradients_in_another_layout_or_not_for_all(both: Callable[..., Any]) -> None:
    class Two(Block):
        def forward(self, x: torch.Tensor) -> Any:
            y = self.mixed(x)
            return x + y, y * 2

    def drive(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
        found = []
        for k, x in enumerate(batches(8)):
            first, second = model.layers[0](x.requires_grad_())
            loss = first.square().sum()
            if k < 4 or k == 7:
                loss = loss + second.sum()  # its gradient is an expanded scalar
            elif k == 5:
                loss = loss + (second * 3).square().sum()
            loss.backward()
            optimizer.step()
            found.append(x.grad)
        return found

    pair = both([Two(), Two()], drive)
    assert pair.report["replayed_backwards"] > 0
    assert any("another layout" in reason for reason in pair.report["eager"])


def test_a_block_that_returns_its_argument(both: Callable[..., Any]) -> None:
    class Through(Block):
        def forward(self, x: torch.Tensor) -> Any:
            return x, self.mixed(x)

    def drive(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
        found = []
        for x in batches(4):
            same, y = model.layers[0](x)
            assert same is x
            y.square().sum().backward()
            optimizer.step()
            found.append(y.detach())
        return found

    assert both([Through(), Through()], drive).report["replayed_backwards"] > 0


class LowInside(nn.Module):
    """Computes in bfloat16 by an autocast of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.second(torch.tanh(self.first(x)))
        return x + y.float()


@pytest.mark.parametrize("recompute", [False, True])
def test_autocast_inside_a_block_and_one_that_is_off_around_the_model(
    both: Callable[..., Any], recompute: bool
) -> None:
    """The inner one then keeps its copies of weights: none may be recorded."""

    def drive(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        losses = []
        for _ in range(7):
            with torch.autocast("cpu", enabled=False):
                loss = model(torch.randn(4, 8, generator=generator)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    pair = both([LowInside(), LowInside()], drive, recompute=recompute, activation_offload=False)
    assert pair.report["replayed_forwards"] > 0


def test_recordings_go_once_their_last_replays_are_done(both: Callable[..., Any]) -> None:
    """Their memory may be unmapped as they go: the recorder waits for the device before."""
    pair = both([Block(), Block()], warm)
    replay = pair.model._trainstream_session.replay
    there: list[int] = []

    def recordings() -> int:
        return sum(len(block.entries) for block in replay._blocks)

    replay._recorder.forget = lambda: there.append(recordings())
    assert recordings() > 0
    replay.forget()
    assert there[0] > 0 and recordings() == 0
