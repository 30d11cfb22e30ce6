"""The PyTorch version of the kernel over a chunk of logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ts_kernels._softmax_rows import softmax_rows_


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_gradient_is_written_over_the_logits(dtype, softcap):
    logits = (torch.randn(5, 131) * 5).to(dtype)
    targets = torch.tensor([3, -100, 130, 0, 7])
    scale = torch.tensor([1.0, 2.0, -0.5, 0.0, 3.0])
    exact = logits.double().clone().requires_grad_()
    z = exact if softcap is None else softcap * torch.tanh(exact / softcap)
    losses = F.cross_entropy(z, targets, reduction="none")
    (gradient,) = torch.autograd.grad((losses * scale).sum(), exact)
    ours = softmax_rows_(
        logits, targets, ignore_index=-100, softcap=softcap, write_grad=True, scale=scale
    )
    assert ours.dtype == torch.promote_types(dtype, torch.float32)
    assert ours[1] == 0
    torch.testing.assert_close(ours.double(), losses.detach(), rtol=1e-5, atol=1e-5)
    assert torch.equal(logits[1], torch.zeros(131, dtype=dtype))
    rtol = 2**-8 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(logits.double(), gradient, rtol=rtol, atol=1e-6)
