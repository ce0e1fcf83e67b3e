# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""What the mixture models have in common: cluster parameters, base measure, likelihood.

The base measure, the prior of a cluster's parameters, is centred on the data: a new
cluster predicts each column about as the whole column is distributed. In many
dimensions this decides whether one row can open a cluster at all, because the prior
predictive of a row has to compete with the predictive of a large mixed cluster.

The constants of the base measure are computed from the data inside the model: by NumPy
where the data are concrete, so that they are constants of a compiled program as well,
and by JAX where the data are traced.
"""

from collections.abc import Sequence

import jax
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np

import numpyro
import numpyro.distributions as dist

from numpyro_subanneal.models import grids
from numpyro_subanneal.typing import Array

__all__ = ["categorical_features", "num_rows", "real_features"]


def real_features(
    x: Array,
    z: Array,
    num_clusters: int,
    *,
    kappa: float | None = None,
    shape: float | None = None,
) -> None:
    r"""
    Declares real columns that are normal within a cluster, with unknown mean and
    variance in each cluster and column: sites `variance` and `loc` ``[K, D]`` and the
    observed site `real` ``[N, D]``.

    .. math::

        \sigma^2_{kd} &\sim \mathrm{InverseGamma}(a, b_d) \\
        \mu_{kd} &\sim \mathrm{Normal}(m_d, \sigma_{kd} / \sqrt{\kappa}) \\
        x_{nd} &\sim \mathrm{Normal}(\mu_{z_n d}, \sigma_{z_n d})

    with :math:`m_d` the mean of the column and :math:`b_d` the *rate* (of the inverse
    gamma over variances) for which the prior predictive of a new cluster, a Student t
    with :math:`2a` degrees of freedom (Murphy, 2007, Eq. 100), has the variance
    :math:`s_d^2` of the column: :math:`b_d = s_d^2 (a - 1) \kappa / (\kappa + 1)`.
    So the variance within a cluster has the prior mean
    :math:`s_d^2 \kappa / (\kappa + 1)`. A column without variance counts as one of
    variance 1.

    Without `kappa` or `shape` the prior of each column is learned: sites `real_mean`
    and `real_scale` for :math:`m_d` and :math:`b_d / a`, and `real_kappa` and
    `real_shape` for what is not given, each ``[D]``, on the grids of
    :mod:`~numpyro_subanneal.models.grids`.

    :param x: data ``[N, D]``, finite.
    :param z: assignments ``[N]``.
    :param int num_clusters: capacity K.
    :param float kappa: variance within clusters over variance of their means, a priori;
        the number of rows that the prior mean counts for. Smaller for few columns with
        narrow clusters, larger (about 1) for many columns.
    :param float shape: shape :math:`a > 1` of the inverse gamma; :math:`2a` is the
        number of rows that the prior variance counts for.

    **References:**

    1. *Conjugate Bayesian analysis of the Gaussian distribution*, K. P. Murphy (2007)
    """
    _check_table(x, z, "iuf", "real")
    _check_clusters(num_clusters)
    learned = kappa is None or shape is None
    if kappa is not None:
        _check_above("kappa", kappa, 0)
    if shape is not None:
        _check_above("shape", shape, 1)
    if not isinstance(x, Tracer):
        bad = ~np.isfinite(np.asarray(x))
        if bad.any():
            row, column = np.argwhere(bad)[0]
            raise ValueError(
                f"Column {column} of the real data has {x[row, column]} in row {row}; "
                "values must be finite. Leave out the rows with missing cells."
            )
    with numpyro.plate("real_features", x.shape[1], dim=-1):
        if learned:
            mean = numpyro.sample("real_mean", grids.mean(x))
            if kappa is None:
                kappa = numpyro.sample("real_kappa", grids.kappa())
            if shape is None:
                shape = numpyro.sample("real_shape", grids.shape())
            rate = shape * numpyro.sample("real_scale", grids.variance(x))
        else:
            mean, variance = _mean_and_variance(x)
            rate = variance * (shape - 1) * kappa / (kappa + 1)
        with numpyro.plate("clusters", num_clusters, dim=-2):
            var = numpyro.sample("variance", dist.InverseGamma(shape, rate))
            loc = numpyro.sample("loc", dist.Normal(mean, jnp.sqrt(var / kappa)))
        with numpyro.plate("rows", x.shape[0], dim=-2):
            numpyro.sample("real", dist.Normal(loc[z], jnp.sqrt(var[z])), obs=x)


def categorical_features(
    x: Array,
    num_categories: Sequence[int],
    z: Array,
    num_clusters: int,
    *,
    strength: float | None = None,
) -> None:
    r"""
    Declares columns of categories with unknown probabilities in each cluster and
    column. The columns with C categories are one observed site `categorical_C`, in
    their order in `x`, with the site `probs_C` ``[K, columns, C]``.

    .. math::

        p_{kd} &\sim \mathrm{Dirichlet}(s f_d) \\
        x_{nd} &\sim \mathrm{Categorical}(p_{z_n d})

    with :math:`s` the strength and :math:`f_d` the frequencies of the categories in the
    column, to which one more row is added that is spread evenly over them, so that a
    category that was not seen keeps a probability. They are the prior predictive of a
    new cluster (Tu, 2014). Without `strength`, that of each column is learned: a site
    `strength_C` ``[columns]`` on the grid of
    :func:`~numpyro_subanneal.models.grids.strength`.

    :param x: integer codes ``[N, D]``, in column d ``0..num_categories[d] - 1``.
    :param num_categories: number of categories of each column.
    :param z: assignments ``[N]``.
    :param int num_clusters: capacity K.
    :param float strength: number of rows that the column's frequencies count for in
        each cluster.

    **References:**

    1. *The Dirichlet-multinomial and Dirichlet-categorical models for Bayesian
       inference*, S. Tu (2014)
    """
    _check_table(x, z, "biu", "categorical")
    _check_clusters(num_clusters)
    if strength is not None:
        _check_above("strength", strength, 0)
    cardinality = _check_categories(x, num_categories)
    for size in np.unique(cardinality).tolist():
        # The columns of one cardinality stay one array: to slice `x` is to copy it.
        chosen = np.flatnonzero(cardinality == size)
        codes = x if len(chosen) == len(cardinality) else x[:, chosen]
        frequency = _frequency(codes, size)
        with numpyro.plate(f"categorical_{size}_features", len(chosen), dim=-1):
            weight = strength
            if strength is None:
                own = numpyro.sample(f"strength_{size}", grids.strength())
                weight = own[..., None]
            with numpyro.plate("clusters", num_clusters, dim=-2):
                prior = dist.Dirichlet(weight * frequency)
                probs = numpyro.sample(f"probs_{size}", prior)
            with numpyro.plate("rows", x.shape[0], dim=-2):
                likelihood = dist.Categorical(probs=probs[z])
                numpyro.sample(f"categorical_{size}", likelihood, obs=codes)


# --- base measure ------------------------------------------------------------------


def _mean_and_variance(x: Array) -> tuple[Array, Array]:
    xp = jnp if isinstance(x, Tracer) else np
    # Deviations from the first row: exact zeros in a constant column, and no digits
    # lost to a large mean.
    first = xp.asarray(x[0], float)
    deviation = xp.asarray(x, float) - first
    variance = deviation.var(0)
    return first + deviation.mean(0), xp.where(variance > 0, variance, 1)


def _frequency(codes: Array, size: int) -> Array:
    if isinstance(codes, Tracer):
        counts = jax.vmap(lambda c: jnp.bincount(c, length=size), in_axes=1)(codes)
    else:
        columns = np.asarray(codes).T
        counts = np.stack([np.bincount(c, minlength=size) for c in columns])
    return (counts + 1 / size) / (codes.shape[0] + 1)


# --- checks ------------------------------------------------------------------------


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def num_rows(x: Array) -> int:
    """Number of rows N of a table ``[N, D]``."""
    if not isinstance(x, np.ndarray | jax.Array) or x.ndim != 2 or 0 in x.shape:
        what = f"shape {x.shape}" if hasattr(x, "shape") else type(x).__name__
        raise ValueError(
            "A table must be a NumPy or JAX array with the axes (rows, columns), at "
            f"least one of each, got {what}."
        )
    return x.shape[0]


def _check_table(x: Array, z: Array, kinds: str, name: str) -> None:
    rows = num_rows(x)
    _check(
        rows == z.shape[-1],
        f"The {name} data have {rows} rows, but {z.shape[-1]} rows are assigned.",
    )
    _check(x.dtype.kind in kinds, f"The {name} data must not have dtype {x.dtype}.")


def _check_above(name: str, value: float, bound: float) -> None:
    # NB: written so that NaN fails it too.
    if not isinstance(value, Tracer) and not value > bound:
        raise ValueError(f"`{name}` must be greater than {bound}, got {value}.")


def _check_clusters(num_clusters: int) -> None:
    _check(
        isinstance(num_clusters, int | np.integer) and num_clusters > 0,
        f"`num_clusters` must be a positive integer, got {num_clusters!r}. With "
        "`jit_model_args=True` bind it by `functools.partial`.",
    )


def _check_categories(x: Array, num_categories: Sequence[int]) -> np.ndarray:
    _check(
        len(num_categories) == x.shape[1]
        and all(isinstance(n, int | np.integer) and n > 0 for n in num_categories),
        f"`num_categories` must hold one positive integer for each of the {x.shape[1]} "
        f"categorical columns, got {num_categories!r}. With `jit_model_args=True` bind "
        "it by `functools.partial`.",
    )
    cardinality = np.asarray(num_categories)
    if not isinstance(x, Tracer):
        bad = (np.asarray(x) < 0) | (np.asarray(x) >= cardinality)
        if bad.any():
            row, column = np.argwhere(bad)[0]
            raise ValueError(
                f"Column {column} of the categorical data has the code "
                f"{x[row, column]} in row {row}; its codes are the integers "
                f"0..{cardinality[column] - 1}."
            )
    return cardinality
