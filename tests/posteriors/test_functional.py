"""J Σ Jᵀ of every block against the dense product, parameters of one number included."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call, jacrev

from aftermap.batches import Batch
from aftermap.curvature.passes.plan import CheckedPlan
from aftermap.posteriors import GaussianPosterior
from aftermap.predictive.linearised import output_gradients
from tests.posteriors.cases import CASES, build, made, posterior_of


def dense(posterior: GaussianPosterior, case: str) -> torch.Tensor:
    model, data = build(CASES[case][0])
    x = data[0][0]
    jacobian = jacrev(lambda p: functional_call(model, {**dict(model.named_parameters()), **p}, (x,)))(posterior.mean)
    lines = torch.cat(
        [jacobian[n].flatten(2) if jacobian[n].dim() > 2 else jacobian[n][..., None] for n in posterior.names], -1
    )
    return lines.detach() @ torch.linalg.inv(posterior.to_dense()) @ lines.detach().transpose(1, 2)


@pytest.mark.parametrize("case", CASES)
def test_functional_covariance(case: str) -> None:
    model, _ = made(case)
    _, data = build(CASES[case][0])
    posterior = posterior_of(case, 0.7, scale=1.7)
    batch = Batch(data[0][0], None, None, len(data[0][0]))
    variants = [posterior, posterior.with_prior(2.3, scale=0.4)]
    checked = CheckedPlan(model, list(posterior.names), batch)
    full: list[list[torch.Tensor]] = [[], []]
    variances: list[list[torch.Tensor]] = [[], []]
    for _, _, _, gradients in output_gradients(checked, batch):
        for place, parts in enumerate(posterior.functional_covariance(gradients, variants)):
            full[place].append(torch.stack(parts).sum(0))
        for place, parts in enumerate(posterior.functional_covariance(gradients, variants, diagonal=True)):
            variances[place].append(torch.stack(parts).sum(0))
    for place, variant in enumerate(variants):
        wanted = dense(variant, case)
        torch.testing.assert_close(torch.cat(full[place]), wanted, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(torch.cat(variances[place]), wanted.diagonal(dim1=1, dim2=2), rtol=1e-9, atol=1e-10)
