# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""
Random variates of our own in float32, where those of JAX or NumPyro, or a plain
formula, lose digits: at large counts and concentrations, and of rare events. (That
parameters are drawn from their posteriors is a law of `check_conjugate`.)
"""

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import numpyro.distributions as dist

from numpyro_subanneal.conjugate.base import draw, loggamma
from numpyro_subanneal.variates import gumbel

# Kolmogorov-Smirnov above 1e-4 everywhere: a false alarm in 0.2 % for the file.
LEAST_P = 1e-4


@pytest.mark.parametrize("concentration", [0.05, 0.5, 1.0, 30.0, 1e3])
def test_gamma_variates(concentration):
    found = loggamma(random.key(1), jnp.full(100_000, concentration))
    law = stats.loggamma(concentration)
    assert stats.kstest(np.asarray(found, float), law.cdf).pvalue > LEAST_P


@pytest.mark.parametrize("concentration", [1e5, 1e6, 1e7, 1e8, 1e9])
def test_gamma_variates_of_large_concentrations_are_as_wide_as_they_should_be(
    concentration,
):
    # The logarithm is nearly normal, with a standard deviation of concentration ** -0.5
    # about that of the concentration. What float32 rounds off is what it can hold.
    log_mean = np.float32(np.log(concentration))
    found = loggamma(random.key(2), jnp.full(400_000, concentration))
    spread = (np.asarray(found, float) - log_mean).std()
    rounding = np.spacing(log_mean) / np.sqrt(12)
    want = np.hypot(concentration**-0.5, rounding)
    # Six standard errors.
    assert spread == pytest.approx(want, rel=6 / np.sqrt(2 * 400_000))


@pytest.mark.parametrize("concentration", [1e-6, 0.01, 0.5, 3.0, 50.0, 1e4, 1e6])
def test_von_mises_variates(concentration):
    fn = dist.VonMises(jnp.zeros(50_000), concentration)
    found = np.asarray(draw(random.key(3), fn), float)
    # Nearly normal from 10^4 on, where SciPy's distribution function is slow.
    law = stats.vonmises(concentration)
    if concentration > 1e3:
        law = stats.norm(0, concentration**-0.5)
    assert stats.kstest(found, law.cdf).pvalue > LEAST_P
    assert len(np.unique(found)) > 10_000


def test_beta_variates_stay_inside():
    fn = dist.Beta(jnp.full(100_000, 0.3), 2.0)
    found = np.asarray(draw(random.key(4), fn), float)
    assert stats.kstest(found, stats.beta(0.3, 2.0).cdf).pvalue > LEAST_P
    tiny = np.asarray(draw(random.key(5), dist.Beta(jnp.full(1000, 1e-3), 1e-3)))
    assert (tiny > 0).all() and (tiny < 1).all()


def test_wishart_variates():
    scale = jnp.array([[2.0, 0.5, 0.1], [0.5, 1.0, 0.2], [0.1, 0.2, 3.0]])
    inverse = np.linalg.inv(np.asarray(scale, float))
    fn = dist.InverseWishart(7.0, scale_matrix=scale).expand([20_000])
    covariance = np.asarray(draw(random.key(6), fn), float)
    fn = dist.Wishart(7.0, rate_matrix=scale).expand([20_000])
    precision = np.asarray(draw(random.key(7), fn), float)
    # Both are Wishart as precisions: c'Xc is chi-square times c' S^-1 c.
    for x in (np.linalg.inv(covariance), precision):
        for c in np.array([[1, 0, 0], [0, 0, 1], [1, -2, 0.5]]):
            form = np.einsum("i,nij,j->n", c, x, c) / (c @ inverse @ c)
            assert stats.kstest(form, stats.chi2(7).cdf).pvalue > LEAST_P


def test_gumbel_noise_and_its_tail():
    found = np.asarray(gumbel(random.key(8), (1_000_000,)), float)
    assert stats.kstest(found, stats.gumbel_r.cdf).pvalue > LEAST_P
    # Of 2^27 variates 15.1 exceed 16 on the average; less than 3 or more than 36 do in
    # 5 of 100,000 right samplers.

    @jax.jit
    def count(key):
        def more(total, key):
            return total + (gumbel(key, (2**21,)) > 16).sum(), None

        return lax.scan(more, jnp.int32(0), random.split(key, 2**6))[0]

    assert 3 <= int(count(random.key(9))) <= 36
