# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

r"""
Distributions on finitely many reals, the hyperpriors of grid Gibbs sampling.

:class:`Grid` is the distribution. Its values are reals, while NumPyro enumerates a
discrete site as 0, 1, 2, ...; :func:`index_grids` makes every grid of a model a
function of such an index, so that :mod:`numpyro.contrib.funsor` and NumPyro's kernels
for discrete sites can be used on it.

Shapes: ``G`` points of a grid, on the last axis of every table.
"""

from collections.abc import Callable, Sequence
import copy
import reprlib
from typing import final

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

import numpyro
from numpyro import handlers
from numpyro.distributions import (
    Categorical,
    Distribution,
    ExpandedDistribution,
    Independent,
    MaskedDistribution,
    constraints,
)
from numpyro.distributions.constraints import Constraint
from numpyro.distributions.util import array_equiv, validate_sample
from numpyro.infer.reparam import Reparam
from numpyro.util import is_prng_key, not_jax_tracer

from numpyro_subanneal.distributions import CheckedParameters, _concrete, _offending
from numpyro_subanneal.variates import gumbel

__all__ = ["Grid", "GridReparam", "index_grids"]

# A grid that is computed in another program, or by NumPy instead of JAX, has other last
# digits. So a value counts as the nearest point up to this part of its distance to the
# next one, or this many units in the last place, as long as no points are confused.
_PART_OF_GAP = 2.0**-13
_UNITS_IN_LAST_PLACE = 4


class _GridPoints(Constraint):
    """
    Membership of a grid.

    :param values: points, shape ``(*batch, G)``. The values that are tested broadcast
        against ``batch``.
    """

    is_discrete = True
    event_dim = 0

    def __init__(self, values: ArrayLike) -> None:
        self.values = values

    def __call__(self, x: ArrayLike) -> ArrayLike:
        return _is_at(x, self.values).any(-1)

    def __repr__(self) -> str:
        return f"{type(self).__name__[1:]}(values={self.values})"

    def feasible_like(self, prototype: ArrayLike) -> ArrayLike:
        _refuse_indices(prototype)
        return jnp.broadcast_to(self.values[..., 0], jnp.shape(prototype))

    def tree_flatten(self) -> tuple:
        return (self.values,), (("values",), {})

    def eq(self, other: object, static: bool = False) -> ArrayLike:
        if not isinstance(other, _GridPoints):
            return False
        return array_equiv(self.values, other.values, static=static)


@final
class Grid(CheckedParameters, Distribution):
    r"""
    Distribution on finitely many given reals.

    With points :math:`v_1, \dots, v_G` and weights :math:`w_1, \dots, w_G`,

    .. math::

        P(X = v) = \frac{\sum_{g : v_g = v} w_g}{\sum_g w_g}.

    The points need not be sorted, and the weights of equal points add up. In a batch,
    each element may have its own points.

    :param values: :math:`v`, finite, shape ``(*batch, G)`` with ``G`` at least 1.
        Integers are taken as floats.
    :param weights: :math:`w`, finite, nonnegative and not all zero, up to a factor;
        shape ``(*batch, G)``. The leading axes broadcast against those of ``values``.
        None for equal weights.
    :param bool validate_args: False to check neither concrete parameters nor the
        values given to :meth:`log_prob`; by default parameters are checked, and values
        as :func:`numpyro.enable_validation` says.
    :raises ValueError: if parameters are no numbers or of shapes that do not fit
        (always), or concrete ones are out of range (unless ``validate_args`` is False).

    .. note:: A value counts as a point of the grid if it differs from it by less than
        about a ten-thousandth of the distance to the next point (of the point itself,
        if it is alone) or by a few units in the last place, at the precision of the
        coarser of the two float types. So draws keep their probability when the grid
        is computed anew with other rounding: from traced data, or without x64.

    .. warning:: NumPyro's own enumeration and its Gibbs kernels for discrete sites
        take the support to be 0, 1, 2, ...; give them ``index_grids(model)``, see
        :func:`index_grids`. Values that are arrays of integers, which is what they
        would pass, are refused by :meth:`log_prob`.

    **Example:**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from jax import random
        >>> from numpyro_subanneal.grid import Grid
        >>> prior = Grid([0.1, 1.0, 10.0], weights=[1, 2, 1])
        >>> draws = prior.sample(random.key(0), (4,))
        >>> bool(prior.support(draws).all())
        True
        >>> print(jnp.exp(prior.log_prob(jnp.array([1.0, 10.0]))))
        [0.5  0.25]
        >>> prior.enumerate_support().shape
        (3,)
    """

    arg_constraints = {
        "values": constraints.real_vector,
        "weights": constraints.independent(constraints.nonnegative, 1),
    }
    # NB: weights that were not given are no leaf, so that `vmap` over a batch of grids
    # does not look for an axis of theirs.
    pytree_data_fields = ("values", "_weights")
    has_enumerate_support = True

    def __init__(
        self,
        values: ArrayLike | Sequence[float],
        weights: ArrayLike | Sequence[float] | None = None,
        *,
        validate_args: bool | None = None,
    ) -> None:
        self.values = _as_parameter("values", values)
        self._weights = None if weights is None else _as_parameter("weights", weights)
        shape = self.values.shape
        if 0 in shape[-1:] or not shape:
            raise ValueError(
                "Grid: `values` must have the points on its last axis, at least one of "
                f"them, got shape {shape}; a fixed value is a grid of one point, e.g. "
                "`Grid([1.0])`."
            )
        batch_shape = shape[:-1]
        if weights is not None:
            weights_shape = self._weights.shape
            try:
                if weights_shape[-1:] != shape[-1:]:
                    raise ValueError
                batch_shape = lax.broadcast_shapes(batch_shape, weights_shape[:-1])
            except ValueError as error:
                raise ValueError(
                    f"Grid: `weights` must have one weight for each of the {shape[-1]} "
                    "points on its last axis, and leading axes that broadcast against "
                    f"those of `values` {shape}, got shape {weights_shape}; leave "
                    "`weights` out for equal ones."
                ) from error
        # By default even where NumPyro does not validate, as it does not unless asked:
        # a grid that no program can use should be refused where it is written.
        if validate_args is None:
            self.validate_args(strict=False)
        super().__init__(batch_shape, validate_args=validate_args)

    @property
    def weights(self) -> ArrayLike:
        """
        Weights as given, or ones; shape ``(*batch, G)``.
        """
        if self._weights is None:
            return np.ones(self.values.shape[-1], self.values.dtype)
        return self._weights

    def parameter_error(self) -> str | None:
        """
        Says what is wrong with the parameters: the name, the value, a way out.

        :return: the message, or None if nothing is wrong. Traced parameters pass.
        """
        values = _concrete(self.values)
        if values is not None:
            # Without x64 a large double becomes infinite.
            limit = float(jnp.finfo(_dtype(self.values)).max)
            problem = _offending(values, np.abs(values) <= limit)
            if problem is not None:
                return (
                    f"Grid: `values` must be finite in {_dtype(self.values)}, got "
                    f"{problem}; leave that point out of the grid."
                )
        weights = _concrete(self.weights)
        if weights is None:
            return None
        problem = _offending(weights, weights >= 0.0)
        if problem is not None:
            return (
                "Grid: `weights` must be finite and nonnegative, got "
                f"{problem}; for log weights pass `exp(log_weights - max)`."
            )
        empty = np.argwhere(~weights.any(-1))
        if not len(empty):
            return None
        index = tuple(map(int, empty[0]))
        return (
            "Grid: `weights` must not all be 0, got only zeros"
            + (f" at index {index}" if index else "")
            + "; leave `weights` out for equal ones."
        )

    @constraints.dependent_property(is_discrete=True, event_dim=0)
    def support(self) -> Constraint:
        return _GridPoints(self.values)

    @property
    def logits(self) -> jax.Array:
        """
        Log probabilities of the points by their position, normalised; of equal points
        each has its own. Shape ``(*batch, G)``, or ``(G,)`` without weights.
        """
        dtype = _dtype(self.values)
        weights = _concrete(self.weights)
        if weights is None:
            weights = jnp.asarray(self.weights)
            positive = weights > 0
            # The gradient of log at 0 would make that of a branch not taken NaN.
            log_weights = jnp.log(jnp.where(positive, weights, 1))
            log_weights = jnp.where(positive, log_weights, -jnp.inf)
            return jax.nn.log_softmax(log_weights, -1).astype(dtype)
        # In float64 by NumPy: no weight is too large or too small for float32.
        with np.errstate(divide="ignore"):
            log_weights = np.log(weights)
        log_weights -= log_weights.max(-1, keepdims=True)
        log_weights -= np.log(np.exp(log_weights).sum(-1, keepdims=True))
        return jnp.asarray(log_weights, dtype)

    def sample(
        self, key: jax.Array | None, sample_shape: tuple[int, ...] = ()
    ) -> jax.Array:
        """
        Draws points of the grid.

        :param jax.Array key: random key, typed or of the old kind.
        :param tuple sample_shape: shape of the independent draws.
        :return: floats of the type of ``values``, shape ``sample_shape + batch_shape``.
        """
        assert is_prng_key(key)
        noise = gumbel(key, (*self.shape(sample_shape), self.logits.shape[-1]))
        index = jnp.argmax(self.logits + noise, -1)
        return _take(_as_new(self.values), index)

    def log_prob(self, value: ArrayLike) -> jax.Array:
        """
        Log of the probability of a value.

        :param value: floats, shape ``(...)`` that broadcasts against ``batch_shape``.
        :return: natural logs, shape ``batch_shape`` broadcast with ``(...)``. Minus
            infinity off the grid.
        :raises ValueError: if ``value`` is an array of integers.
        """
        _refuse_indices(value)
        return self._log_prob(value)

    # NB: inside, for it would warn of indices before they are refused.
    @validate_sample
    def _log_prob(self, value: ArrayLike) -> jax.Array:
        return log_prob_at(value, _as_new(self.values), self.logits)

    def enumerate_support(self, expand: bool = True) -> jax.Array:
        """
        The points, in the order in which they were given. Equal ones are all listed:
        for the conditional of a site by enumeration, add :attr:`logits`, not
        :meth:`log_prob`, which counts their weights together.

        :param bool expand: whether to broadcast to ``(G, *batch_shape)``.
        :return: the points, shape ``(G, *batch_shape)``; unexpanded, the axes along
            which the points do not vary have length 1.
        """
        values = jnp.moveaxis(jnp.asarray(self.values, _dtype(self.values)), -1, 0)
        num_points, *batch = values.shape
        ones = (1,) * (len(self.batch_shape) - len(batch))
        values = values.reshape(num_points, *ones, *batch)
        if expand:
            values = jnp.broadcast_to(values, (num_points, *self.batch_shape))
        return values

    def expand(self, batch_shape: Sequence[int]) -> Distribution:
        """
        The distribution with its batch dimensions expanded.

        :param tuple batch_shape: batch shape to expand to.
        :return: a :class:`Grid` if the points vary in the batch, which NumPyro's
            :class:`~numpyro.distributions.distribution.ExpandedDistribution` cannot
            enumerate; else an instance of that.
        """
        expanded = super().expand(batch_shape)
        *batch, num_points = self.values.shape
        if expanded is self or all(size == 1 for size in batch):
            return expanded
        grid = copy.copy(self)
        grid._batch_shape = expanded.batch_shape
        xp = np if isinstance(self.values, np.ndarray) else jnp
        grid.values = xp.broadcast_to(self.values, (*grid.batch_shape, num_points))
        return grid

    @property
    def mean(self) -> jax.Array:
        """
        Mean, shape ``batch_shape``.
        """
        return (jnp.exp(self.logits) * self.values).sum(-1)

    @property
    def variance(self) -> jax.Array:
        """
        Variance, shape ``batch_shape``.
        """
        deviation = self.values - self.mean[..., None]
        return (jnp.exp(self.logits) * deviation**2).sum(-1)

    def cdf(self, value: ArrayLike) -> jax.Array:
        """
        Probability of a point that is at most the value.

        :param value: shape ``(...)`` that broadcasts against ``batch_shape``.
        :return: shape ``batch_shape`` broadcast with ``(...)``.
        """
        below = jnp.asarray(value)[..., None] >= self.values
        below |= _is_at(value, self.values)
        return jnp.where(below, jnp.exp(self.logits), 0.0).sum(-1)

    def entropy(self) -> jax.Array:
        """
        Entropy in nats, shape ``batch_shape``.
        """
        log_prob = jnp.moveaxis(self.log_prob(self.enumerate_support()), 0, -1)
        probs = jnp.exp(self.logits)
        return -(probs * jnp.where(probs > 0, log_prob, 0.0)).sum(-1)


class GridReparam(Reparam):
    """
    Makes a :class:`Grid` site a function of its index: a site ``{name}_index`` with
    a :class:`~numpyro.distributions.Categorical` distribution over ``0..G-1``, and the
    value as a deterministic site under the old name. Grids that are expanded, masked or
    made an event are taken too. A site that has a value, observed or substituted,
    stays as it is.

    To be used in the ``config`` of :class:`numpyro.handlers.reparam`; for all the grids
    of a model at once see :func:`index_grids`.
    """

    def __call__(
        self, name: str, fn: Distribution, obs: ArrayLike | None
    ) -> tuple[Distribution | None, ArrayLike | None]:
        """
        :param str name: name of the site.
        :param Distribution fn: its distribution.
        :param obs: its value, or None.
        :return: the pair (None, value), or (``fn``, ``obs``) if there is a value.
        :raises ValueError: if the distribution is no :class:`Grid`.
        """
        grid = _peel(fn)
        if not isinstance(grid, Grid):
            raise ValueError(
                f"GridReparam: site '{name}' has a {type(grid).__name__} distribution, "
                "not a Grid; take it out of the `config` of the handler, or use "
                "`index_grids(model)`, which chooses the sites."
            )
        if obs is not None:
            return fn, obs
        index = numpyro.sample(f"{name}_index", _index_distribution(fn))
        return None, _take(grid.values, index)


def index_grids(model: Callable) -> Callable:
    """
    The model with every latent :class:`Grid` site drawn by its index, see
    :class:`GridReparam`: a model whose discrete sites NumPyro can enumerate or update,
    by ``infer_discrete``, ``NUTS``, ``DiscreteGibbs`` and the like.

    Fix a site *inside*, ``index_grids(condition(model, {"alpha": 1.0}))``; outside, it
    is the site ``alpha_index`` that can be fixed.

    :param model: a NumPyro model.
    :return: a NumPyro model of the same arguments.

    **Example:**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from jax import random
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro.contrib.funsor import config_enumerate, infer_discrete
        >>> from numpyro.infer import Predictive
        >>> from numpyro_subanneal.grid import Grid, index_grids

        >>> def model(x):
        ...     with numpyro.plate("columns", x.shape[1]):
        ...         scale = numpyro.sample("scale", Grid([0.1, 1.0, 10.0]))
        ...         with numpyro.plate("rows", x.shape[0]):
        ...             numpyro.sample("x", dist.Normal(0.0, scale), obs=x)

        >>> posterior = infer_discrete(
        ...     config_enumerate(index_grids(model)),
        ...     first_available_dim=-3, rng_key=random.key(0),
        ... )
        >>> x = jnp.array([[9.0, 0.04], [-7.0, 0.03], [12.0, -0.1]])
        >>> draws = Predictive(posterior, num_samples=1)(random.key(1), x)
        >>> print(draws["scale"])
        [[10.   0.1]]
    """

    def config(site: dict) -> Reparam | None:
        return GridReparam() if isinstance(_peel(site["fn"]), Grid) else None

    return handlers.reparam(model, config=config)


def _peel(fn: Distribution) -> Distribution:
    while isinstance(fn, (ExpandedDistribution, Independent, MaskedDistribution)):
        fn = fn.base_dist
    return fn


def _index_distribution(fn: Distribution) -> Distribution:
    """
    The distribution of the index of a grid, wrapped as the grid is.
    """
    if isinstance(fn, Grid):
        # NB: a Categorical takes no infinite logits. The lowest float is as good.
        logits = jnp.maximum(fn.logits, jnp.finfo(fn.logits.dtype).min)
        return Categorical(logits=logits).expand(fn.batch_shape)
    base = _index_distribution(fn.base_dist)
    if isinstance(fn, ExpandedDistribution):
        return base.expand(fn.batch_shape)
    if isinstance(fn, Independent):
        return base.to_event(fn.reinterpreted_batch_ndims)
    return base.mask(fn._mask)


def _as_parameter(name: str, values: ArrayLike | Sequence[float]) -> ArrayLike:
    """
    The parameter as floats, or a ValueError.
    """
    try:
        concrete = all(map(not_jax_tracer, jax.tree.leaves(values)))
        # NumPy would read strings as numbers, and drop imaginary parts.
        if concrete and np.asarray(values).dtype.kind in "SUc":
            raise TypeError
        return _as_floats(values)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"Grid: `{name}` must be an array of real numbers, got "
            f"{reprlib.repr(values)}; pass e.g. `{name}=[1.0, 2.0, 4.0]`."
        ) from error


def _as_floats(values: ArrayLike | Sequence[float]) -> ArrayLike:
    if not isinstance(values, (np.ndarray, jax.Array)):
        concrete = all(map(not_jax_tracer, jax.tree.leaves(values)))
        return np.asarray(values, float) if concrete else jnp.asarray(values, float)
    if jnp.issubdtype(values.dtype, jnp.floating):
        return values
    return values.astype(float)


def _dtype(values: ArrayLike) -> np.dtype:
    """
    The float type that JAX gives the values.
    """
    return jax.dtypes.canonicalize_dtype(values.dtype)


def _as_new(values: ArrayLike) -> ArrayLike:
    """
    A NumPy array as one that JAX has not seen: it remembers arrays that were constants
    of a trace as it converted them there, with x64 on or off.
    """
    return values.view() if isinstance(values, np.ndarray) else values


@jax.jit
def _take(values: ArrayLike, index: ArrayLike) -> jax.Array:
    """
    The values ``(*batch, G)`` at indices ``(...)`` that broadcast against ``batch``.
    """
    values = jnp.asarray(values, _dtype(values))
    if values.ndim == 1:
        return values[index]
    batch_shape = lax.broadcast_shapes(values.shape[:-1], jnp.shape(index))
    values = jnp.broadcast_to(values, batch_shape + values.shape[-1:])
    index = jnp.broadcast_to(index, batch_shape)
    return jnp.take_along_axis(values, index[..., None], -1)[..., 0]


def _refuse_indices(value: ArrayLike) -> None:
    dtype = getattr(value, "dtype", None)
    if dtype is not None and jnp.ndim(value) and not jnp.issubdtype(dtype, jnp.inexact):
        raise ValueError(
            f"Grid: a value must be a float, got an array of dtype {dtype}, which may "
            "be the indices by which NumPyro enumerates a discrete site; enumerate "
            "`index_grids(model)` instead of `model`. If they are values, convert them "
            "by `astype(float)`."
        )


@jax.jit
def log_prob_at(value: ArrayLike, values: ArrayLike, logits: jax.Array) -> jax.Array:
    """
    Log probability of values under grids.

    :param value: shape ``(...)``.
    :param values: points, shape ``(*batch, G)``.
    :param logits: log probabilities of the points by their position, likewise.
    """
    terms = jnp.where(_is_at(value, values), logits, -jnp.inf)
    return jax.nn.logsumexp(terms, -1)


def _is_at(value: ArrayLike, values: ArrayLike) -> ArrayLike:
    """
    At which points of a grid a value lies.

    :param value: shape ``(...)`` that broadcasts against ``batch``.
    :param values: points, shape ``(*batch, G)``.
    :return: booleans, shape ``(..., G)``: equal points are all true, or all false.
    """
    # By NumPy where all is concrete, for validation within a traced program.
    is_jax = isinstance(value, jax.Array) or isinstance(values, jax.Array)
    xp = jnp if is_jax else np
    dtypes = [_dtype(_as_floats(x)) for x in (value, values)]
    dtype = min(dtypes, key=lambda dtype: jnp.finfo(dtype).bits)
    with np.errstate(all="ignore"):
        value = xp.asarray(value).astype(dtype)[..., None]
        values = xp.asarray(values).astype(dtype)
        distance = abs(value - values)
        nearest = distance.argmin(-1, keepdims=True)
        point = xp.broadcast_to(values, distance.shape)
        point = xp.take_along_axis(point, nearest, -1)
        # NB: a compiler may compute `values` twice, with other last digits, so that not
        # even the nearest point would be equal to itself.
        is_point = (values == point) | (xp.arange(values.shape[-1]) == nearest)
        gap = xp.where(is_point, np.inf, distance).min(-1, keepdims=True)
        gap = xp.where(xp.isinf(gap), abs(point), gap)
        rounding = _UNITS_IN_LAST_PLACE * float(jnp.finfo(dtype).eps) * abs(point)
        tolerance = xp.maximum(_PART_OF_GAP * gap, xp.minimum(rounding, gap / 4))
        # NB: false for NaN, and for infinite values.
        return is_point & (distance.min(-1, keepdims=True) <= tolerance)
