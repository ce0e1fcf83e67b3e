# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""
Moves of elements between views, given how well they fit: against every way to put four
elements into so many labelled views. Keys are fixed and nothing is retried.
"""

from functools import partial
from itertools import product

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

import numpyro.distributions as dist

from numpyro_subanneal import (
    ChineseRestaurantProcess,
    FeatureMoves,
    FiniteDirichletMixture,
    MixtureOfFiniteMixtures,
    PitmanYorProcess,
    columns,
    testing,
)
from numpyro_subanneal.views import Layout

M, NUM_CHAINS = 4, 40_000
PRIORS = {
    "py": PitmanYorProcess(0.8, 0.4, size=M),
    "dp": ChineseRestaurantProcess(1.3, size=M),
    "mfm": MixtureOfFiniteMixtures(0.7, dist.Poisson(2.0), size=M, max_components=20),
    "finite": FiniteDirichletMixture(0.6, num_components=3, size=M),
}
MOVES = {
    "gibbs": partial(columns._gibbs, 2),
    "sets": partial(columns._share_out_sets, 6),
}


# Move, whether it opens views and leaves some vacant, prior, number of views, and if
# all of them may be moved into.
CASES = [
    *product(["sets"], [True], PRIORS, [2, 4], [True]),
    *product(MOVES, [True], ["py", "mfm"], [3], [False]),
    *product(MOVES, [False], ["py", "mfm"], [3], [True]),
]


@pytest.mark.quickly_compiled
@pytest.mark.parametrize("move, opens, prior, num_views, usable", CASES)
def test_moves_leave_the_posterior_as_it_is(move, opens, prior, num_views, usable):
    # Started in it, they stay in it. False alarm: 1e-4 each, 0.16 % for all.
    seed = num_views + 10 * list(MOVES).index(move)
    rng = np.random.default_rng(seed)
    fit = rng.normal(size=(M, num_views)).astype(np.float32)
    labels = np.array(list(product(range(num_views), repeat=M)), np.int32)
    sizes = np.stack([(labels == v).sum(1) for v in range(num_views)], 1)
    occupied = (sizes > 0).sum(1)
    # Every way to number the parts of a partition is as probable.
    log_prob = (
        np.asarray(PRIORS[prior].log_eppf(jnp.asarray(sizes)), float)
        + special.gammaln(num_views - occupied + 1)
        - special.gammaln(num_views + 1)
        + fit[np.arange(M), labels].sum(1)
    )
    may = np.ones(num_views, bool)
    may[-1] = usable
    log_prob[~may[labels].all(1)] = -np.inf
    probs = np.exp(log_prob - special.logsumexp(log_prob))
    start = labels[rng.choice(len(probs), size=NUM_CHAINS, p=probs)]
    scene = columns._Scene(
        None, (PRIORS[prior],), (), None, Layout((num_views,), (M,), ()), 3
    )

    def one(labels, key):
        state = columns._State(
            (labels,),
            jnp.asarray(may),
            None,
            None,
            (),
            (jnp.asarray(fit),),
            columns.FeatureRecord.start(),
        )
        return MOVES[move](key, scene, 0, state, jnp.asarray(opens)).labels[0]

    keys = random.split(random.key(seed), NUM_CHAINS)
    found = np.asarray(jax.jit(jax.vmap(one))(jnp.asarray(start), keys))
    assert num_views == 2 or (found != start).any(1).mean() > 0.1
    if not opens:
        views = np.arange(num_views)[:, None]
        taken = [(z[:, None] == views).any(-1) for z in (start, found)]
        np.testing.assert_array_equal(*taken)
    place = num_views ** np.arange(M)[::-1]
    report = testing.goodness_of_fit((found * place).sum(1), probs)
    print(report)
    assert report.p_value > 1e-4, report


@pytest.mark.parametrize("name", ["num_sweeps", "num_sets", "num_guided"])
@pytest.mark.parametrize("value", [-1, 1.5, True])
def test_numbers_of_moves_are_checked(name, value):
    with pytest.raises(ValueError, match=f"`{name}` must be a nonnegative integer"):
        FeatureMoves(**{name: value})
