# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""
Marginal likelihoods by funsor's own contraction, as a second opinion.

Funsor integrates the parameter out of prior and likelihood by its own rules; where it
knows a pair, its result is that of ours. One value at a time, and two where it can.
"""

import funsor
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_subanneal.conjugate import beta, dirichlet, gamma, normal

funsor.set_backend("jax")

from funsor import ops  # noqa: E402
from funsor.domains import Real, Reals  # noqa: E402
import funsor.jax.distributions as fd  # noqa: E402
from funsor.tensor import Tensor  # noqa: E402
from funsor.terms import Variable  # noqa: E402

PARAMETER = Variable("parameter", Real)
SIMPLEX = Variable("parameter", Reals[3])


def tensor(value):
    return Tensor(jnp.asarray(value, float))


def trials(hyper):
    return fd.Beta(hyper["concentration1"], hyper["concentration0"], value=PARAMETER)


def urn(hyper):
    return fd.Dirichlet(tensor(hyper["concentration"]), value=SIMPLEX)


BETAS = [
    {"concentration1": a, "concentration0": b} for a, b in ((1.5, 0.7), (9.0, 30.0))
]
URNS = [{"concentration": np.array(c)} for c in ([0.5, 1.0, 2.0], [20.0, 3.0, 9.0])]
GAMMAS = [{"shape": a, "rate": b} for a, b in ((1.5, 0.7), (20.0, 4.0))]
NORMALS = [
    {"mean": m, "scale0": s0, "scale": s}
    for m, s0, s in ((0.3, 2.0, 0.5), (-4, 0.2, 3))
]


CASES = {
    "Bernoulli": (
        beta.BetaBernoulli(),
        BETAS,
        [0, 1],
        trials,
        lambda h, x: fd.Bernoulli(probs=PARAMETER, value=tensor(x)),
    ),
    "Binomial": (
        beta.BetaBinomial(),
        [{**h, "total_count": 7.0} for h in BETAS],
        [0, 3, 7],
        trials,
        lambda h, x: fd.Binomial(
            total_count=tensor(h["total_count"]), probs=PARAMETER, value=tensor(x)
        ),
    ),
    "Poisson": (
        gamma.GammaPoisson(),
        GAMMAS,
        [0, 2, 11],
        lambda h: fd.Gamma(h["shape"], h["rate"], value=PARAMETER),
        lambda h, x: fd.Poisson(PARAMETER, value=tensor(x)),
    ),
    # Of one trial: of the categorical likelihood funsor has no rule.
    "Categorical": (
        dirichlet.DirichletCategorical(),
        URNS,
        [0, 1, 2],
        urn,
        lambda h, x: fd.Multinomial(
            tensor(1.0), SIMPLEX, value=tensor(np.arange(3) == x)
        ),
    ),
    "Multinomial": (
        dirichlet.DirichletMultinomial(),
        URNS,
        [[1, 2, 3], [0, 0, 6]],
        urn,
        lambda h, x: fd.Multinomial(tensor(6.0), SIMPLEX, value=tensor(x)),
    ),
    "Normal": (
        normal.NormalKnownScale(),
        NORMALS,
        [1.2, -0.7],
        lambda h: fd.Normal(h["mean"], h["scale0"], value=PARAMETER),
        lambda h, x: fd.Normal(PARAMETER, h["scale"], value=tensor(x)),
    ),
}


def ours(pair, hyper, values):
    hyper = {name: jnp.asarray(value, float) for name, value in hyper.items()}
    stat = pair.empty(hyper)
    for x in values:
        given = (jnp.sum(jnp.asarray(x)),) if pair.given_by_row else ()
        stat = pair.add(hyper, stat, pair.cell(hyper, jnp.asarray(x), *given))
    return float(pair.log_marginal(hyper, stat))


def funsors(hyper, values, prior, likelihood):
    joint = prior(hyper)
    for x in values:
        joint = joint + likelihood(hyper, x)
    marginal = joint.reduce(ops.logaddexp, "parameter")
    assert isinstance(marginal, Tensor), "funsor did not integrate"
    return float(marginal.data)


@pytest.mark.parametrize("name", CASES)
def test_marginals_of_one_value_are_funsors(name):
    pair, hypers, values, *model = CASES[name]
    for hyper in hypers:
        for x in values:
            got, want = ours(pair, hyper, [x]), funsors(hyper, [x], *model)
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-5)


def test_marginals_of_normal_values_are_funsors():
    pair, hypers, _, *model = CASES["Normal"]
    values = [1.2, -0.7, 3.0, 0.4]
    for hyper in hypers:
        got, want = ours(pair, hyper, values), funsors(hyper, values, *model)
        np.testing.assert_allclose(got, want, rtol=2e-5)
