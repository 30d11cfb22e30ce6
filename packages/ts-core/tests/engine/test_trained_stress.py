"""Steps of everything a training loop may do to paged trained weights, ending as the plain run."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from ts_core import unwrap, wrap
from ts_core.optim.places import NAMES
from ts_core.testing import TinyModel, inject_delays, tiny_model

STEPS = 30


def start(model: TinyModel, share: Any, clip: float | None, device: str) -> tuple[Any, Any]:
    return wrap(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        param_offload=share,
        max_grad_norm=clip,
        quantize="none",
        offload=True,
        threads=1,
        device=device,
    )


def draw_share(draws: random.Random) -> Any:
    return draws.choice([True, 0.5, [1], [0, 2]])


def loop(dtype: torch.dtype, clip: float | None, device: str, width: int, steps: int) -> None:
    """Both runs draw the same tokens, accumulation and learning rates; one of them also pages,
    saves, loads, moves state, evaluates, drops a backward, unwraps and wraps again."""
    where = "cpu" if device == "host" else device
    draws, whims = random.Random(1), random.Random(2)
    plain, busy = (tiny_model(3, width, dtype=dtype, full=True) for _ in range(2))
    plain, straight = start(plain, False, clip, device)
    busy, optimizer = start(busy, draw_share(whims), clip, device)
    tokens_of = torch.Generator().manual_seed(3)
    for _ in range(steps):
        micro, lr = draws.choice([1, 1, 2, 3]), draws.choice([1e-3, 3e-4, 0.0])
        batches = [torch.randint(0, 37, (2, 5), generator=tokens_of).to(where) for _ in range(4)]
        skip = draws.choice([None, None, None, 0, 1, 2])
        for each, model in ((straight, plain), (optimizer, busy)):
            each.accumulation_steps = micro
            each.param_groups[0]["lr"] = lr
            if each is optimizer and whims.random() < 0.1 and not each.eager:
                model(batches[3]).backward()
                each.zero_grad()
            for tokens in batches[:micro]:
                (loss_without(model, tokens, skip) / micro).backward()
            each.step()
            if each is straight or whims.random() < 0.5:
                each.zero_grad()
        busy, optimizer = fancy(busy, optimizer, whims, clip, device, batches[0])
    expected = plain.state_dict()
    for name, value in busy.state_dict().items():
        assert torch.equal(value.cpu(), expected[name].cpu()), name


def loss_without(model: Any, tokens: torch.Tensor, skip: int | None) -> torch.Tensor:
    """The model's loss; without the block `skip`, whose weights then get no gradient."""
    if skip is None:
        return model(tokens)  # type: ignore[no-any-return]
    hidden = model.embed(tokens)
    for index, layer in enumerate(model.layers):
        if index != skip:
            hidden = layer(hidden)
    logits = model.head(model.norm(hidden)).float()
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def fancy(
    model: Any, optimizer: Any, whims: random.Random, clip: Any, device: str, tokens: torch.Tensor
) -> tuple[Any, Any]:
    whim = whims.random()
    if whim < 0.06:
        saved = copy.deepcopy(optimizer.state_dict())
        unwrap(model)
        model, optimizer = start(model, draw_share(whims), clip, device)
        optimizer.load_state_dict(saved)
    elif whim < 0.12:
        unwrap(model)
        model, optimizer = wrap(
            model,
            optimizer,
            param_offload=draw_share(whims),
            quantize="none",
            device=device,
            offload=True,
            max_grad_norm=clip,
        )
    elif whim < 0.18:
        optimizer.place_state([whims.choice(NAMES) for _ in optimizer.buckets])
    elif whim < 0.28:
        with torch.no_grad():
            assert torch.isfinite(model(tokens))
            assert torch.isfinite(model.layers[1](torch.ones_like(model.embed(tokens)))).all()
    elif whim < 0.34:
        model.load_state_dict(copy.deepcopy(model.state_dict()))
    elif whim < 0.38:
        with torch.no_grad():
            model.layers[1].up.weight.mul_(1.0)
    elif whim < 0.42:
        weight = model.layers[2].down.weight
        weight.data = weight.data.clone()
    return model, optimizer


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_loops_end_equal_to_the_plain_run(clip: float | None, dtype: torch.dtype) -> None:
    with inject_delays(11, max_ms=0.5, share=0.05):
        loop(dtype, clip, "host", 16, STEPS)


@pytest.mark.gpu
@pytest.mark.parametrize("clip", [None, 0.5])
def test_random_loops_on_the_gpu(clip: float | None) -> None:
    with inject_delays(11, max_ms=0.5, share=0.05):
        loop(torch.bfloat16, clip, "cuda", 128, 200)


def written(device: str, values: bool) -> dict[str, Any]:
    """What six steps leave with state in device memory, its paged weights written between them."""
    where = "cpu" if device == "host" else device
    model = tiny_model(3, 64, dtype=torch.bfloat16, full=True)
    model, optimizer = start(model, True, None, device)
    optimizer.place_state(["resident"] * len(optimizer.buckets))
    tokens_of = torch.Generator().manual_seed(3)
    for _ in range(6):
        model(torch.randint(0, 37, (2, 5), generator=tokens_of).to(where)).backward()
        optimizer.step()
        if values:
            with torch.no_grad():
                for layer in model.layers:
                    for weight in (layer.up.weight, layer.down.weight, layer.mix):
                        weight.mul_(1.0)
    found = {name: value.cpu() for name, value in model.state_dict().items()}
    for number, entry in optimizer.state_dict()["state"].items():
        found.update({f"{number} {name}": value.cpu() for name, value in entry.items()})
    return found


@pytest.mark.parametrize("device", ["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_writes_between_steps_come_before_an_update_on_the_device(device: str) -> None:
    """State takes them on the compute stream, and the update runs on one of its own."""
    expected = written(device, values=False)
    with inject_delays(5, max_ms=3.0, share=1.0) as plan:
        found = written(device, values=True)
    assert plan.pauses > 0
    assert found.keys() == expected.keys()
    assert not [name for name in found if not torch.equal(found[name], expected[name])]
