# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

r"""
Cross-categorization of tables: columns in views, and in each view rows in clusters.

A Pitman-Yor process partitions the columns into views (Mansinghka et al., 2009, with a
Dirichlet process; Obermeyer et al., 2014, section 4). In each view another one
partitions the rows, and given its cluster in its column's view, a cell is independent
of the others:

.. math::

    v &\sim \mathrm{PitmanYor}(\alpha, d) \\
    z_u &\sim \mathrm{PitmanYor}(\alpha_u, d_u) \\
    x_{nd} &\sim F_d(\theta_{k d}), \quad k = z_{v_d n}

- `view` ``[D]``: view of each column, in the order of the arguments;
- `z` ``[V, N]``: cluster of each row in each view, V the most views that can be
  represented. Views are numbered by the first column of each; the partitions of those
  without columns read -1 in draws.

The parameters of each cluster and column, their prior, which is centred on the column,
and the names of the sites are those of :mod:`~numpyro_subanneal.models.features`.
Everything that is not given is learned: `view_concentration` and `view_discount`,
`concentration` and `discount` ``[V]``, and the priors of the columns.

Data come first; with ``MCMC(..., jit_model_args=True)`` bind the sizes by
:func:`functools.partial`.

**References:**

1. *Scaling Nonparametric Bayesian Inference via Subsample-Annealing*, F. Obermeyer, J.
   Glidden, E. Jonas (2014)
2. *Cross-categorization: A method for discovering multiple overlapping clusterings*, V.
   K. Mansinghka, E. Jonas, C. Petschulat, B. Cronin, P. Shafto, J. B. Tenenbaum (2009)
"""

from collections.abc import Sequence
from math import ceil, sqrt

import numpy as np

import numpyro

from numpyro_subanneal.distributions import PitmanYorProcess
from numpyro_subanneal.models import grids
from numpyro_subanneal.models.features import (
    binary_features,
    categorical_features,
    count_features,
    num_rows,
    real_features,
)
from numpyro_subanneal.typing import Array

__all__ = ["categorical", "default_num_views", "mixed", "real"]


def default_num_views(num_columns: int) -> int:
    """
    Most views that are represented by default: one for each column, where there are few
    of them, and else 16 or twice the square root of their number. Views without columns
    are candidates for a column that moves, so that there are the more of them the more
    columns there are.

    :param int num_columns: number of columns D.
    """
    return max(2, min(num_columns, max(16, ceil(2 * sqrt(num_columns)))))


def real(
    x: Array,
    num_views: int | None = None,
    num_clusters: int = 32,
    *,
    kappa: float | None = None,
    shape: float | None = None,
) -> None:
    """
    Real columns.

    :param x: data ``[N, D]``, finite; NaN for a missing cell.
    :param int num_views: most views that can be represented, at least 2; by default
        :func:`default_num_views` of the number of columns.
    :param int num_clusters: capacity: how many clusters can be represented in a view.
    :param float kappa: see :func:`~numpyro_subanneal.models.features.real_features`; it
        is learned if it is not given, as is the other.
    :param float shape: likewise.
    :raises ValueError: naming the argument, or the cell of the data, that is not valid.

    **Example**

    .. doctest::

        >>> from functools import partial
        >>> import numpy as np
        >>> from jax import random
        >>> from numpyro.infer import MCMC
        >>> from numpyro_subanneal import SubsampleAnnealedGibbs
        >>> from numpyro_subanneal.models import crosscat

        >>> rng = np.random.default_rng(0)
        >>> one, two = rng.integers(2, size=(2, 80))
        >>> centres = np.stack([one, one, one, two, two, two], 1) * 6.0
        >>> x = centres + rng.normal(size=(80, 6))
        >>> model = partial(crosscat.real, num_clusters=8, kappa=0.3, shape=3.0)
        >>> mcmc = MCMC(SubsampleAnnealedGibbs(model), num_warmup=100,
        ...             num_samples=20, progress_bar=False)
        >>> mcmc.run(random.key(0), x)
        >>> mcmc.get_samples()["view"][-1].tolist()
        [0, 0, 0, 1, 1, 1]
    """
    mixed(x, num_views=num_views, num_clusters=num_clusters, kappa=kappa, shape=shape)


def categorical(
    x: Array,
    num_categories: Sequence[int],
    num_views: int | None = None,
    num_clusters: int = 32,
    *,
    strength: float | None = None,
) -> None:
    """
    Columns of categories, of any numbers of categories.

    :param x: integer codes ``[N, D]``, in column d ``0..num_categories[d] - 1``; -1 for
        a missing cell.
    :param num_categories: number of categories of each column, a tuple.
    :param int num_views: most views that can be represented, at least 2; by default
        :func:`default_num_views` of the number of columns.
    :param int num_clusters: capacity: how many clusters can be represented in a view.
    :param float strength: see
        :func:`~numpyro_subanneal.models.features.categorical_features`; it is learned
        if it is not given.
    :raises ValueError: naming the argument, or the cell of the data, that is not valid.
    """
    mixed(
        categorical=x,
        num_categories=num_categories,
        num_views=num_views,
        num_clusters=num_clusters,
        strength=strength,
    )


def mixed(
    real: Array | None = None,
    categorical: Array | None = None,
    num_categories: Sequence[int] = (),
    binary: Array | None = None,
    count: Array | None = None,
    num_views: int | None = None,
    num_clusters: int = 32,
    *,
    kappa: float | None = None,
    shape: float | None = None,
    strength: float | None = None,
) -> None:
    """
    Columns of several kinds of the same rows, at least one of all. Columns are numbered
    in this order: real, categorical, binary, count.

    :param real: data ``[N, D]``, finite; NaN for a missing cell.
    :param categorical: integer codes ``[N, D']``, in column d
        ``0..num_categories[d] - 1``; -1 for a missing cell.
    :param num_categories: number of categories of each categorical column, a tuple.
    :param binary: zeros and ones; -1 for a missing cell.
    :param count: counts; -1 for a missing cell.
    :param int num_views: most views that can be represented, at least 2; by default
        :func:`default_num_views` of the number of columns.
    :param int num_clusters: capacity: how many clusters can be represented in a view.
    :param float kappa: see :func:`~numpyro_subanneal.models.features.real_features`; it
        is learned if it is not given, as are the others below.
    :param float shape: likewise.
    :param float strength: see
        :func:`~numpyro_subanneal.models.features.categorical_features` and
        :func:`~numpyro_subanneal.models.features.binary_features`.
    :raises ValueError: naming the argument, or the cell of the data, that is not valid.
    """
    tables = [x for x in (real, categorical, binary, count) if x is not None]
    if not tables:
        raise ValueError(
            "There are no data: give at least one of `real`, `categorical`, `binary` "
            "and `count`."
        )
    rows = num_rows(tables[0])
    columns = 0
    for x in tables:
        if num_rows(x) != rows:
            raise ValueError(
                f"The tables have different numbers of rows, {rows} and {num_rows(x)}."
            )
        columns += x.shape[1]
    if num_views is None:
        num_views = default_num_views(columns)
    if not isinstance(num_views, int | np.integer) or num_views < 2:
        raise ValueError(
            f"`num_views` must be an integer of at least 2, got {num_views!r}. With "
            "`jit_model_args=True` bind it by `functools.partial`."
        )

    # Loom's prior is not a product: both large would be a view for every few columns.
    concentration = numpyro.sample(
        "view_concentration", grids.concentration(triangular=True)
    )
    discount = numpyro.sample("view_discount", grids.discount(concentration))
    view = numpyro.sample(
        "view", PitmanYorProcess(concentration, discount, size=columns)
    )
    with numpyro.plate("views", num_views):
        concentration = numpyro.sample(
            "concentration", grids.concentration(triangular=True)
        )
        discount = numpyro.sample("discount", grids.discount(concentration))
        z = numpyro.sample("z", PitmanYorProcess(concentration, discount, size=rows))

    start = 0

    def own(x):
        """Clusters of the cells of the next table."""
        nonlocal start
        stop = start + x.shape[1]
        found = z[view[start:stop]].T
        start = stop
        return found

    if real is not None:
        real_features(real, own(real), num_clusters, kappa=kappa, shape=shape)
    if categorical is not None:
        categorical_features(
            categorical,
            num_categories,
            own(categorical),
            num_clusters,
            strength=strength,
        )
    if binary is not None:
        binary_features(binary, own(binary), num_clusters, strength=strength)
    if count is not None:
        count_features(count, own(count), num_clusters)
