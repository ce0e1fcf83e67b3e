# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""
Clusters beside a regression: two kernels for one model
=======================================================

Measurements of objects of several kinds, whose error grows with their distance at an
unknown rate:

    scale = exp(b0 + b1 * distance)
    x ~ Normal(loc[z], scale)

NUTS cannot sample the assignments `z`, whose number of clusters is unknown.
`SubsampleAnnealedGibbs` integrates the locations out given the scales, but not over
the coefficients of these: with new coefficients every statistic changes. As blocks of
:class:`numpyro.infer.Gibbs` each does its part: the first samples partition, locations
and the hyperparameters of both given the coefficients, NUTS the coefficients given the
rest. Each alone would refuse the model; the script shows what it says.
"""

import argparse

import arviz as az
from jax import random
import jax.numpy as jnp
import numpy as np

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, Gibbs

from numpyro_subanneal import (
    ChineseRestaurantProcess,
    NotRecognised,
    SubsampleAnnealedGibbs,
)

INTERCEPT, SLOPE = -1.0, 0.8
LOCATIONS = np.array([-14.0, -3.0, 8.0, 19.0])


def model(distance, x, num_clusters=16):
    concentration = numpyro.sample("concentration", dist.Gamma(1.0, 1.0))
    spread = numpyro.sample("spread", dist.HalfNormal(20.0))
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 2.0))
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    scale = jnp.exp(intercept + slope * distance)
    z = numpyro.sample("z", ChineseRestaurantProcess(concentration, size=len(x)))
    with numpyro.plate("clusters", num_clusters):
        loc = numpyro.sample("loc", dist.Normal(0.0, spread))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("x", dist.Normal(loc[z], scale), obs=x)


def make_table(num_rows):
    rng = np.random.default_rng(0)
    kind = rng.integers(len(LOCATIONS), size=num_rows)
    distance = rng.uniform(0, 2, num_rows)
    x = rng.normal(LOCATIONS[kind], np.exp(INTERCEPT + SLOPE * distance))
    return distance.astype(np.float32), x.astype(np.float32)


def main(args):
    distance, x = make_table(args.num_rows)
    try:
        alone = MCMC(SubsampleAnnealedGibbs(model), num_warmup=1, num_samples=1)
        alone.run(random.key(0), distance, x)
    except NotRecognised as error:
        print(f"SubsampleAnnealedGibbs alone: {error}\n")

    ours = SubsampleAnnealedGibbs(model)
    kernel = Gibbs(
        [
            (ours, ["z", "loc", "concentration", "spread"]),
            (NUTS(model), ["intercept", "slope"]),
        ]
    )
    mcmc = MCMC(
        kernel,
        num_warmup=args.num_warmup,
        num_samples=args.num_samples,
        num_chains=args.num_chains,
        chain_method="sequential",
        progress_bar=not args.quiet,
    )
    mcmc.run(random.key(1), distance, x)
    draws = mcmc.get_samples(group_by_chain=True)
    z = np.asarray(draws["z"])
    sizes = (z[..., None] == np.arange(16)).sum(-2)
    label_free = {
        "intercept": draws["intercept"],
        "slope": draws["slope"],
        "concentration": draws["concentration"],
        "spread": draws["spread"],
        "num_clusters": (sizes > 0).sum(-1),
        "rows of the largest": sizes.max(-1),
    }
    idata = az.from_dict({name: np.asarray(v) for name, v in label_free.items()})
    kinds = ["mean", "sd", "hdi_3%", "hdi_97%", "ess_bulk", "r_hat"]
    print(az.summary(idata)[kinds])
    print(f"True intercept {INTERCEPT}, slope {SLOPE}, {len(LOCATIONS)} kinds.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("-n", "--num-samples", type=int, default=300)
    parser.add_argument("--num-warmup", type=int, default=150)
    parser.add_argument("--num-chains", type=int, default=2)
    parser.add_argument("--num-rows", type=int, default=400)
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    main(parser.parse_args())
