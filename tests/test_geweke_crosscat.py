# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""
Geweke's joint distribution test of cross-categorization, with everything moving.

Draws from the model by NumPy have the law of a chain that alternates a step of the
kernel with new data given what the kernel drew. Drawn too are the concentration of the
features' partition, concentration and discount of every view's, and the priors of the
columns: of what is continuous by slices, of the rest by enumeration.
"""

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro
import numpyro.distributions as dist

from numpyro_subanneal import (
    FeatureMoves,
    Grid,
    PitmanYorProcess,
    SplitMerge,
    SubsampleAnnealedGibbs,
    testing,
)

# Most of the time is that of compiling.
pytestmark = pytest.mark.quickly_compiled(level=1)

N, NUM_REAL, NUM_CATEGORICAL = 5, 2, 1
# More views than features: a weight that vacant views should share and do not is then
# four times too large, which moves the number of views by 15 standard errors.
D, V = NUM_REAL + NUM_CATEGORICAL, 5
KAPPA, SHAPE, DISCOUNT = 0.6, 6.0, 0.2
BASE = np.array([0.5, 0.3, 0.2], np.float32)
STRENGTHS = np.array([0.5, 2.0, 8.0], np.float32)
DISCOUNTS = np.array([0.0, 0.3, 0.6], np.float32)
NUM_CHAINS, NUM_STEPS = 2000, 28


def model(data):
    beta = numpyro.sample("beta", dist.Gamma(3.0, 2.0))
    view = numpyro.sample("view", PitmanYorProcess(beta, DISCOUNT, size=D))
    with numpyro.plate("views", V):
        alpha = numpyro.sample("alpha", dist.Gamma(3.0, 2.0))
        d = numpyro.sample("d", Grid(DISCOUNTS))
        z = numpyro.sample("z", PitmanYorProcess(alpha, d, size=N))
    k, j = z[view[:NUM_REAL]].T, jnp.arange(NUM_REAL)
    with numpyro.plate("x_features", NUM_REAL, dim=-1):
        m = numpyro.sample("m", dist.Normal(0.0, 1.5))
        rate = numpyro.sample("rate", dist.Gamma(8.0, 2.0))
        with numpyro.plate("x_clusters", N, dim=-2):
            var = numpyro.sample("var", dist.InverseGamma(SHAPE, rate))
            loc = numpyro.sample("loc", dist.Normal(m, jnp.sqrt(var / KAPPA)))
        with numpyro.plate("x_rows", N, dim=-2):
            fn = dist.Normal(loc[k, j], jnp.sqrt(var[k, j]))
            numpyro.sample("x", fn, obs=data["x"])
    k, j = z[view[NUM_REAL:]].T, jnp.arange(NUM_CATEGORICAL)
    with numpyro.plate("a_features", NUM_CATEGORICAL, dim=-1):
        c = numpyro.sample("c", Grid(STRENGTHS))
        with numpyro.plate("a_clusters", N, dim=-2):
            fn = dist.Dirichlet(c[..., None] * jnp.asarray(BASE))
            probs = numpyro.sample("probs", fn)
        with numpyro.plate("a_rows", N, dim=-2):
            numpyro.sample("a", dist.Categorical(probs[k, j]), obs=data["a"])


def urn(rng, concentration, discount, size):
    """Labels ``[*shape, size]``, of concentrations and discounts ``[*shape]``."""
    concentration, discount = np.broadcast_arrays(concentration, discount)
    z = np.zeros((*concentration.shape, size), np.int32)
    sizes = np.zeros(z.shape)
    sizes[..., 0] = 1
    for n in range(1, size):
        k = (sizes > 0).sum(-1)[..., None]
        weight = np.maximum(sizes - discount[..., None], 0)
        new = concentration[..., None] + discount[..., None] * k
        np.put_along_axis(weight, k, new, -1)
        total = weight.cumsum(-1)
        u = rng.uniform(size=(*z.shape[:-1], 1)) * total[..., -1:]
        z[..., n] = (u > total).sum(-1)
        old = np.take_along_axis(sizes, z[..., n : n + 1], -1)
        np.put_along_axis(sizes, z[..., n : n + 1], old + 1, -1)
    return z


def prior_draws(rng, num):
    """All latent sites and the data, ``[draws, ...]``, by NumPy."""
    latent = {"beta": rng.gamma(3.0, 0.5, num)}
    latent["view"] = urn(rng, latent["beta"], DISCOUNT, D)
    latent["alpha"] = rng.gamma(3.0, 0.5, (num, V))
    latent["d"] = rng.choice(DISCOUNTS, (num, V))
    latent["z"] = urn(rng, latent["alpha"], latent["d"], N)
    latent["m"] = 1.5 * rng.normal(size=(num, NUM_REAL))
    latent["rate"] = rng.gamma(8.0, 0.5, (num, NUM_REAL))
    shape = (num, N, NUM_REAL)
    latent["var"] = latent["rate"][:, None] / rng.gamma(SHAPE, 1.0, shape)
    scale = np.sqrt(latent["var"] / KAPPA)
    latent["loc"] = rng.normal(latent["m"][:, None], scale)
    latent["c"] = rng.choice(STRENGTHS, (num, NUM_CATEGORICAL))
    weight = latent["c"][:, None, :, None] * BASE
    weight = np.broadcast_to(weight, (num, N, NUM_CATEGORICAL, 3))
    weight = np.maximum(rng.gamma(weight), 1e-30)
    latent["probs"] = weight / weight.sum(-1, keepdims=True)
    k = cells(np, latent)
    of = np.arange(num)[:, None, None]
    real, categorical = np.arange(NUM_REAL), np.arange(NUM_CATEGORICAL)
    at = of, k[..., :NUM_REAL], real
    x = rng.normal(latent["loc"][at], np.sqrt(latent["var"][at]))
    below = latent["probs"][of, k[..., NUM_REAL:], categorical].cumsum(-1)[..., :-1]
    a = (rng.uniform(size=(*below.shape[:-1], 1)) > below).sum(-1)
    return latent, {"x": x, "a": a}


def cells(xp, latent):
    """Cluster of each cell, ``[..., N, D]``."""
    index = latent["view"][..., None]
    return xp.swapaxes(xp.take_along_axis(latent["z"], index, -2), -1, -2)


def new_data(rng_key, latent):
    key_x, key_a = random.split(rng_key)
    k = cells(jnp, latent)
    at = k[:, :NUM_REAL], jnp.arange(NUM_REAL)
    noise = random.normal(key_x, (N, NUM_REAL))
    x = latent["loc"][at] + jnp.sqrt(latent["var"][at]) * noise
    at = k[:, NUM_REAL:], jnp.arange(NUM_CATEGORICAL)
    below = jnp.cumsum(latent["probs"][at], axis=-1)[..., :-1]
    u = random.uniform(key_a, (N, NUM_CATEGORICAL))
    return {"x": x, "a": (u[..., None] > below).sum(-1)}


def statistics(latent, data):
    """Scalars by name; those of heavy tails on the scale of logarithms."""
    view, k = latent["view"], cells(np, latent)
    num_views = view.max(-1) + 1
    log_beta = np.log(latent["beta"])
    out = {
        "views": num_views,
        "log beta": log_beta,
        "log beta x views": log_beta * num_views,
        # Of any view, with features or without.
        "log alpha": np.log(latent["alpha"]).mean(-1),
        "log alpha of last": np.log(latent["alpha"][..., -1]),
        "d": latent["d"].mean(-1),
    }
    for i, j in ((0, 1), (0, 2), (1, 2)):
        alike = view[..., i] == view[..., j]
        out[f"columns {i}, {j} in one view"] = alike
        same = (k[..., i] == k[..., j]).mean(-1)
        out[f"rows of columns {i}, {j} in clusters of one number"] = same
    for i in range(D):
        own = k[..., i]
        clusters = own.max(-1) + 1
        index = view[..., i : i + 1]
        log_alpha = np.log(np.take_along_axis(latent["alpha"], index, -1)[..., 0])
        d = np.take_along_axis(latent["d"], index, -1)[..., 0]
        out |= {
            f"clusters of column {i}": clusters,
            f"clusters of column {i} x log alpha": clusters * log_alpha,
            f"clusters of column {i} x d": clusters * d,
        }
    for i in range(NUM_REAL):
        x, m = np.arcsinh(data["x"][..., i]), latent["m"][..., i]
        log_rate = np.log(latent["rate"][..., i])
        together = k[..., 0, i] == k[..., 1, i]
        out |= {
            f"m{i}": m,
            f"log rate{i}": log_rate,
            f"log var{i}": np.log(latent["var"][..., 0, i]),
            f"x{i}": x.mean(-1),
            f"x{i} x m": x[..., 0] * m,
            f"x{i} of two rows": x[..., 0] * x[..., 1],
            f"x{i} of two rows together": x[..., 0] * x[..., 1] * together,
            f"loc{i} x m": np.arcsinh(latent["loc"][..., 0, i]) * m,
        }
    for i in range(NUM_CATEGORICAL):
        codes, log_c = data["a"][..., i], np.log(latent["c"][..., i])
        alike = codes[..., 0] == codes[..., 1]
        together = k[..., 0, NUM_REAL + i] == k[..., 1, NUM_REAL + i]
        out |= {
            f"log c{i}": log_c,
            f"a{i} = 0": (codes == 0).mean(-1),
            f"a{i} alike": alike,
            f"a{i} alike and together": alike & together,
            f"a{i} alike x log c": alike * log_c,
            f"probs{i}": latent["probs"][..., 0, i, 0],
        }
    return {name: np.asarray(value, float) for name, value in out.items()}


def test_joint_law_of_everything_is_that_of_the_model():
    # False alarm: 0.1 %, corrected for all statistics and their squares.
    rng = np.random.default_rng(0)
    start, data = prior_draws(rng, NUM_CHAINS)
    first = {k: jnp.asarray(v[0], v.dtype.name[:-2] + "32") for k, v in data.items()}
    kernel = SubsampleAnnealedGibbs(
        model, feature_moves=FeatureMoves(3, 2, 1), split_merge=SplitMerge(1, 1)
    )
    state = kernel.init(random.key(0), 0, None, (first,), {})

    def one_chain(start, data, key):
        key_state, key_data = random.split(key)
        chain = state._replace(
            z={k: v.astype(state.z[k].dtype) for k, v in start.items()},
            rng_key=key_state,
        )

        def step(carry, key):
            chain, data = carry
            chain = kernel.sample(chain, (data,), {})
            data = new_data(key, chain.z)
            return (chain, data), (chain.z, data)

        keys = random.split(key_data, NUM_STEPS)
        _, values = lax.scan(step, (chain, data), keys)
        return jax.tree.map(lambda v: v[NUM_STEPS // 2 :], values)

    keys = random.split(random.key(1), NUM_CHAINS)
    data = {k: jnp.asarray(v, first[k].dtype) for k, v in data.items()}
    start = {k: jnp.asarray(v) for k, v in start.items()}
    walked = jax.device_get(jax.jit(jax.vmap(one_chain))(start, data, keys))
    fresh = prior_draws(rng, 50 * NUM_CHAINS)
    report = testing.joint_distribution_test(statistics(*fresh), statistics(*walked))
    worst = report.worst
    print(len(report.p), "tests; worst", worst, report.z[worst], report.p_value)
    assert report.p_value > 1e-3, (worst, report.z[worst], report.p_value)
