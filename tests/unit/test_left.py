"""What is left of p beside q: the kernel and torch against the definition in float64."""

from __future__ import annotations

import numpy
import pytest
import torch

from forerun.sampling.compiled import can_sample
from forerun.speculate.accept.left import reduce_rows

DTYPES = [torch.float64, torch.float32]  # float32 is the kernel's, where there is one


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [5, 300, 4097])
@pytest.mark.parametrize("scaled", [False, True])
def test_rows_are_reduced_and_the_others_stay(dtype: torch.dtype, size: int, scaled: bool) -> None:
    generator = torch.Generator().manual_seed(size)
    p, q = (torch.rand(count, size, generator=generator, dtype=torch.float64) ** 4 for count in (5, 3))
    p, q = p / p.sum(dim=1, keepdim=True), q / q.sum(dim=1, keepdim=True)
    rows = [0, 1, 3]
    q[1] = p[1] * 1.001  # nothing is left there
    factor = torch.tensor([[0.5], [0.9], [1.0]], dtype=torch.float64) if scaled else None
    given = p.to(dtype)
    kept = given.clone()
    residual, mass, shared = reduce_rows(given, q.to(dtype), rows, None if factor is None else factor.to(dtype))
    assert torch.equal(given, kept)
    wanted, share = p.numpy().copy(), []
    for place, row in enumerate(rows):
        left = numpy.maximum(0.0, wanted[row] * (factor[place, 0].item() if scaled else 1.0) - q[place].numpy())
        share.append(numpy.minimum(p[row].numpy(), q[place].numpy()).sum())
        assert abs(mass[place, 0].item() - left.sum()) < 1e-5
        if place != 1:
            wanted[row] = left
    assert numpy.allclose(residual.double().numpy(), wanted, atol=1e-6)
    assert (shared is None) == (dtype != torch.float32 or not can_sample(p.device))
    if shared is not None:
        assert numpy.allclose(shared, share, atol=1e-5)
