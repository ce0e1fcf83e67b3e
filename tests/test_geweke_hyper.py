# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""
Geweke's joint distribution test with every hyperparameter moving.

As in `test_geweke`, draws from the model by NumPy have the law of a chain that
alternates a step of the kernel with new data given what the kernel drew; here
concentration and discount, the means and rates of real columns and the strengths of
categorical ones are drawn too: continuous ones by slices, the others by enumeration.
"""

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro
import numpyro.distributions as dist

from numpyro_subanneal import (
    Grid,
    PitmanYorProcess,
    SubsampleAnnealedGibbs,
    testing,
)

# Most of the time is that of compiling.
pytestmark = pytest.mark.quickly_compiled(level=1)

N, KAPPA, SHAPE = 6, 0.6, 6.0
BASE = np.array([0.5, 0.3, 0.2], np.float32)
STRENGTHS = np.array([0.5, 2.0, 8.0], np.float32)
DISCOUNTS = np.array([0.0, 0.3, 0.6], np.float32)
# What is compared has four moments: shapes are above 4.
NUM_CHAINS, NUM_STEPS = 800, 28


def model(data):
    alpha = numpyro.sample("alpha", dist.Gamma(3.0, 2.0))
    d = numpyro.sample("d", Grid(DISCOUNTS))
    z = numpyro.sample("z", PitmanYorProcess(alpha, d, size=N))
    spread = numpyro.sample("spread", dist.Gamma(6.0, 6.0))
    with numpyro.plate("x_features", 2, dim=-1):
        m = numpyro.sample("m", dist.Normal(0.0, spread))
        rate = numpyro.sample("rate", dist.Gamma(8.0, 2.0))
        with numpyro.plate("x_clusters", N, dim=-2):
            var = numpyro.sample("var", dist.InverseGamma(SHAPE, rate))
            loc = numpyro.sample("loc", dist.Normal(m, jnp.sqrt(var / KAPPA)))
        with numpyro.plate("x_rows", N, dim=-2):
            fn = dist.Normal(loc[z], jnp.sqrt(var[z]))
            numpyro.sample("x", fn, obs=data["x"])
    with numpyro.plate("a_features", 2, dim=-1):
        c = numpyro.sample("c", Grid(STRENGTHS))
        with numpyro.plate("a_clusters", N, dim=-2):
            fn = dist.Dirichlet(c[..., None] * jnp.asarray(BASE))
            probs = numpyro.sample("probs", fn)
        with numpyro.plate("a_rows", N, dim=-2):
            numpyro.sample("a", dist.Categorical(probs[z]), obs=data["a"])


def prior_draws(rng, num):
    """All latent sites and the data, ``[draws, ...]``, by NumPy."""
    draws = np.arange(num)
    latent = {"alpha": rng.gamma(3.0, 0.5, num)}
    discount = latent["d"] = rng.choice(DISCOUNTS, num)
    z, sizes = np.zeros((num, N), np.int32), np.zeros((num, N))
    sizes[:, 0] = 1
    for n in range(1, N):
        k = (sizes > 0).sum(1)
        weight = np.maximum(sizes - discount[:, None], 0)
        weight[draws, k] = latent["alpha"] + discount * k
        total = weight.cumsum(1)
        u = rng.uniform(size=(num, 1)) * total[:, -1:]
        z[:, n] = (u > total).sum(1)
        sizes[draws, z[:, n]] += 1
    latent["z"], of, data = z, draws[:, None], {}
    latent["spread"] = rng.gamma(6.0, 1 / 6.0, num)
    latent["m"] = rng.normal(size=(num, 2)) * latent["spread"][:, None]
    latent["rate"] = rng.gamma(8.0, 0.5, (num, 2))
    latent["var"] = latent["rate"][:, None] / rng.gamma(SHAPE, 1.0, (num, N, 2))
    scale = np.sqrt(latent["var"] / KAPPA)
    latent["loc"] = rng.normal(latent["m"][:, None], scale)
    data["x"] = rng.normal(latent["loc"][of, z], np.sqrt(latent["var"][of, z]))
    latent["c"] = rng.choice(STRENGTHS, (num, 2))
    shape = latent["c"][:, None, :, None] * BASE
    weight = rng.gamma(np.broadcast_to(shape, (num, N, 2, 3)))
    weight = np.maximum(weight, 1e-30)
    latent["probs"] = weight / weight.sum(-1, keepdims=True)
    u = rng.uniform(size=(num, N, 2, 1))
    data["a"] = (u > latent["probs"][of, z].cumsum(-1)[..., :-1]).sum(-1)
    return latent, data


def new_data(rng_key, latent):
    key_x, key_a = random.split(rng_key)
    of, data = latent["z"], {}
    noise = random.normal(key_x, (N, 2))
    data["x"] = latent["loc"][of] + jnp.sqrt(latent["var"][of]) * noise
    below = jnp.cumsum(latent["probs"][of], axis=-1)[..., :-1]
    u = random.uniform(key_a, (N, 2))
    data["a"] = (u[..., None] > below).sum(-1)
    return data


def statistics(latent, data):
    """Scalars by name; those of heavy tails on the scale of logarithms."""
    z = latent["z"]
    sizes = (z[..., None] == np.arange(N)).sum(-2)
    clusters = (sizes > 0).sum(-1)
    log_alpha = np.log(latent["alpha"])
    out = {
        "clusters": clusters,
        "pairs": (sizes**2).sum(-1),
        "log alpha": log_alpha,
        "log alpha x clusters": log_alpha * clusters,
    }
    out |= {"d": latent["d"], "d x clusters": latent["d"] * clusters}
    log_spread = np.log(latent["spread"])
    out |= {"log spread": log_spread}
    for i in range(2):
        x, m = np.arcsinh(data["x"][..., i]), latent["m"][..., i]
        log_rate = np.log(latent["rate"][..., i])
        log_var = np.log(latent["var"][..., 0, i])
        out |= {
            f"m{i}": np.arcsinh(m),
            f"log rate{i}": log_rate,
            f"log var{i}": log_var,
            f"x{i} mean": x.mean(-1),
            f"x{i} x m": x[..., 0] * np.arcsinh(m),
            f"log spread of x{i} x log rate": np.log(data["x"][..., i].var(-1))
            * log_rate,
            f"log var{i} x log rate": log_var * log_rate,
            f"loc{i} x m": np.arcsinh(latent["loc"][..., 0, i]) * np.arcsinh(m),
            f"log spread x |m{i}|": log_spread * np.abs(np.arcsinh(m)),
        }
    for i in range(2):
        codes, log_c = data["a"][..., i], np.log(latent["c"][..., i])
        alike = codes[..., 0] == codes[..., 1]
        out |= {
            f"log c{i}": log_c,
            f"a{i} = 0": (codes == 0).mean(-1),
            f"a{i} alike": alike,
            f"a{i} alike x log c": alike * log_c,
            f"probs{i}": latent["probs"][..., 0, i, 0],
            f"probs{i} squared x log c": latent["probs"][..., 0, i, 0] ** 2 * log_c,
        }
    return {name: np.asarray(value, float) for name, value in out.items()}


def test_joint_law_of_hyperparameters_and_data_is_that_of_the_model():
    # False alarm: 0.1 %, corrected for all statistics and their squares.
    rng = np.random.default_rng(1)
    start, data = prior_draws(rng, NUM_CHAINS)
    first = {k: jnp.asarray(v[0], v.dtype.name[:-2] + "32") for k, v in data.items()}

    kernel = SubsampleAnnealedGibbs(model)
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
