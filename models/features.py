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

Assignments are ``[N]``, one cluster for all columns of a row, or ``[N, D]``, one for
each cell, as in cross-categorization.

A cell is missing where it is NaN, or -1 in a column of categories, of zeros and ones,
or of counts. Missing cells are masked.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from numbers import Real

import jax
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np

import numpyro
import numpyro.distributions as dist

from numpyro_subanneal.models import grids
from numpyro_subanneal.models.grids import num_rows
from numpyro_subanneal.typing import Array

__all__ = [
    "binary_features",
    "categorical_features",
    "count_features",
    "num_rows",
    "real_features",
]


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

    :param x: data ``[N, D]``, finite; NaN for a missing cell.
    :param z: assignments ``[N]`` or ``[N, D]``.
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
        bad = np.isinf(np.asarray(x))
        if bad.any():
            row, column = np.argwhere(bad)[0]
            raise ValueError(
                f"Column {column} of the real data has {x[row, column]} in row {row}; "
                "values must be finite, or NaN where a cell is missing."
            )
    observed = _observed(x)
    with numpyro.plate("real_features", x.shape[1], dim=-1):
        if learned:
            mean = numpyro.sample("real_mean", grids.mean(x, observed))
            if kappa is None:
                kappa = numpyro.sample("real_kappa", grids.kappa())
            if shape is None:
                shape = numpyro.sample("real_shape", grids.shape())
            rate = shape * numpyro.sample("real_scale", grids.variance(x, observed))
        else:
            mean, variance = _mean_and_variance(x, observed)
            rate = variance * (shape - 1) * kappa / (kappa + 1)
        with numpyro.plate("clusters", num_clusters, dim=-2):
            var = numpyro.sample("variance", dist.InverseGamma(shape, rate))
            loc = numpyro.sample("loc", dist.Normal(mean, jnp.sqrt(var / kappa)))
        with numpyro.plate("rows", x.shape[0], dim=-2), _masked(observed):
            likelihood = dist.Normal(_of(loc, z), jnp.sqrt(_of(var, z)))
            numpyro.sample("real", likelihood, obs=x)


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

    :param x: integer codes ``[N, D]``, in column d ``0..num_categories[d] - 1``; -1 for
        a missing cell.
    :param num_categories: number of categories of each column.
    :param z: assignments ``[N]`` or ``[N, D]``.
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
        whole = len(chosen) == len(cardinality)
        codes = x if whole else x[:, chosen]
        own = z if whole or z.ndim == 1 else z[:, chosen]
        observed = _observed(codes)
        frequency = _frequency(codes, size)
        with numpyro.plate(f"categorical_{size}_features", len(chosen), dim=-1):
            weight = strength
            if strength is None:
                weight = numpyro.sample(f"strength_{size}", grids.strength())
                weight = weight[..., None]
            with numpyro.plate("clusters", num_clusters, dim=-2):
                prior = dist.Dirichlet(weight * frequency)
                probs = numpyro.sample(f"probs_{size}", prior)
            with numpyro.plate("rows", x.shape[0], dim=-2), _masked(observed):
                likelihood = dist.Categorical(probs=_of(probs, own))
                numpyro.sample(f"categorical_{size}", likelihood, obs=codes)


def binary_features(
    x: Array, z: Array, num_clusters: int, *, strength: float | None = None
) -> None:
    r"""
    Declares columns of zeros and ones, with an unknown probability of a one in each
    cluster and column: the site `binary_probs` ``[K, D]`` and the observed site
    `binary` ``[N, D]``.

    .. math::

        p_{kd} &\sim \mathrm{Beta}(s f_d, s (1 - f_d)) \\
        x_{nd} &\sim \mathrm{Bernoulli}(p_{z_n d})

    with :math:`s` the strength and :math:`f_d` the share of ones in the column, to
    which one more row is added that is half of each. Without `strength`, that of each
    column is learned: a site `binary_strength` ``[D]`` on the grid of
    :func:`~numpyro_subanneal.models.grids.strength`.

    :param x: zeros and ones ``[N, D]``; -1 for a missing cell.
    :param z: assignments ``[N]`` or ``[N, D]``.
    :param int num_clusters: capacity K.
    :param float strength: number of rows that the column's share counts for in each
        cluster.
    """
    _check_table(x, z, "biuf", "binary")
    _check_clusters(num_clusters)
    _check_codes(x, np.full(x.shape[1], 2), "binary")
    if strength is not None:
        _check_above("strength", strength, 0)
    observed = _observed(x)
    frequency = _frequency(x, 2)[:, 1]
    with numpyro.plate("binary_features", x.shape[1], dim=-1):
        if strength is None:
            strength = numpyro.sample("binary_strength", grids.strength())
        with numpyro.plate("clusters", num_clusters, dim=-2):
            prior = dist.Beta(strength * frequency, strength * (1 - frequency))
            probs = numpyro.sample("binary_probs", prior)
        with numpyro.plate("rows", x.shape[0], dim=-2), _masked(observed):
            likelihood = dist.Bernoulli(probs=_of(probs, z))
            numpyro.sample("binary", likelihood, obs=x)


def count_features(
    x: Array, z: Array, num_clusters: int, *, shape: float | None = None
) -> None:
    r"""
    Declares columns of counts that are Poisson within a cluster, with an unknown mean
    in each cluster and column: the site `rate` ``[K, D]`` and the observed site `count`
    ``[N, D]``.

    .. math::

        \lambda_{kd} &\sim \mathrm{Gamma}(a, a / m_d) \\
        x_{nd} &\sim \mathrm{Poisson}(\lambda_{z_n d})

    with :math:`a` the shape and :math:`m_d` the mean of the column, to which one more
    row with a count of one half is added; the second argument of the gamma is the
    *rate*, so that its mean is :math:`m_d`. Without `shape`, that of each column is
    learned: a site `count_shape` ``[D]`` on the grid of
    :func:`~numpyro_subanneal.models.grids.shape`.

    :param x: counts ``[N, D]``; -1 for a missing cell.
    :param z: assignments ``[N]`` or ``[N, D]``.
    :param int num_clusters: capacity K.
    :param float shape: shape :math:`a` of the gamma: means of clusters vary by
        :math:`1 / \sqrt{a}` of the column's.
    """
    _check_table(x, z, "biuf", "count")
    _check_clusters(num_clusters)
    _check_codes(x, np.full(x.shape[1], np.inf), "count")
    if shape is not None:
        _check_above("shape", shape, 0)
    observed = _observed(x)
    xp = jnp if isinstance(x, Tracer) else np
    num = observed.sum(0)
    total = xp.sum(x, 0, where=observed, dtype=float)
    mean = (total + 0.5) / (num + 1)
    with numpyro.plate("count_features", x.shape[1], dim=-1):
        if shape is None:
            shape = numpyro.sample("count_shape", grids.shape())
        with numpyro.plate("clusters", num_clusters, dim=-2):
            rate = numpyro.sample("rate", dist.Gamma(shape, shape / mean))
        with numpyro.plate("rows", x.shape[0], dim=-2), _masked(observed):
            numpyro.sample("count", dist.Poisson(_of(rate, z)), obs=x)


# --- cells -------------------------------------------------------------------------


def _of(parameter: Array, z: Array) -> Array:
    """A parameter ``[K, D, ...]`` of each cell's cluster, ``[N, D, ...]``."""
    if z.ndim == 1:
        return parameter[z]
    return parameter[z, jnp.arange(parameter.shape[1])]


def _observed(x: Array) -> Array:
    """Which cells are not missing."""
    xp = jnp if isinstance(x, Tracer) else np
    if x.dtype.kind == "b":
        return xp.ones(x.shape, bool)
    return ~xp.isnan(x) if x.dtype.kind == "f" else xp.asarray(x != -1)


def _masked(observed: Array):
    if not isinstance(observed, Tracer) and observed.all():
        return nullcontext()
    return numpyro.handlers.mask(mask=observed)


# --- base measure ------------------------------------------------------------------


def _mean_and_variance(x: Array, observed: Array) -> tuple[Array, Array]:
    xp = jnp if isinstance(x, Tracer) else np
    if xp is np and x.shape[1] > 1:
        # One after another: in double precision the table may fill the memory.
        columns = [slice(d, d + 1) for d in range(x.shape[1])]
        each = [_mean_and_variance(x[:, d], observed[:, d]) for d in columns]
        mean, variance = map(np.concatenate, zip(*each, strict=True))
        return mean, variance
    # Deviations from the first cell: exact zeros in a constant column, and no digits
    # lost to a large mean.
    x = xp.asarray(x, float)
    first = xp.where(
        observed.any(0), xp.take_along_axis(x, observed.argmax(0)[None], 0)[0], 0
    )
    num = xp.maximum(observed.sum(0), 1)
    deviation = xp.where(observed, x - first, 0)
    mean = deviation.sum(0) / num
    variance = (xp.where(observed, deviation - mean, 0) ** 2).sum(0) / num
    return first + mean, xp.where(variance > 0, variance, 1)


def _frequency(codes: Array, size: int) -> Array:
    observed = _observed(codes)
    if isinstance(codes, Tracer):
        cells = jnp.where(observed, codes, size).astype(int)
        counts = jax.vmap(lambda c: jnp.bincount(c, length=size), in_axes=1)(cells)
    else:
        counts = np.stack(
            [
                np.bincount(c[seen].astype(int), minlength=size)
                for c, seen in zip(np.asarray(codes).T, observed.T, strict=True)
            ]
        )
    return (counts + 1 / size) / (observed.sum(0)[:, None] + 1)


# --- checks ------------------------------------------------------------------------


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _check_table(x: Array, z: Array, kinds: str, name: str) -> None:
    rows = num_rows(x)
    _check(
        rows == z.shape[0],
        f"The {name} data have {rows} rows, but {z.shape[0]} rows are assigned.",
    )
    _check(
        z.ndim == 1 or z.shape == x.shape,
        f"The {name} data have the shape {x.shape}, but the assignments {z.shape}.",
    )
    _check(x.dtype.kind in kinds, f"The {name} data must not have dtype {x.dtype}.")


def _check_above(name: str, value: float, bound: float) -> None:
    got = f"shape {value.shape}" if hasattr(value, "shape") else repr(value)
    _check(
        isinstance(value, Real | np.ndarray | jax.Array) and np.shape(value) == (),
        f"`{name}` must be one number, for all columns, got {got}; without `{name}` "
        "that of each column is learned.",
    )
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
    num_columns = x.shape[1]
    try:
        good = len(num_categories) == num_columns and all(
            isinstance(n, int | np.integer) and n > 0 for n in num_categories
        )
    except TypeError:  # one number, for example
        good = False
    _check(
        good,
        f"`num_categories` must hold one positive integer for each of the {num_columns}"
        f" categorical columns, such as `(3,) * {num_columns}` for three categories "
        f"each, got {num_categories!r}. With `jit_model_args=True` bind it by "
        "`functools.partial`.",
    )
    cardinality = np.asarray(num_categories)
    _check_codes(x, cardinality, "categorical")
    return cardinality


def _check_codes(x: Array, size: np.ndarray, name: str) -> None:
    """That the cells of each column are integers below its `size`, or missing."""
    if isinstance(x, Tracer):
        return
    x = np.asarray(x)
    missing = ~_observed(x)
    # NB: written so that NaN fails it too.
    good = missing | ((x >= 0) & (x < size))
    if x.dtype.kind == "f":
        good &= missing | (x == np.floor(x))
    if not good.all():
        row, column = np.argwhere(~good)[0]
        limit = "" if np.isinf(size[column]) else f", at most {size[column] - 1}"
        what = "the code" if name == "categorical" else "the value"
        raise ValueError(
            f"Column {column} of the {name} data has {what} {x[row, column]} in row "
            f"{row}; its cells are nonnegative integers{limit}, or -1 where a cell is "
            "missing."
        )
