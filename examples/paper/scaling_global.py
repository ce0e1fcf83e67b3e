# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

r"""
Theorem 2 of the paper: energy barriers that grow with N.

Claimed, of two states that an energy gap of gamma N and a barrier of delta N separate:
to come within total variation distance epsilon takes cold inference
:math:`O(\exp(\delta N) \log(1 / \epsilon))` steps, and the linear anneal
:math:`O(\delta N \log(1 / \epsilon) \, (1 / \epsilon)^{\delta / \gamma})`.

Two states: equation 1 of the paper, from the wrong state, x(0) = 0. It is linear, so
the error at the end of the anneal is an integral, taken numerically
(:func:`annealed_error`), and the cold one is known; nothing is simulated.

Two urns: balls have two features, both of which agree with the colour (as if the
likelihood were squared), p = 0.3, and three of ten are red. One mode has all reds on
the left and the blues on the right, the other the reverse; gap and barrier are read off
the exact posterior (:func:`landscape`). Mixing times are those of the exact law, as in
:mod:`scaling_local`: cold from the worse mode, the prior, and Sequential; annealed from
nothing, where the temperature is the size of the subsample, not that of the theorem.

The kernel: the same model as a NumPyro model, sampled by ``MCMC.run`` of
``SubsampleAnnealedGibbs``, moves of single rows only (no splits and merges of clusters,
which would cross the barrier at once). How many chains are in the better mode is shown
beside the exact law, for the anneal and for Sequential+Gibbs with as many steps.

    python examples/paper/scaling_global.py
    python examples/paper/scaling_global.py --large      # more sizes and longer anneals
"""

import argparse

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import scaling_local as local
from scipy import integrate, ndimage, optimize, special
import two_urns

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC

from numpyro_subanneal import LinearSchedule, SequentialGibbs, SubsampleAnnealedGibbs

P, ALPHA, RED = 0.3, 0.5, 0.3
CHURNS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)

# --- Two states ---------------------------------------------------------------


def log_cold_time(num_rows, epsilon, gamma, delta):
    r"""
    Log of the time that takes x from 0 to within `epsilon` of the truth, all data in:
    the distance decays as :math:`\exp(-t e^{-\delta N})`.
    """
    return delta * num_rows + np.log(np.log(special.expit(gamma * num_rows) / epsilon))


def annealed_error(time, num_rows, gamma, delta, num_points=20_001):
    r"""
    Distance from the truth at the end of an anneal of length `time`, beta = t / T,
    from x(0) = 0.

    With :math:`u = \beta \gamma N`, and :math:`W(\beta) = T / (N \delta) \, (e^{-\beta
    \delta N} - e^{-\delta N})` the jumps still expected at beta, it is :math:`e^{-W(0)}
    / 2 + \int_0^{\gamma N} \sigma'(u) e^{-W} du`: of the last jump, if there is one,
    by parts.
    """
    u = np.linspace(0, min(gamma * num_rows, 60), num_points)  # no more beyond

    def survival(beta_rows):
        jumps = np.exp(-delta * beta_rows) - np.exp(-delta * num_rows)
        return np.exp(-time / (num_rows * delta) * jumps)

    slope = special.expit(u) * special.expit(-u)
    return survival(0.0) / 2 + integrate.simpson(slope * survival(u / gamma), x=u)


def annealed_time(num_rows, epsilon, gamma, delta):
    """Length of the anneal that ends within `epsilon` of the truth."""

    def excess(log_time):
        error = annealed_error(np.exp(log_time), num_rows, gamma, delta)
        return np.log(error) - np.log(epsilon)

    most = np.log(sharp_time(num_rows, epsilon, gamma, delta)) + 20
    return np.exp(optimize.brentq(excess, -20, most, xtol=1e-10))


def sharp_time(num_rows, epsilon, gamma, delta):
    r"""
    What the annealed time tends to for large N and small epsilon: :math:`N \delta
    (\Gamma(1 + \gamma / \delta) / \epsilon)^{\delta / \gamma}`, no logarithm. (The last
    jump is at :math:`e^{-\beta \delta N} = N \delta w / T` with w exponential.)
    """
    return (
        num_rows
        * delta
        * (special.gamma(1 + gamma / delta) / epsilon) ** (delta / gamma)
    )


# --- Two urns, two features ---------------------------------------------------


def balls(num_rows, red=RED):
    num_red = round(red * num_rows)
    return num_red, num_rows - num_red


def posterior(num_rows, p=P, red=RED):
    return two_urns.log_posterior(*balls(num_rows, red), p, ALPHA, num_features=2)


def in_better_mode(law):
    """Mass where a greater share of the reds is on the left than of the blues."""
    a, b = np.indices(law.shape)
    num_red, num_blue = np.array(law.shape) - 1
    return law[a * num_blue > b * num_red].sum()


def landscape(num_rows, p=P, red=RED):
    """Gap between the modes and barrier from the worse one, in nats."""
    log_probs = posterior(num_rows, p, red)
    num_red, num_blue = np.array(log_probs.shape) - 1
    better, worse = (num_red, 0), (0, num_blue)

    def connected(level):
        parts, _ = ndimage.label(log_probs >= level)
        return parts[better] == parts[worse]

    low, high = log_probs.min(), log_probs[worse]
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if connected(middle) else (low, middle)
    return log_probs[better] - log_probs[worse], log_probs[worse] - low


def rates(num_rows, p=P, red=RED):
    """Gamma and delta: how gap and barrier grow with a ball, around this size."""
    most = np.array(landscape(num_rows + 20, p, red))
    return (most - landscape(num_rows, p, red)) / 20


def urns_cold_times(num_rows, epsilon, p=P, red=RED):
    """Steps of cold Gibbs sampling: from the worse mode, the prior, Sequential."""
    num_red, num_blue = balls(num_rows, red)
    chain = local.Cold(num_red, num_blue, p, ALPHA, num_features=2, least=0)
    starts = [
        chain.point((0, num_blue)),
        chain.restrict(np.exp(two_urns.log_prior(num_red, num_blue, p))),
        chain.restrict(annealed_law(num_rows, 0, p, red)),
    ]
    times, distances = chain.distances(np.stack(starts, 1), num_rows, epsilon)
    return [local.mixing_time(times, d, epsilon) for d in distances.T]


def annealed_law(num_rows, churns, p=P, red=RED):
    return local.annealed_law(*balls(num_rows, red), churns, p, ALPHA, num_features=2)


def annealed_distances(num_rows, churns, p=P, red=RED):
    exact = np.exp(posterior(num_rows, p, red))
    laws = (annealed_law(num_rows, c, p, red) for c in churns)
    return np.array([local.total_variation(x.ravel(), exact.ravel()) for x in laws])


def urns_annealed_time(num_rows, epsilon, churns=CHURNS, p=P, red=RED):
    """Steps of the anneal, between whole numbers of churns by interpolation."""
    found = []
    for c in churns:
        found.extend(annealed_distances(num_rows, [c], p, red))
        if found[-1] <= epsilon:
            break
    times = num_rows * (1 + np.array(churns[: len(found)]))
    return local.mixing_time(times, np.array(found), epsilon)


# --- The kernel ---------------------------------------------------------------


def urns(x, p=P):
    """Rows of boolean features, ``[N, D]``, in a left (0) and a right urn (1)."""
    num_rows, num_features = x.shape
    with numpyro.plate("balls", num_rows):
        z = numpyro.sample("z", dist.Categorical(jnp.array([p, 1 - p])))
    with numpyro.plate("features", num_features, dim=-1):
        with numpyro.plate("urns", 2, dim=-2):
            share = numpyro.sample("share", dist.Beta(ALPHA, ALPHA))
        with numpyro.plate("rows", num_rows, dim=-2):
            numpyro.sample("x", dist.Bernoulli(share[z]), obs=x)


def run_kernel(
    rng_key, num_red, num_blue, churns, num_chains, num_features=2, p=P, anneal=True
):
    """
    Reds and blues on the left at the end of the warm-up, ``[num_chains, 2]``: of the
    anneal, or of Sequential+Gibbs with as many steps.
    """
    x = np.repeat([1, 0], [num_red, num_blue])[:, None].repeat(num_features, 1)
    if anneal:
        # One ball a step.
        schedule, num_warmup = LinearSchedule(churn=churns), num_red + num_blue
    else:
        schedule, num_warmup = SequentialGibbs(), 1 + churns
    kernel = SubsampleAnnealedGibbs(urns, schedule, split_merge=None)
    mcmc = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=1,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.warmup(rng_key, x, p, collect_warmup=True, extra_fields=("~z.share",))
    left = np.asarray(mcmc.get_samples(group_by_chain=True)["z"][:, -1]) == 0
    return np.stack([left[:, :num_red].sum(1), left[:, num_red:].sum(1)], 1)
