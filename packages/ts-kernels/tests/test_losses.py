"""The causal language-model loss and DPO."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import ts_kernels


def test_causal_lm_loss_shifts_by_one():
    hidden = torch.randn(2, 5, 7, requires_grad=True)
    weight = torch.randn(11, 7)
    labels = torch.randint(0, 11, (2, 5))
    labels[0, :2] = -100
    loss = ts_kernels.causal_lm_loss(hidden, weight, labels, chunk_size=3)
    logits = hidden @ weight.t()
    expected = F.cross_entropy(logits[:, :-1].reshape(-1, 11), labels[:, 1:].reshape(-1))
    torch.testing.assert_close(loss, expected)
    (ours,) = torch.autograd.grad(loss, hidden)
    torch.testing.assert_close(ours, torch.autograd.grad(expected, hidden)[0])
    assert torch.equal(ours[:, -1], torch.zeros(2, 7))


def test_causal_lm_loss_passes_its_options_on():
    hidden, weight = torch.randn(2, 5, 7), torch.randn(11, 7)
    bias = torch.randn(11)
    labels = torch.randint(0, 11, (2, 5))
    total = ts_kernels.causal_lm_loss(hidden, weight, labels, bias, reduction="sum")
    mean = ts_kernels.causal_lm_loss(
        hidden,
        weight,
        labels,
        bias,
        num_items=ts_kernels.count_targets(labels, shift=True),
        ignore_index=-7,
    )
    torch.testing.assert_close(mean, total / 8)
    with pytest.raises(TypeError):
        ts_kernels.causal_lm_loss(hidden, weight, labels, smoothing=0.1)


def test_causal_lm_loss_of_packed_rows_and_short_ones():
    hidden, weight = torch.randn(6, 7), torch.randn(11, 7)
    labels = torch.tensor([-100, 4, 5, -100, 6, 7])  # two packed sequences
    packed = ts_kernels.causal_lm_loss(hidden, weight, labels, reduction="sum")
    parts = [
        ts_kernels.causal_lm_loss(hidden[s], weight, labels[s], reduction="sum")
        for s in (slice(0, 3), slice(3, 6))
    ]
    torch.testing.assert_close(packed, parts[0] + parts[1])
    for length in (0, 1):
        loss = ts_kernels.causal_lm_loss(hidden[:length], weight, labels[:length])
        assert loss.item() == 0


def test_causal_lm_loss_bad_shapes():
    with pytest.raises(ValueError, match=r"\[\.\.\., T, D\]"):
        ts_kernels.causal_lm_loss(torch.randn(7), torch.randn(11, 7), torch.tensor(1))
    with pytest.raises(ValueError, match="one for each row"):
        ts_kernels.causal_lm_loss(torch.randn(2, 5, 7), torch.randn(11, 7), torch.ones(2, 4).long())


def test_dpo_loss_by_hand():
    chosen = torch.tensor([-1.0, -2.0], requires_grad=True)
    rejected = torch.tensor([-3.0, -1.5], requires_grad=True)
    ref_chosen, ref_rejected = torch.tensor([-1.5, -2.0]), torch.tensor([-2.0, -2.0])
    loss, good, bad = ts_kernels.dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta=0.5)
    margins = 0.5 * torch.tensor([0.5 - -1.0, 0.0 - 0.5])
    torch.testing.assert_close(loss, torch.log1p(torch.exp(-margins)).mean())
    torch.testing.assert_close(good, torch.tensor([0.25, 0.0]))
    torch.testing.assert_close(bad, torch.tensor([-0.5, 0.25]))
    assert loss.requires_grad and not good.requires_grad and not bad.requires_grad
    loss.backward()
    pull = 0.5 * torch.sigmoid(-margins) / 2
    torch.testing.assert_close(chosen.grad, -pull)
    torch.testing.assert_close(rejected.grad, pull)


def test_dpo_label_smoothing_is_a_mixture_of_both_orders():
    four = torch.randn(4, 6)
    straight = ts_kernels.dpo_loss(*four)[0]
    swapped = ts_kernels.dpo_loss(four[1], four[0], four[3], four[2])[0]
    smoothed = ts_kernels.dpo_loss(*four, label_smoothing=0.2)[0]
    torch.testing.assert_close(smoothed, 0.8 * straight + 0.2 * swapped)


def test_dpo_is_finite_far_out_and_in_half_precision():
    four = torch.tensor([[1e4], [-1e4], [0.0], [0.0]])
    assert ts_kernels.dpo_loss(*four)[0].item() == 0
    assert ts_kernels.dpo_loss(four[1], four[0], four[2], four[3])[0].item() == 2000
    loss, rewards, _ = ts_kernels.dpo_loss(*four.bfloat16())
    assert loss.dtype == rewards.dtype == torch.float32
    empty = torch.zeros(0)
    assert ts_kernels.dpo_loss(empty, empty, empty, empty)[0].item() == 0


@pytest.mark.parametrize(
    "change, message",
    [
        ({"beta": 0.0}, "above 0"),
        ({"label_smoothing": 0.5}, "< 0.5"),
        ({"label_smoothing": -1}, "0 <="),
    ],
)
def test_dpo_bad_options(change, message):
    with pytest.raises(ValueError, match=message):
        ts_kernels.dpo_loss(*torch.randn(4, 2), **change)


def test_dpo_bad_shapes():
    a, b = torch.randn(2), torch.randn(3)
    with pytest.raises(ValueError, match="one shape"):
        ts_kernels.dpo_loss(a, b, a, a)


def test_a_dpo_step_moves_the_right_way():
    hidden = torch.randn(2, 6, 8)
    weight = torch.randn(13, 8, requires_grad=True)
    reference_weight = weight.detach().clone()
    chosen, rejected = torch.randint(0, 13, (2, 6)), torch.randint(0, 13, (2, 6))

    def step():
        return ts_kernels.dpo_loss(
            ts_kernels.sequence_logprobs(hidden, weight, chosen),
            ts_kernels.sequence_logprobs(hidden, weight, rejected),
            ts_kernels.sequence_logprobs(hidden, reference_weight, chosen),
            ts_kernels.sequence_logprobs(hidden, reference_weight, rejected),
        )

    loss = step()[0]
    torch.testing.assert_close(loss.item(), 0.6931471806, atol=1e-6, rtol=0)
    (grad,) = torch.autograd.grad(loss, weight)
    with torch.no_grad():
        weight -= 0.1 * grad
    after, good, bad = step()
    assert after < loss and (good > bad).all()


def test_dpo_is_its_reference():
    four = torch.randn(4, 7) * 5
    for smoothing in (0.0, 0.3):
        found = ts_kernels.dpo_loss(*four, beta=0.3, label_smoothing=smoothing)
        wanted = ts_kernels.reference.dpo_loss(*four, beta=0.3, label_smoothing=smoothing)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)
