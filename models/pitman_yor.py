# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

r"""
Pitman-Yor process mixtures of tables.

Rows are partitioned by a Pitman-Yor process, whose number of clusters grows as a power
of the number of rows. Given its cluster, each cell of a row is independent of the
others (Obermeyer et al., 2014, section 2.1). The parameters of each cluster and column,
their prior, which is centred on the column, and the names of the sites are those of
:func:`~numpyro_subanneal.models.features.real_features` and
:func:`~numpyro_subanneal.models.features.categorical_features`. The partition site is
`z` ``[N]``.

Data come first; with ``MCMC(..., jit_model_args=True)`` bind the sizes by
:func:`functools.partial`. The base measure is computed from the data, so that it takes
a table to draw a new one:
``Predictive(handlers.uncondition(pitman_yor.real), num_samples=1)(rng_key, x)``.

**References:**

1. *Scaling Nonparametric Bayesian Inference via Subsample-Annealing*, F. Obermeyer, J.
   Glidden, E. Jonas (2014)
"""

from collections.abc import Sequence

import numpyro

from numpyro_subanneal.distributions import PitmanYorProcess
from numpyro_subanneal.models import grids
from numpyro_subanneal.models.features import (
    categorical_features,
    num_rows,
    real_features,
)
from numpyro_subanneal.typing import Array

__all__ = ["categorical", "mixed", "real"]


def _partition(x: Array, concentration: float | None, discount: float | None) -> Array:
    # Loom's prior is not a product: both large would be a cluster for every few rows.
    both = concentration is None and discount is None
    if concentration is None:
        prior = grids.concentration(triangular=both)
        concentration = numpyro.sample("concentration", prior)
    if discount is None:
        prior = grids.discount(concentration if both else None)
        discount = numpyro.sample("discount", prior)
    prior = PitmanYorProcess(concentration, discount, size=num_rows(x))
    return numpyro.sample("z", prior)


def real(
    x: Array,
    num_clusters: int = 32,
    concentration: float | None = None,
    discount: float | None = None,
    *,
    kappa: float | None = None,
    shape: float | None = None,
) -> None:
    """
    Real columns.

    :param x: data ``[N, D]``, finite; NaN for a missing cell.
    :param int num_clusters: capacity: how many clusters can be represented.
    :param float concentration: of the Pitman-Yor process, above ``-discount``. It is
        learned if it is not given, as are the others below, with the priors of
        :mod:`~numpyro_subanneal.models.grids`.
    :param float discount: in ``[0, 1)``; the number of clusters expected a priori grows
        as ``N ** discount``, and with 0 is that of the Dirichlet process.
    :param float kappa: see :func:`~numpyro_subanneal.models.features.real_features`.
    :param float shape: likewise.
    :raises ValueError: naming the argument, or the cell of the data, that is not valid.

    **Example**

    .. doctest::

        >>> from functools import partial
        >>> import numpy as np
        >>> from jax import random
        >>> from numpyro.infer import MCMC
        >>> from numpyro_subanneal import SubsampleAnnealedGibbs
        >>> from numpyro_subanneal.models import pitman_yor

        >>> x = np.random.default_rng(0).normal(size=(90, 2))
        >>> x[:30] -= 8
        >>> x[60:] += 8
        >>> model = partial(pitman_yor.real, num_clusters=16)
        >>> mcmc = MCMC(SubsampleAnnealedGibbs(model), num_warmup=10,
        ...             num_samples=20, progress_bar=False)
        >>> mcmc.run(random.key(0), x)
        >>> z = mcmc.get_samples()["z"][-1]
        >>> len({int(label) for label in (z[0], z[45], z[89])})
        3
    """
    z = _partition(x, concentration, discount)
    real_features(x, z, num_clusters, kappa=kappa, shape=shape)


def categorical(
    x: Array,
    num_categories: Sequence[int],
    num_clusters: int = 32,
    concentration: float | None = None,
    discount: float | None = None,
    *,
    strength: float | None = None,
) -> None:
    """
    Columns of categories, of any numbers of categories.

    :param x: integer codes ``[N, D]``, in column d ``0..num_categories[d] - 1``; -1 for
        a missing cell.
    :param num_categories: number of categories of each column, a tuple.
    :param int num_clusters: capacity: how many clusters can be represented.
    :param float concentration: of the Pitman-Yor process, above ``-discount``. It is
        learned if it is not given, as are the others below, with the priors of
        :mod:`~numpyro_subanneal.models.grids`.
    :param float discount: in ``[0, 1)``; the number of clusters expected a priori grows
        as ``N ** discount``, and with 0 is that of the Dirichlet process.
    :param float strength: see
        :func:`~numpyro_subanneal.models.features.categorical_features`.
    :raises ValueError: naming the argument, or the cell of the data, that is not valid.
    """
    z = _partition(x, concentration, discount)
    categorical_features(x, num_categories, z, num_clusters, strength=strength)


def mixed(
    real: Array,
    categorical: Array,
    num_categories: Sequence[int],
    num_clusters: int = 32,
    concentration: float | None = None,
    discount: float | None = None,
    *,
    kappa: float | None = None,
    shape: float | None = None,
    strength: float | None = None,
) -> None:
    """
    Real columns and columns of categories of the same rows.

    :param real: data ``[N, D]``, finite; NaN for a missing cell.
    :param categorical: integer codes ``[N, D']``, in column d
        ``0..num_categories[d] - 1``; -1 for a missing cell.
    :param num_categories: number of categories of each column, a tuple.
    :param int num_clusters: capacity: how many clusters can be represented.
    :param float concentration: of the Pitman-Yor process, above ``-discount``. It is
        learned if it is not given, as are the others below, with the priors of
        :mod:`~numpyro_subanneal.models.grids`.
    :param float discount: in ``[0, 1)``; the number of clusters expected a priori grows
        as ``N ** discount``, and with 0 is that of the Dirichlet process.
    :param float kappa: see :func:`~numpyro_subanneal.models.features.real_features`.
    :param float shape: likewise.
    :param float strength: see
        :func:`~numpyro_subanneal.models.features.categorical_features`.
    :raises ValueError: naming the argument, or the cell of the data, that is not valid.
    """
    z = _partition(real, concentration, discount)
    real_features(real, z, num_clusters, kappa=kappa, shape=shape)
    categorical_features(
        categorical, num_categories, z, num_clusters, strength=strength
    )
