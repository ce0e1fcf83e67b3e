# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

r"""
Hyperpriors for mixture models: grids that span a wide range of values.

Hyperparameters with such a prior are drawn by Gibbs from their conditional on the
assignments, normalised over the grid (Obermeyer et al., 2014, Section 4). Each function
returns a :class:`~numpyro_subanneal.grid.Grid` for a site of a model, with the same
weight on every point unless it says otherwise. The grids of a table of real columns
are scaled by the data, one grid a column, so that they suit any unit of measurement;
they belong into a plate over the columns.

Shapes: ``N`` rows, ``D`` columns, ``G`` points.

**Example**, real columns with a normal-inverse-gamma prior that is learned:

.. doctest::

    >>> import jax.numpy as jnp
    >>> import numpy as np
    >>> from jax import random
    >>> import numpyro
    >>> import numpyro.distributions as dist
    >>> from numpyro import handlers
    >>> from numpyro_subanneal import PitmanYorProcess
    >>> from numpyro_subanneal.models import grids

    >>> def mixture(x, num_clusters=32):
    ...     concentration = numpyro.sample("concentration", grids.concentration())
    ...     discount = numpyro.sample("discount", grids.discount(concentration))
    ...     prior = PitmanYorProcess(concentration, discount, size=x.shape[0])
    ...     z = numpyro.sample("z", prior)
    ...     with numpyro.plate("columns", x.shape[1], dim=-1):
    ...         mean = numpyro.sample("mean", grids.mean(x))
    ...         kappa = numpyro.sample("kappa", grids.kappa())
    ...         shape = numpyro.sample("shape", grids.shape())
    ...         variance = numpyro.sample("variance", grids.variance(x))
    ...         with numpyro.plate("clusters", num_clusters, dim=-2):
    ...             prior = dist.InverseGamma(shape, shape * variance)
    ...             var = numpyro.sample("var", prior)
    ...             prior = dist.Normal(mean, jnp.sqrt(var / kappa))
    ...             loc = numpyro.sample("loc", prior)
    ...         with numpyro.plate("rows", x.shape[0], dim=-2):
    ...             numpyro.sample("x", dist.Normal(loc[z], jnp.sqrt(var[z])), obs=x)

    >>> x = np.random.default_rng(0).normal(size=(50, 3)) * [1, 1e-6, 1e3]
    >>> trace = handlers.trace(handlers.seed(mixture, 0)).get_trace(x)
    >>> trace["mean"]["fn"].enumerate_support().shape
    (20, 3)

**References:**

1. *Scaling Nonparametric Bayesian Inference via Subsample-Annealing*, F. Obermeyer, J.
   Glidden, E. Jonas (2014)
2. *Loom*, a system for cross-categorization by the same authors and others,
   https://github.com/posterior/loom: ``loom/hyperprior.py`` and ``loom/gridding.py``
"""

import math

import jax
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np

from numpyro_subanneal.grid import Grid
from numpyro_subanneal.typing import Array

__all__ = [
    "concentration",
    "discount",
    "kappa",
    "mean",
    "rate",
    "shape",
    "strength",
    "variance",
]

# Loom's grid of a Pitman-Yor process: bounds and numbers of points.
_CONCENTRATION = 0.1, 100.0, 20
_DISCOUNT = 0.5, 10

# Cells of a column from which its quantiles are taken; the standard error of the median
# is then 0.01 of the standard deviation.
_MAX_CELLS = 2**14
_QUANTILES = 0.05, 0.25, 0.5, 0.75, 0.95


# --- partitions --------------------------------------------------------------------


def concentration(*, triangular: bool = False) -> Grid:
    r"""
    Concentration :math:`\alpha` of a Dirichlet or Pitman-Yor process: Loom's 20 points
    between 0.1 and 100,

    .. math::

        \alpha_i = 0.1 \cdot 1000^{x_i}, \quad
        x_i = \frac12 + \frac1\pi \arcsin(2 u_i - 1), \quad u_i = \frac{i + 1/2}{20},

    the logarithms of which lie closest together in the middle, about 3.2.

    :param bool triangular: to weigh each point by how many discounts go with it, for
        use with :func:`discount` given the concentration.
    :return: a grid of batch shape ``()``.
    """
    low, high, _ = _CONCENTRATION
    x, y = _triangle()
    weights = (x[:, None] + y < 1).sum(1) if triangular else None
    return Grid(low * (high / low) ** x, weights)


def discount(concentration: Array | float | None = None) -> Grid:
    r"""
    Discount :math:`d` of a Pitman-Yor process: Loom's 10 points between 0 and 0.5,

    .. math::

        d_j = 0.5 \, y_j, \quad y_j = u_j^2, \quad u_j = \frac{j + 1/2}{10},

    which lie closest together near 0, the Dirichlet process.

    Loom does not use all pairs of a concentration and a discount, but the 137 with
    :math:`x_i + y_j < 1`, all with the same weight: both large would mean a cluster for
    every few rows. Without an argument the two are independent here, over all 200
    pairs. Given the concentration, the discount is restricted likewise, and with
    ``concentration(triangular=True)`` the joint prior is Loom's.

    :param concentration: value of the concentration, between 0.1 and 100, any shape
        ``(...)``; traced, too.
    :return: a grid of batch shape ``(...)``, ``()`` without an argument.
    """
    high, _ = _DISCOUNT
    y = _triangle()[1]
    if concentration is None:
        return Grid(high * y)
    xp = jnp if isinstance(concentration, jax.Array) else np
    lowest, highest, _ = _CONCENTRATION
    x = xp.log(xp.asarray(concentration, float) / lowest) / math.log(highest / lowest)
    # NB: the smallest discount stays for concentrations above those of the grid.
    weights = (x[..., None] + y < 1) | (y == y[0])
    return Grid(high * y, weights)


def _triangle() -> tuple[np.ndarray, np.ndarray]:
    """Loom's coordinates of concentration and discount, both within (0, 1)."""
    x = np.arcsin(2 * _midpoints(_CONCENTRATION[-1]) - 1) / math.pi + 0.5
    return x, _midpoints(_DISCOUNT[-1]) ** 2


def _midpoints(count: int) -> np.ndarray:
    return (np.arange(count) + 0.5) / count


# --- columns of categories ---------------------------------------------------------


def strength(num_points: int = 24) -> Grid:
    r"""
    Strength :math:`c` of the Dirichlet(:math:`c f`) prior of a column of categories
    with the frequencies :math:`f`: how many rows they count for in each cluster.

    The points are log-spaced from 0.2, clusters of almost one category each, to 200,
    clusters that hardly differ from the whole column. Loom learns the parameter of each
    category instead, from 0.1 to 100; a single strength keeps the prior predictive of
    a new cluster at the frequencies of the column.

    :param int num_points: number of points, G.
    :return: a grid of batch shape ``()``.
    """
    return _log_spaced(0.2, 200.0, num_points)


# --- real columns ------------------------------------------------------------------


def kappa(num_points: int = 12) -> Grid:
    r"""
    Number of rows :math:`\kappa` that the prior mean of a cluster counts for in a
    normal-inverse-gamma prior: :math:`\mu \sim \mathrm{Normal}(m, \sigma /
    \sqrt\kappa)`, so the variance within clusters over that of their means.

    The points are log-spaced from 0.01, means far apart, to 10. (Loom: to 100.)

    :param int num_points: number of points, G.
    :return: a grid of batch shape ``()``.
    """
    return _log_spaced(0.01, 10.0, num_points)


def shape(num_points: int = 12) -> Grid:
    r"""
    Shape :math:`a` of the inverse gamma prior of the variance of a cluster, half the
    number of rows that the prior variance counts for: half the degrees of freedom
    :math:`\nu` of Loom's inverse-:math:`\chi^2`.

    The points are log-spaced from 0.5 to 50, Loom's :math:`\nu` from 1 to 100.

    :param int num_points: number of points, G.
    :return: a grid of batch shape ``()``.
    """
    return _log_spaced(0.5, 50.0, num_points)


def mean(x: Array, mask: Array | None = None, *, num_points: int = 20) -> Grid:
    """
    Prior mean of the clusters, for each column.

    The points are evenly spaced over the middle 90% of the column, at least one spread
    (see :func:`variance`) to both sides of the median, and at least two units in the
    last place apart. A column that has no observed cell counts as one of zeros.

    :param x: data ``[N, D]``, finite where observed.
    :param mask: True where a cell is observed, broadcasts against ``x``; None for all.
    :param int num_points: number of points, G.
    :return: a grid of batch shape ``(D,)``, the points of each column increasing.
    :raises ValueError: naming the cell of concrete data that is not valid.
    """
    _check_points(num_points)
    (low, median, high), spread = _quantiles_and_spread(x, mask)
    xp = jnp if isinstance(spread, Tracer) else np
    low = xp.minimum(low, median - spread)
    high = xp.maximum(high, median + spread)
    # In the type that the points are given in: they must not become equal in it.
    eps = float(_limits().eps)
    magnitude = xp.maximum(abs(low), abs(high))
    step = (high - low) / max(num_points - 1, 1)
    step = xp.maximum(step, 2 * eps * magnitude)
    offset = xp.arange(num_points) - (num_points - 1) / 2
    points = ((low + high) / 2)[:, None] + step[:, None] * offset
    return Grid(_in_default_type(points))


def variance(x: Array, mask: Array | None = None, *, num_points: int = 12) -> Grid:
    r"""
    Typical variance within a cluster, for each column: :math:`\sigma_0^2` of
    :math:`\sigma^2 \sim \mathrm{InverseGamma}(a, a \sigma_0^2)`, second argument the
    *rate* (over variances). This is the scaled inverse-:math:`\chi^2` distribution with
    :math:`2a` degrees of freedom and scale :math:`\sigma_0^2`.

    The points are log-spaced from 0.003 to 1.5 of the squared spread of the column:
    from clusters of a twentieth of its width to somewhat wider than the column. The
    spread is the interquartile range over 1.349, which is the standard deviation of
    normal data and is not moved by a few wild cells. Where the quartiles are equal
    the standard deviation takes its place, and 1 where all cells are.

    :param x: data ``[N, D]``, finite where observed.
    :param mask: True where a cell is observed, broadcasts against ``x``; None for all.
    :param int num_points: number of points, G.
    :return: a grid of batch shape ``(D,)``, the points of each column increasing.
    :raises ValueError: naming the cell of concrete data that is not valid.
    """
    return Grid(_in_default_type(_variances(x, mask, num_points)))


def rate(
    x: Array,
    mask: Array | None = None,
    *,
    shape: Array | float = 1.5,
    num_points: int = 12,
) -> Grid:
    r"""
    Rate :math:`b` (over variances) of the :math:`\mathrm{InverseGamma}(a, b)` prior of
    the variance of a cluster, for each column: the shape :math:`a` times the points of
    :func:`variance`. For a shape that is learned take ``shape * variance``, with the
    variance from that grid.

    :param x: data ``[N, D]``, finite where observed.
    :param mask: True where a cell is observed, broadcasts against ``x``; None for all.
    :param shape: shape of the inverse gamma, positive, a number or ``[D]``.
    :param int num_points: number of points, G.
    :return: a grid of batch shape ``(D,)``, the points of each column increasing.
    :raises ValueError: naming the argument or the cell of concrete data that is not
        valid.
    """
    if not isinstance(shape, Tracer) and not np.all(np.asarray(shape) > 0):
        raise ValueError(f"`shape` must be positive, got {shape}.")
    xp = jnp if isinstance(shape, Tracer) else np
    points = xp.asarray(shape)[..., None] * _variances(x, mask, num_points)
    return Grid(_in_default_type(points))


def _variances(x: Array, mask: Array | None, num_points: int) -> Array:
    _check_points(num_points)
    _, spread = _quantiles_and_spread(x, mask)
    return spread[:, None] ** 2 * np.geomspace(0.003, 1.5, num_points)


def _log_spaced(low: float, high: float, num_points: int) -> Grid:
    _check_points(num_points)
    return Grid(np.geomspace(low, high, num_points))


def _limits() -> jnp.finfo:
    # NB: `finfo(float)` would be that of float64 without x64, too.
    return jnp.finfo(jnp.result_type(float))


def _in_default_type(points: Array) -> Array:
    if isinstance(points, Tracer):
        return points
    return np.asarray(points, jnp.result_type(float))


# --- location and spread of columns ------------------------------------------------


def _quantiles_and_spread(
    x: Array, mask: Array | None
) -> tuple[tuple[Array, Array, Array], Array]:
    """The 5%, 50% and 95% quantiles and the spread of each column, all ``[D]``."""
    _check_table(x, mask)
    if isinstance(x, Tracer) or isinstance(mask, Tracer):
        first, quantiles, deviation = _traced_summary(x, mask)
        xp = jnp
    else:
        first, quantiles, deviation = _concrete_summary(np.asarray(x), mask)
        xp = np
    q05, q25, q50, q75, q95 = quantiles.T
    # The quartiles of the normal distribution are 1.349 apart.
    spread = (q75 - q25) / 1.349
    spread = xp.where(spread > 0, spread, deviation)
    spread = xp.where(spread > 0, spread, 1.0)
    # Its square times any factor of a grid is a positive float.
    low = math.sqrt(_limits().tiny) * 1e3
    high = math.sqrt(_limits().max) * 1e-3
    if xp is np and (spread < low).any():
        # Cells that are too large are refused by the kernel.
        column = int(np.argmin(spread))
        raise ValueError(
            f"Column {column} of the real data has a spread of {spread[column]:.3g}, "
            f"the square of which {_limits().dtype} cannot hold; multiply the column "
            "by a constant, or call `numpyro.enable_x64()` first."
        )
    return (first + q05, first + q50, first + q95), xp.clip(spread, low, high)


def _concrete_summary(x: np.ndarray, mask: Array | None) -> tuple[np.ndarray, ...]:
    """
    Of each column, in float64: the first observed cell ``[D]``, the quantiles less it
    ``[D, 5]``, and the standard deviation ``[D]``, if half of the cells are equal.

    To subtract a cell gives exact zeros in a constant column, and no digits are lost to
    a large mean. Quantiles are those of cells that lie spread evenly over the rows.
    """
    mask = None if mask is None else np.broadcast_to(mask, x.shape)
    first = np.zeros(x.shape[1])
    quantiles = np.zeros((x.shape[1], len(_QUANTILES)))
    deviation = np.zeros(x.shape[1])
    for d, column in enumerate(x.T):
        observed = column if mask is None else column[mask[:, d]]
        if not len(observed):
            continue
        first[d] = observed[0]
        index = _evenly(_MAX_CELLS, len(observed), min(_MAX_CELLS, len(observed)))
        cells = observed[index[: len(observed)]].astype(float) - first[d]
        quantiles[d] = np.quantile(cells, _QUANTILES)
        if quantiles[d, 1] == quantiles[d, 3]:
            deviation[d] = (observed.astype(float) - first[d]).std()
    return first, quantiles, deviation


def _traced_summary(x: Array, mask: Array | None) -> tuple[jax.Array, ...]:
    """The same of traced data, in the default float type."""
    x = jnp.asarray(x, float)
    size = min(len(x), _MAX_CELLS)

    def column(values, observed):
        if observed is None:
            count, used = len(values), size
            cells = values[_evenly(size, count, used)]
        else:
            count = observed.sum()
            used = jnp.clip(count, 1, size)
            rank = _evenly(size, count, used)
            cells = values[jnp.searchsorted(jnp.cumsum(observed), rank + 1)]
        first = jnp.where(count > 0, cells[0], 0.0)
        ordered = jnp.sort(jnp.where(jnp.arange(size) < used, cells - first, jnp.inf))
        place = jnp.array(_QUANTILES) * (used - 1)
        below = place.astype(int)
        above = jnp.minimum(below + 1, used - 1)
        step = (place - below) * (ordered[above] - ordered[below])
        quantiles = jnp.where(count > 0, ordered[below] + step, 0.0)
        deviation = jnp.std(values - first, where=observed)
        return first, quantiles, jnp.where(count > 0, deviation, 0.0)

    if mask is None:
        return jax.vmap(column, (1, None))(x, None)
    return jax.vmap(column, 1)(x, jnp.broadcast_to(mask, x.shape))


def _evenly(size: int, count: int | Array, used: int | Array) -> Array:
    """
    Integers ``[size]`` of which the first ``used <= count`` spread evenly over
    ``0..count-1``.
    """
    xp = jnp if isinstance(count, Tracer) else np
    # NB: `arange(size) * count` would overflow int32 at 2**17 rows.
    i = xp.arange(size)
    return i * (count // used) + i * (count % used) // used


# --- checks ------------------------------------------------------------------------


def _check_points(num_points: int) -> None:
    if not isinstance(num_points, int | np.integer) or num_points < 1:
        raise ValueError(
            f"`num_points` must be a positive integer, got {num_points!r}."
        )


def _check_table(x: Array, mask: Array | None) -> None:
    num_rows(x)
    if x.dtype.kind not in "iuf":
        raise ValueError(f"The real data must not have dtype {x.dtype}.")
    if mask is not None:
        shape, dtype = jnp.shape(mask), jnp.result_type(mask)
        try:
            fits = np.broadcast_shapes(shape, x.shape) == x.shape
        except ValueError:
            fits = False
        if not fits or dtype.kind != "b":
            raise ValueError(
                f"`mask` must be boolean and broadcast to the shape {x.shape} of the "
                f"data, got {dtype} of shape {shape}."
            )
    if isinstance(x, Tracer) or isinstance(mask, Tracer):
        return
    # Room for the points beyond the data.
    limit = np.float64(_limits().max) / 4
    # NB: written so that NaN fails it too.
    bad = ~(abs(np.asarray(x)) <= limit)
    if mask is not None:
        bad = bad & np.asarray(mask)
    if bad.any():
        row, column = np.argwhere(bad)[0]
        raise ValueError(
            f"Column {column} of the real data has {x[row, column]} in row {row}; "
            f"values must be finite, and at most {limit:.1g} in size. Say which cells "
            "are missing by `mask`, True where a cell is observed."
        )


def num_rows(x: Array) -> int:
    """Number of rows N of a table ``[N, D]``."""
    if not isinstance(x, np.ndarray | jax.Array) or x.ndim != 2 or 0 in x.shape:
        what, way_out = type(x).__name__, ""
        if hasattr(x, "shape"):
            what += f" of shape {x.shape}"
        if hasattr(x, "columns"):
            way_out = (
                "; pass `.to_numpy()` of it, or the `model_args` of "
                "`Table.from_dataframe`"
            )
        raise ValueError(
            "A table must be a NumPy or JAX array with the axes (rows, columns), at "
            f"least one of each, got {what}{way_out}."
        )
    return x.shape[0]
