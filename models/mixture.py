# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

r"""
Pitman-Yor process mixtures of tables with columns of any kind.

One partition of the rows for all columns: cross-categorization with a single view, see
:mod:`~numpyro_subanneal.models.crosscat`, whose arguments these are. Given its cluster,
each cell of a row is independent of the others. The parameters of each cluster and
column, their prior, which is centred on the column, and the names of the sites are
those of :mod:`~numpyro_subanneal.models.features`. The partition site is `z` ``[N]``.

Data come first; with ``MCMC(..., jit_model_args=True)`` bind the sizes by
:func:`functools.partial`.

**References:**

1. *Scaling Nonparametric Bayesian Inference via Subsample-Annealing*, F. Obermeyer, J.
   Glidden, E. Jonas (2014)
"""

from collections.abc import Sequence

from numpyro_subanneal.models import pitman_yor
from numpyro_subanneal.models.features import (
    binary_features,
    categorical_features,
    count_features,
    real_features,
)
from numpyro_subanneal.typing import Array

__all__ = ["mixed"]


def mixed(
    real: Array | None = None,
    categorical: Array | None = None,
    num_categories: Sequence[int] = (),
    binary: Array | None = None,
    count: Array | None = None,
    num_clusters: int = 32,
    concentration: float | None = None,
    discount: float | None = None,
    *,
    kappa: float | None = None,
    shape: float | None = None,
    strength: float | None = None,
) -> None:
    """
    Columns of several kinds of the same rows, at least one of all.

    :param real: data ``[N, D]``, finite; NaN for a missing cell.
    :param categorical: integer codes ``[N, D']``, in column d
        ``0..num_categories[d] - 1``; -1 for a missing cell.
    :param num_categories: number of categories of each categorical column, a tuple.
    :param binary: zeros and ones; -1 for a missing cell.
    :param count: counts; -1 for a missing cell.
    :param int num_clusters: capacity: how many clusters can be represented.
    :param float concentration: of the Pitman-Yor process, above ``-discount``. It is
        learned if it is not given, as are the others below, with the priors of
        :mod:`~numpyro_subanneal.models.grids`.
    :param float discount: in ``[0, 1)``; the number of clusters expected a priori grows
        as ``N ** discount``, and with 0 is that of the Dirichlet process.
    :param float kappa: see :func:`~numpyro_subanneal.models.features.real_features`.
    :param float shape: likewise.
    :param float strength: see
        :func:`~numpyro_subanneal.models.features.categorical_features` and
        :func:`~numpyro_subanneal.models.features.binary_features`.
    :raises ValueError: naming the argument, or the cell of the data, that is not valid.
    """
    given = [x for x in (real, categorical, binary, count) if x is not None]
    if not given:
        raise ValueError(
            "There are no data: give at least one of `real`, `categorical`, `binary` "
            "and `count`."
        )
    z = pitman_yor._partition(given[0], concentration, discount)
    if real is not None:
        real_features(real, z, num_clusters, kappa=kappa, shape=shape)
    if categorical is not None:
        categorical_features(
            categorical, num_categories, z, num_clusters, strength=strength
        )
    if binary is not None:
        binary_features(binary, z, num_clusters, strength=strength)
    if count is not None:
        count_features(count, z, num_clusters)
