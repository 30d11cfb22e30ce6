"""The exact tier for activations: kept, paged or recomputed, the numbers are the same bits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ts_core import memory_report, unwrap, wrap
from ts_core.testing import TinyModel, inject_delays, tiny_model, train
from ts_core.testing.activations import SEED, STEPS, in_short, resident, run
from ts_core.transfer import edges


@pytest.mark.parametrize("param_offload", [False, True, [0, 3]])
@pytest.mark.parametrize(
    ("activation_offload", "recompute", "wanted"),
    [
        (True, False, "ooook"),
        (0.5, False, "okook"),
        (False, True, "rrrrr"),
        (False, [1, 3], "krkrk"),
        (True, [2], "oorok"),
    ],
)
def test_policies(activation_offload: Any, recompute: Any, wanted: str, param_offload: Any) -> None:
    model, record = run(
        activation_offload=activation_offload,
        recompute=recompute,
        param_offload=param_offload,
        accumulation=2,
    )
    assert resident(accumulation=2).differences(record) == []
    assert in_short(model) == wanted
    found = memory_report(model)["activations"]
    assert found["offloaded_blocks"] == [k for k, mode in enumerate(wanted) if mode == "o"]
    assert found["recompute_blocks"] == [k for k, mode in enumerate(wanted) if mode == "r"]
    assert (found["fetches"] > 0) == ("o" in wanted)
    assert found["recomputed"] == 2 * STEPS * wanted.count("r")
    assert found["host_bytes_in_use"] == 0
    assert min(found["block_bytes"]) > 0


@pytest.mark.parametrize("param_offload", [False, True, 0.5])
@pytest.mark.parametrize("policy", [(True, False), (False, True), (0.5, [1])])
def test_full_training(policy: Any, param_offload: Any) -> None:
    """Every weight is trained, with clipping; paged ones stream beside the activations."""
    offload, recompute = policy
    shared: dict[str, Any] = {"full": True, "accumulation": 2, "max_grad_norm": 0.5}
    _, record = run(
        activation_offload=offload, recompute=recompute, param_offload=param_offload, **shared
    )
    assert resident(**shared).differences(record) == []


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("prefetch_depth", [1, 2, 9])
def test_prefetch_and_accumulation(prefetch_depth: int, accumulation: int) -> None:
    model, record = run(
        activation_offload=True,
        recompute=False,
        prefetch_depth=prefetch_depth,
        accumulation=accumulation,
    )
    assert resident(accumulation=accumulation).differences(record) == []
    found = memory_report(model)["activations"]
    assert found["fetches"] > 0
    assert found["late_fetches"] == 0  # the last block runs backward first, and fetches ahead


@pytest.mark.parametrize("policy", [(True, False), (False, True), (True, [0, 2])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_and_autocast(dtype: torch.dtype, policy: tuple[Any, Any]) -> None:
    offload, recompute = policy
    for autocast in (None, torch.bfloat16):
        _, record = run(
            activation_offload=offload, recompute=recompute, dtype=dtype, autocast=autocast
        )
        assert resident(dtype=dtype, autocast=autocast).differences(record) == []


@pytest.mark.parametrize("seed", range(10))
def test_random_combinations(seed: int) -> None:
    """Everything that may meet, drawn at random."""
    rng = random.Random(seed)
    shared: dict[str, Any] = {
        "accumulation": rng.choice((1, 2, 3)),
        "dtype": rng.choice((torch.float32, torch.bfloat16)),
        "autocast": rng.choice((None, torch.bfloat16)),
        "full": rng.random() < 0.4,
        "depth": rng.choice((2, 5, 7)),
        "length": rng.choice((3, 11)),
        "call": rng.choice((None, None, out_of_order)),
        "max_grad_norm": rng.choice((None, 0.3)),
    }
    if shared["call"] is not None:
        shared["depth"] = 5
    depth = shared["depth"]
    _, record = run(
        activation_offload=rng.choice((True, 0.5, 0.3)),
        recompute=rng.choice((False, 0.4, rng.sample(range(depth), 2))),
        param_offload=rng.choice((False, True, 0.5)),
        prefetch_depth=rng.choice((1, 2, 5)),
        min_offload_bytes=rng.choice((0, 300, 1000)),
        max_inflight_bytes=rng.choice((1, 12000, 1 << 30)),
        **shared,
    )
    assert resident(**shared).differences(record) == []


@pytest.mark.parametrize("policy", [(True, False), (False, True)])
def test_nested_autocast(policy: tuple[Any, Any]) -> None:
    """Blocks that turn autocast off or change its dtype replay as they ran."""

    def call(model: TinyModel, tokens: torch.Tensor) -> torch.Tensor:
        hidden = model.embed(tokens)
        for index, layer in enumerate(model.layers):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=index % 2 == 0):
                hidden = layer(hidden).float()
        return model.head(model.norm(hidden)).square().mean()

    offload, recompute = policy
    _, record = run(activation_offload=offload, recompute=recompute, call=call, autocast=None)
    assert resident(call=call).differences(record) == []


def out_of_order(model: TinyModel, tokens: torch.Tensor) -> torch.Tensor:
    hidden = model.embed(tokens)
    for index in (0, 2, 1, 4, 3, 0, 0):
        hidden = model.layers[index](hidden)
    return model.head(model.norm(hidden)).square().mean()


@pytest.mark.parametrize("param_offload", [False, True])
@pytest.mark.parametrize("policy", [(True, False), (False, True), (0.5, [0])])
def test_blocks_called_twice_and_out_of_order(policy: Any, param_offload: Any) -> None:
    offload, recompute = policy
    _, record = run(
        activation_offload=offload,
        recompute=recompute,
        call=out_of_order,
        param_offload=param_offload,
    )
    assert resident(call=out_of_order).differences(record) == []


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("policy", [(True, False), (False, True)])
def test_under_the_models_own_checkpointing(policy: Any, use_reentrant: bool) -> None:
    def call(model: TinyModel, tokens: torch.Tensor) -> torch.Tensor:
        hidden = model.embed(tokens).requires_grad_()
        for layer in model.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=use_reentrant)
        return model.head(model.norm(hidden)).square().mean()

    offload, recompute = policy
    model, record = run(activation_offload=offload, recompute=recompute, call=call)
    assert resident(call=call).differences(record) == []
    found = memory_report(model)["activations"]
    assert found["recomputed"] == 0  # once is enough
    if not use_reentrant:
        assert found["pages"] == 0  # whoever checkpoints holds nothing to page


def test_hooks_of_the_user_keep_seeing_every_tensor() -> None:
    def call(model: TinyModel, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return model(tokens)

    model, record = run(activation_offload=True, recompute=[1], call=call)
    assert resident(call=call).differences(record) == []
    assert memory_report(model)["activations"]["pages"] == 0


def test_missing_waits_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The delays have teeth: without the waits between streams the numbers are wrong."""
    expected = resident()
    monkeypatch.setattr(edges, "wait", lambda device, stream, event: None)
    found: list[str] = []
    for seed in range(3):
        with inject_delays(seed, max_ms=2.0, share=1.0):
            _, broken = run(
                activation_offload=True, recompute=False, delays=False, max_inflight_bytes=12000
            )
        found += expected.differences(broken)
    assert found != []


def test_evaluation_between_steps_and_after_exceptions() -> None:
    records = []
    for offload, recompute in ((False, False), (True, False), (False, True), (True, [1])):
        model, _ = run(activation_offload=offload, recompute=recompute, steps=2, delays=False)
        session = model._trainstream_session
        optimizer = session.optimizer
        tokens = torch.randint(0, 37, (2, 7), generator=torch.Generator().manual_seed(5))
        model.eval()
        with torch.no_grad():
            before = [model(tokens) for _ in range(2)]
        model.train()
        model(tokens)  # a forward that nobody runs backward

        def explode(*_: Any) -> None:
            raise RuntimeError("in the middle of a forward")

        handle = model.layers[2].down.register_forward_hook(explode)
        with pytest.raises(RuntimeError, match="in the middle"):
            model(tokens)
        handle.remove()

        def explode_back(grad: torch.Tensor) -> None:
            raise RuntimeError("in the middle of a backward")

        handle = model.layers[2].register_forward_hook(
            lambda module, args, output: output.register_hook(explode_back) and None
        )
        with pytest.raises(RuntimeError, match="in the middle"):
            model(tokens).backward()
        handle.remove()
        optimizer.zero_grad()
        with inject_delays(SEED, max_ms=0.3):
            record = train(model, optimizer, 2, seed=9)
        record.losses.append(before[0])
        assert torch.equal(before[0], before[1])
        assert session.activations.stats["host_bytes_in_use"] == 0
        records.append(record)
    for record in records[1:]:
        assert records[0].differences(record) == []


def gradients(model: TinyModel, loss: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return list(torch.autograd.grad(loss, trained, **options))


@pytest.mark.parametrize("policy", [(True, False), (False, True), (True, [1])])
@pytest.mark.parametrize("param_offload", [False, True])
def test_graphs_used_more_than_once(policy: Any, param_offload: Any) -> None:
    """retain_graph, a second backward without it, and double backward."""
    found = []
    for offload, recompute, paged in ((False, False, False), (*policy, param_offload)):
        model, _ = run(
            activation_offload=offload, recompute=recompute, param_offload=paged, steps=1
        )
        tokens = torch.randint(0, 37, (2, 7), generator=torch.Generator().manual_seed(5))
        torch.manual_seed(3)
        loss = model(tokens)
        first = gradients(model, loss, retain_graph=True)
        again = gradients(model, loss)
        assert all(map(torch.equal, first, again))
        with pytest.raises(RuntimeError, match="second time"):
            gradients(model, loss)
        torch.manual_seed(4)
        slopes = gradients(model, model(tokens), create_graph=True)
        second = gradients(model, sum(slope.square().sum() for slope in slopes))
        found.append([*first, *second])
    assert all(map(torch.equal, *found))


def test_unwrap_between_forward_and_backward() -> None:
    """Pages belong to the graph: they outlive the session."""
    found = []
    for offload in (False, True):
        model, _ = run(activation_offload=offload, recompute=False, steps=1)
        torch.manual_seed(3)
        loss = model(torch.ones(2, 7, dtype=torch.long))
        unwrap(model)
        found.append(gradients(model, loss))
        assert not any("forward" in layer.__dict__ for layer in model.layers)
    assert all(map(torch.equal, *found))


def test_several_graphs_at_once() -> None:
    """Losses of several forwards, summed, or run backward in the order of their forwards."""
    found = []
    for offload, recompute in ((False, False), (True, [1])):
        model, _ = run(activation_offload=offload, recompute=recompute, steps=1)
        generator = torch.Generator().manual_seed(2)
        tokens = [torch.randint(0, 37, (2, 7), generator=generator) for _ in range(3)]
        torch.manual_seed(3)
        grads = gradients(model, sum(model(part) for part in tokens))
        losses = [model(part) for part in tokens]
        for loss in losses:
            grads += gradients(model, loss)
        found.append(grads)
    assert all(map(torch.equal, *found))


@pytest.fixture
def dynamo_forgets() -> Iterator[None]:
    """Compiled code in use changes how optimizers of later tests behave."""
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("dynamo_forgets")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, in dynamo
@pytest.mark.parametrize("policy", [(True, False), (False, True)])
@pytest.mark.parametrize("way", ["module", "in place", "model"])
def test_compiled(policy: Any, way: str) -> None:
    """A compiled block saves what its graph saves; it is paged like any other tensor."""
    found = []
    for offload, recompute in ((False, False), policy):
        model = tiny_model(depth=3, dropout=0.0)
        trained = [p for p in model.parameters() if p.requires_grad]
        if way == "module":
            for index, layer in enumerate(model.layers):
                model.layers[index] = torch.compile(layer, backend="aot_eager")
        if way == "in place":
            for layer in model.layers:
                layer.compile(backend="aot_eager")
        model, _ = wrap(
            model,
            torch.optim.AdamW(trained),
            device="host",
            quantize="none",
            activation_offload=offload,
            recompute=recompute,
            min_offload_bytes=0,
            max_inflight_bytes=1,
        )
        runs = torch.compile(model, backend="aot_eager") if way == "model" else model
        tokens = torch.randint(0, 37, (2, 7), generator=torch.Generator().manual_seed(5))
        grads = []
        for _ in range(2):
            grads += list(torch.autograd.grad(runs(tokens), trained))
        found.append(grads)
        stats = memory_report(model)["activations"]
        assert (stats["fetches"] > 0) == offload and (stats["recomputed"] > 0) == recompute
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("policy", [(False, False), (True, False), (False, True)])
def test_equal_blocks_measure_equal(policy: Any) -> None:
    """Also when wrap() has moved the trained weights' memory, and whatever treats the blocks."""
    offload, recompute = policy
    found = []
    for full in (False, True):
        model = tiny_model(6, full=full)
        model, optimizer = wrap(
            model,
            torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]),
            device="host",
            quantize="none",
            activation_offload=offload,
            recompute=recompute,
            min_offload_bytes=0,
        )
        train(model, optimizer, 2)
        sizes = memory_report(model)["activations"]["block_bytes"]
        assert len(set(sizes[1:])) == 1
        found.append(sizes[1])
    # By hand, 14 tokens of 16 values: the norm's input, mean and 1/std; its result, for the
    # adapter; the adapter's inner values (3); gelu's input (32); the gate.
    assert found[0] == 4 * (14 * (16 + 1 + 1 + 16 + 3 + 32) + 16)
    assert found[1] > found[0]


def test_options_that_name_no_block() -> None:
    with pytest.raises(ValueError, match=r"recompute names blocks \[5\], but the model has 5"):
        run(recompute=[1, 5])
    flat = torch.nn.Linear(3, 3)
    for name in ("activation_offload", "recompute"):
        with pytest.raises(ValueError, match=f"{name}=True needs a stack of blocks"):
            wrap(flat, device="host", **{name: True})
