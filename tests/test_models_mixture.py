# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""The mixture of columns of all kinds: recognised, its law, a few steps of it."""

from functools import partial

from jax import random
import numpy as np
import pytest

from numpyro.infer import MCMC

from numpyro_subanneal import SubsampleAnnealedGibbs
from numpyro_subanneal.models import mixture, pitman_yor
from numpyro_subanneal.plan import recognise

# Most of the time is that of compiling.
pytestmark = pytest.mark.quickly_compiled

FIXED = {
    "concentration": 1.0,
    "discount": 0.1,
    "kappa": 0.3,
    "shape": 3.0,
    "strength": 3.0,
    "num_clusters": 8,
}


def planted(num_rows=60):
    """Columns of all kinds in two clusters, halves of the rows; some cells missing."""
    rng = np.random.default_rng(0)
    z = np.arange(num_rows) * 2 // num_rows
    own = z[:, None]
    arrays = {
        "real": 8.0 * own + rng.normal(size=(num_rows, 3)),
        "categorical": (own + (rng.random((num_rows, 3)) < 0.1)) % 3,
        "binary": (rng.random((num_rows, 2)) < 0.1 + 0.8 * own) * 1,
        "count": rng.poisson(1 + 19 * own, size=(num_rows, 2)),
    }
    for kind, x in arrays.items():
        x[rng.random(x.shape) < 0.1] = np.nan if kind == "real" else -1
    return z, arrays


def test_planted_clusters_are_recovered_from_columns_of_all_kinds():
    z, arrays = planted()
    model = partial(mixture.mixed, num_categories=(3, 3, 3), **FIXED)
    mcmc = MCMC(
        SubsampleAnnealedGibbs(model, split_merge=None),
        num_warmup=10,
        num_samples=3,
        progress_bar=False,
    )
    mcmc.run(random.key(0), **arrays)
    np.testing.assert_array_equal(mcmc.get_samples()["z"][-1], z)


@pytest.mark.parametrize("kind", ["binary", "count"])
def test_one_kind_of_columns_will_do_with_all_learned(kind):
    _, arrays = planted()
    plan = recognise(mixture.mixed, (), {kind: arrays[kind]})
    assert plan.num_rows == 60
    assert {site.masked for block in plan.blocks for site in block.sites} == {True}


def test_of_reals_and_categories_it_is_the_pitman_yor_mixture():
    z, arrays = planted()
    args = arrays["real"].astype(np.float32), arrays["categorical"], (3, 3, 3)
    scores = []
    for model in (mixture.mixed, pitman_yor.mixed):
        kernel = SubsampleAnnealedGibbs(partial(model, **FIXED))
        state = kernel.init(random.key(0), 0, {"z": z.astype(np.int32)}, args, {})
        scores.append(float(state.log_joint))
    assert scores[0] == pytest.approx(scores[1], rel=1e-6)


def test_bad_arguments_are_named():
    _, arrays = planted()
    with pytest.raises(ValueError, match="no data"):
        mixture.mixed()
    short = {"real": arrays["real"], "count": arrays["count"][:9]}
    kernel = SubsampleAnnealedGibbs(partial(mixture.mixed, **FIXED))
    with pytest.raises(ValueError, match="count data have 9 rows, but 60"):
        kernel.init(random.key(0), 1, None, (), short)
