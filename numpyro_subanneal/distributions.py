# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

r"""
Priors over partitions of rows, as NumPyro distributions over label vectors.

A draw is a vector of ``size`` integer labels, one a row; rows with equal labels share
a cluster. The labels are only names: the laws here depend on the partition alone, so
:meth:`log_prob` takes any labels, while :meth:`sample` names the clusters
0, 1, 2, ... in order of first appearance. The label -1 says that a row is not
assigned (it is out of the subsample); such rows are left out of the partition.

Shapes: ``N`` rows, ``K`` clusters (or slots for clusters, some of them empty).
"""

from abc import ABCMeta, abstractmethod
from functools import partial
import math
from typing import final

import jax
from jax import lax, random
import jax.numpy as jnp
from jax.scipy.special import gammaln
from jax.typing import ArrayLike
import numpy as np

from numpyro.distributions import Distribution, constraints
from numpyro.distributions.util import promote_shapes, validate_sample
from numpyro.util import is_prng_key, not_jax_tracer

__all__ = [
    "ChineseRestaurantProcess",
    "PartitionDistribution",
    "PitmanYorProcess",
]


class _PartitionMeta(type(Distribution), ABCMeta):
    pass


class PartitionDistribution(Distribution, metaclass=_PartitionMeta):
    r"""
    Abstract base of exchangeable partition priors; what the Gibbs kernel asks of one.

    The kernel works with priors of Gibbs type (Gnedin and Pitman, 2006), for which a
    row joins a cluster with a weight that depends on the size of that cluster alone,
    and opens a new one with a weight that depends on how many clusters and rows
    there are. Both weights may be scaled by a common factor, which the kernel
    divides out when it normalises over the clusters.

    ``batch_shape`` is the shape of the parameters broadcast against each other and
    ``event_shape`` is ``(size,)``. Every method but :meth:`parameter_error` works
    with traced parameters.

    A subclass defines the abstract methods and :meth:`sample`, and passes its size
    and batch shape to this ``__init__`` after it has set its parameters, which are
    named by ``arg_constraints``.

    :param int size: number of rows, a nonnegative Python or NumPy integer.
    :param tuple batch_shape: shape of the parameters broadcast against each other.
    :param bool validate_args: whether to check the parameters and the values given
        to :meth:`log_prob`; by default as :func:`numpyro.enable_validation` says.
    :raises ValueError: if ``size`` is not a nonnegative integer (always), or a concrete
        parameter is out of range (under validation).

    **References:**

    1. Pitman, J. (1995). *Exchangeable and partially exchangeable random
       partitions*. Probability Theory and Related Fields 102.
    2. Gnedin, A. and Pitman, J. (2006). *Exchangeable Gibbs partitions and Stirling
       triangles*. Journal of Mathematical Sciences 138.
    3. Pitman, J. (2006). *Combinatorial Stochastic Processes*. Springer.
    4. De Blasi, P., Favaro, S., Lijoi, A., Mena, R. H., Prünster, I. and Ruggiero, M.
       (2015). *Are Gibbs-type priors the most natural generalization of the
       Dirichlet process?* IEEE TPAMI 37.
    """

    support = constraints.independent(constraints.integer_greater_than(-1), 1)

    def __init__(
        self,
        size: int,
        batch_shape: tuple[int, ...] = (),
        *,
        validate_args: bool | None = None,
    ) -> None:
        is_integer = isinstance(size, (int, np.integer)) and not isinstance(size, bool)
        # Labels are int32, so that is also the bound on the number of rows.
        if not is_integer or not 0 <= size < 2**31:
            raise ValueError(
                f"{type(self).__name__}: `size` must be a nonnegative Python or NumPy "
                f"integer below 2**31, got {size!r}; pass the number of rows, e.g. "
                "`size=x.shape[0]`."
            )
        super().__init__(batch_shape, (int(size),), validate_args=validate_args)

    @property
    def size(self) -> int:
        """
        Number of rows, ``N``.
        """
        return self.event_shape[0]

    def validate_args(self, strict: bool = True) -> None:
        """
        Checks the concrete parameters; see :meth:`parameter_error`.

        :param bool strict: also refuse parameters that are traced and so cannot be
            checked.
        :raises ValueError: if a concrete parameter is out of range.
        :raises RuntimeError: if ``strict`` and a parameter is traced.
        """
        message = self.parameter_error()
        if message is not None:
            raise ValueError(message)
        if strict and not all(map(not_jax_tracer, self.get_args().values())):
            raise RuntimeError("Cannot validate arguments inside jitted code.")

    @abstractmethod
    def parameter_error(self) -> str | None:
        """
        Says what is wrong with the parameters: the name, the value, a way out.

        :return: the message, or None if nothing is wrong. Traced parameters pass.
        """

    @abstractmethod
    def log_weight_existing(self, counts: ArrayLike) -> jax.Array:
        """
        Log of the unnormalised weight with which a row joins each cluster.

        :param counts: sizes of the clusters, the row itself not counted, shape
            ``(..., K)``. The leading axes broadcast against ``batch_shape``; with
            ``batch_shape == ()`` any shape will do.
        :return: natural logs, shape ``batch_shape`` broadcast with ``(...)``, then
            ``(K,)``. Minus infinity where the count is zero.
        """

    @abstractmethod
    def log_weight_new(self, num_clusters: ArrayLike, num_rows: ArrayLike) -> jax.Array:
        """
        Log of the unnormalised weight with which a row opens a new cluster, on the
        scale of :meth:`log_weight_existing`.

        :param num_clusters: occupied clusters, the row itself not counted; broadcasts
            against ``batch_shape``.
        :param num_rows: rows in those clusters, likewise.
        :return: natural logs, shape ``batch_shape`` broadcast with the arguments.
            Zero where there are no clusters: the first row has no choice.
        """

    @abstractmethod
    def log_eppf(self, counts: ArrayLike, axis: int = -1) -> jax.Array:
        """
        Log of the exchangeable partition probability function: the probability of any
        one partition of the rows with these cluster sizes.

        :param counts: cluster sizes, zero for an empty slot; the clusters lie along
            ``axis`` and the other axes broadcast against ``batch_shape``.
        :param int axis: the axis of the clusters.
        :return: natural logs, shape ``batch_shape`` broadcast with the shape of
            ``counts`` less ``axis``. Zero if there are no rows.
        """

    @abstractmethod
    def log_prob(self, value: ArrayLike) -> jax.Array:
        """
        Log of the probability of the partition of the assigned rows.

        :param value: integer labels, shape ``(..., size)``: any non-negative names of
            clusters in any order, -1 for a row that is not assigned. The leading
            axes broadcast against ``batch_shape``.
        :return: natural logs, shape ``batch_shape`` broadcast with ``(...)``. Zero if
            no row is assigned.
        :raises ValueError: if the last axis is not of length ``size``.
        """


@final
class PitmanYorProcess(PartitionDistribution):
    r"""
    Partition of ``size`` rows under the two-parameter Pitman-Yor process.

    With :math:`\theta` the concentration and :math:`d` the discount, a partition into
    :math:`K` clusters of sizes :math:`n_1, \dots, n_K` that sum to :math:`N` has
    probability (Pitman, 1995, Proposition 9; Pitman, 2006, Theorem 3.2)

    .. math::

        p(n_1, \dots, n_K) =
        \frac{\prod_{k=1}^{K-1} (\theta + k d)}{\prod_{i=1}^{N-1} (\theta + i)}
        \prod_{k=1}^{K} \prod_{j=1}^{n_k-1} (j - d).

    Row by row: row :math:`i` (from zero) joins a cluster of :math:`n_k` earlier rows
    with probability :math:`(n_k - d) / (\theta + i)`, and opens a new one with
    probability :math:`(\theta + d K) / (\theta + i)`. The number of clusters grows
    like :math:`N^d`; at :math:`d = 0` it is the :class:`ChineseRestaurantProcess`.

    :param concentration: :math:`\theta > -d`; negative values are allowed.
    :param discount: :math:`0 \le d < 1`.
    :param int size: number of rows, a nonnegative Python or NumPy integer.
    :param bool validate_args: whether to check the parameters and the values given
        to :meth:`log_prob`; by default as :func:`numpyro.enable_validation` says.
    :raises ValueError: if ``size`` is not a nonnegative integer (always), or a concrete
        parameter is out of range or not finite (under validation).

    .. note:: :meth:`sample` flips coins of 32 bits: in float32 the probability that a
        row opens a cluster is right to :math:`2^{-32}` or, if that is more, to
        :math:`2^{-22}` of itself.

    **Example:**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from jax import random
        >>> from numpyro_subanneal.distributions import PitmanYorProcess
        >>> prior = PitmanYorProcess(concentration=1.0, discount=0.25, size=4)
        >>> prior.sample(random.key(0), (2,)).shape
        (2, 4)
        >>> # Two pairs: (1 + 0.25) (1 - 0.25)**2 / (2 * 3 * 4).
        >>> print(f"{jnp.exp(prior.log_prob(jnp.array([7, 7, 3, 3]))):.5f}")
        0.02930

    **References:**

    1. Pitman, J. (1995). *Exchangeable and partially exchangeable random
       partitions*. Probability Theory and Related Fields 102.
    2. Pitman, J. and Yor, M. (1997). *The two-parameter Poisson-Dirichlet distribution
       derived from a stable subordinator*. Annals of Probability 25.
    3. Pitman, J. (2006). *Combinatorial Stochastic Processes*. Springer.
    """

    arg_constraints = {
        # NB: the true bounds, concentration > -discount and discount < 1, are those of
        # `parameter_error`; NumPyro has no constraint for either.
        "concentration": constraints.dependent(is_discrete=False, event_dim=0),
        "discount": constraints.unit_interval,
    }

    def __init__(
        self,
        concentration: ArrayLike,
        discount: ArrayLike,
        size: int,
        *,
        validate_args: bool | None = None,
    ) -> None:
        batch_shape = lax.broadcast_shapes(
            jnp.shape(concentration), jnp.shape(discount)
        )
        self.concentration, self.discount = promote_shapes(concentration, discount)
        super().__init__(size, batch_shape, validate_args=validate_args)

    def parameter_error(self) -> str | None:
        discount = _concrete(self.discount)
        if discount is not None:
            problem = _offending(discount, (discount >= 0.0) & (discount < 1.0))
            if problem is not None:
                return (
                    f"PitmanYorProcess: `discount` must lie in [0, 1), got {problem}; "
                    "a discount of 0 gives the ChineseRestaurantProcess."
                )
        concentration = _concrete(self.concentration)
        if concentration is None:
            return None
        # With a traced discount what is left to check is the widest bound.
        lower = np.asarray(-1.0) if discount is None else -discount
        problem = _offending(concentration, concentration > lower)
        if problem is None:
            return None
        bound = "-1" if discount is None else "-`discount`"
        if discount is not None and discount.ndim == 0:
            bound += f" = {-discount:.6g}"
        return (
            f"PitmanYorProcess: `concentration` must be finite and greater than "
            f"{bound}, got {problem}; a positive value is valid with every discount."
        )

    def log_weight_existing(self, counts: ArrayLike) -> jax.Array:
        return _log_weight_existing(counts, self.concentration, self.discount)

    def log_weight_new(self, num_clusters: ArrayLike, num_rows: ArrayLike) -> jax.Array:
        return _log_weight_new(
            num_clusters, num_rows, self.concentration, self.discount
        )

    def log_eppf(self, counts: ArrayLike, axis: int = -1) -> jax.Array:
        return _log_eppf(counts, self.concentration, self.discount, axis=axis)

    def sample(
        self, key: jax.Array | None, sample_shape: tuple[int, ...] = ()
    ) -> jax.Array:
        """
        Draws label vectors, clusters named in order of first appearance.

        :param jax.Array key: random key, typed or of the old kind.
        :param tuple sample_shape: shape of the independent draws.
        :return: int32 labels, shape ``sample_shape + batch_shape + (size,)``.
        """
        assert is_prng_key(key)
        shape = self.shape(sample_shape)
        return _sample_labels(key, self.concentration, self.discount, shape=shape)

    @validate_sample
    def log_prob(self, value: ArrayLike) -> jax.Array:
        labels = _as_labels(self, value)
        return _log_prob_labels(labels, self.concentration, self.discount)


@final
class ChineseRestaurantProcess(PartitionDistribution):
    r"""
    Partition of ``size`` rows under the Dirichlet process.

    With :math:`\alpha` the concentration, a partition into :math:`K` clusters of sizes
    :math:`n_1, \dots, n_K` that sum to :math:`N` has probability (Ewens, 1972)

    .. math::

        p(n_1, \dots, n_K) = \frac{\alpha^{K-1}}{\prod_{i=1}^{N-1} (\alpha + i)}
        \prod_{k=1}^{K} (n_k - 1)!.

    Row by row (Obermeyer et al., 2014, Section 2.1): a row joins a cluster with weight
    the number of earlier rows in it, and opens a new one with weight :math:`\alpha`.
    The number of clusters grows like :math:`\alpha \log N`.

    :param concentration: :math:`\alpha > 0`.
    :param int size: number of rows, a nonnegative Python or NumPy integer.
    :param bool validate_args: whether to check the parameters and the values given
        to :meth:`log_prob`; by default as :func:`numpyro.enable_validation` says.
    :raises ValueError: if ``size`` is not a nonnegative integer (always), or a concrete
        concentration is not positive and finite (under validation).

    **Example:**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from jax import random
        >>> from numpyro_subanneal.distributions import ChineseRestaurantProcess
        >>> prior = ChineseRestaurantProcess(concentration=1.0, size=4)
        >>> prior.sample(random.key(0), (2,)).shape
        (2, 4)
        >>> # Two pairs: 1! 1! / (2 * 3 * 4).
        >>> print(f"{jnp.exp(prior.log_prob(jnp.array([7, 7, 3, 3]))):.5f}")
        0.04167

    **References:**

    1. Ewens, W. J. (1972). *The sampling theory of selectively neutral alleles*.
       Theoretical Population Biology 3.
    2. Obermeyer, F., Glidden, J. and Jonas, E. (2014). *Scaling nonparametric Bayesian
       inference via subsample-annealing*. AISTATS.
    """

    arg_constraints = {"concentration": constraints.positive}

    def __init__(
        self,
        concentration: ArrayLike,
        size: int,
        *,
        validate_args: bool | None = None,
    ) -> None:
        self.concentration = concentration
        super().__init__(size, jnp.shape(concentration), validate_args=validate_args)

    def parameter_error(self) -> str | None:
        concentration = _concrete(self.concentration)
        if concentration is None:
            return None
        problem = _offending(concentration, concentration > 0.0)
        if problem is None:
            return None
        return (
            "ChineseRestaurantProcess: `concentration` must be finite and greater than "
            f"0, got {problem}; PitmanYorProcess allows values down to -`discount`."
        )

    def log_weight_existing(self, counts: ArrayLike) -> jax.Array:
        return _log_weight_existing(counts, self.concentration, 0.0)

    def log_weight_new(self, num_clusters: ArrayLike, num_rows: ArrayLike) -> jax.Array:
        return _log_weight_new(num_clusters, num_rows, self.concentration, 0.0)

    def log_eppf(self, counts: ArrayLike, axis: int = -1) -> jax.Array:
        return _log_eppf(counts, self.concentration, 0.0, axis=axis)

    def sample(
        self, key: jax.Array | None, sample_shape: tuple[int, ...] = ()
    ) -> jax.Array:
        """
        Draws label vectors, clusters named in order of first appearance.

        :param jax.Array key: random key, typed or of the old kind.
        :param tuple sample_shape: shape of the independent draws.
        :return: int32 labels, shape ``sample_shape + batch_shape + (size,)``.
        """
        assert is_prng_key(key)
        shape = self.shape(sample_shape)
        return _sample_labels(key, self.concentration, 0.0, shape=shape)

    @validate_sample
    def log_prob(self, value: ArrayLike) -> jax.Array:
        labels = _as_labels(self, value)
        return _log_prob_labels(labels, self.concentration, 0.0)


# Checks of concrete values.


def _concrete(parameter: ArrayLike) -> np.ndarray | None:
    """
    The parameter in float64, or None if it is traced.
    """
    if not_jax_tracer(parameter):
        return np.asarray(parameter, dtype=np.float64)
    return None


def _offending(values: np.ndarray, in_range: np.ndarray) -> str | None:
    """
    Words for the first value that is out of range or not finite, or None.
    """
    values, in_range = np.broadcast_arrays(values, in_range)
    offenders = np.argwhere(~(in_range & np.isfinite(values)))
    if not len(offenders):
        return None
    index = tuple(map(int, offenders[0]))
    return f"{values[index]:.6g}" + (f" at index {index}" if index else "")


def _as_labels(prior: PartitionDistribution, value: ArrayLike) -> jax.Array:
    """
    The labels as an array, their last axis checked against the size.
    """
    if jnp.shape(value)[-1:] != prior.event_shape:
        raise ValueError(
            f"{type(prior).__name__}: a value has one label a row, that is shape "
            f"(..., {prior.size}), got {jnp.shape(value)}; label the rows that are not "
            "assigned -1."
        )
    # NB: without x64 JAX would wrap 64-bit labels around to 32 bits, and so merge
    # clusters or unassign rows; what matters of a label is only which rows share it.
    if isinstance(value, np.ndarray) and value.max(initial=0) >= 2**31:
        names, index = np.unique(value, return_inverse=True)
        value = index.reshape(value.shape) - np.sum(names < 0)
    return jnp.asarray(value)


# The two-parameter law. Functions of arrays; discount 0 is the Dirichlet process.


def _float_parameters(
    concentration: ArrayLike, discount: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """
    The parameters as floats of one type, of at least 32 bits.
    """
    dtype = jnp.result_type(concentration, discount, float)
    dtype = jnp.promote_types(dtype, jnp.float32)
    return jnp.asarray(concentration, dtype), jnp.asarray(discount, dtype)


def _log_weight_existing(
    counts: ArrayLike, concentration: ArrayLike, discount: ArrayLike
) -> jax.Array:
    concentration, discount = _float_parameters(concentration, discount)
    counts = jnp.asarray(counts)
    batch_shape = jnp.broadcast_shapes(concentration.shape, discount.shape)
    if batch_shape:
        discount = jnp.broadcast_to(discount, batch_shape)[..., None]
    occupied = counts > 0
    weight = jnp.where(occupied, counts - discount, 1.0)
    return jnp.where(occupied, jnp.log(weight), -jnp.inf)


def _log_weight_new(
    num_clusters: ArrayLike,
    num_rows: ArrayLike,
    concentration: ArrayLike,
    discount: ArrayLike,
) -> jax.Array:
    concentration, discount = _float_parameters(concentration, discount)
    num_clusters, _ = jnp.broadcast_arrays(num_clusters, num_rows)
    weight = concentration + discount * num_clusters
    # The first row opens a cluster whatever the concentration, which may be negative.
    return jnp.log(jnp.where(num_clusters > 0, weight, 1.0))


def _log_ratio(
    numerator: jax.Array, denominator: jax.Array, gap: jax.Array
) -> jax.Array:
    """
    Log of ``numerator / denominator``, exact to rounding also when it is close to
    zero, for positive arguments and ``gap = denominator - numerator``, which the
    caller knows without cancellation.
    """
    near = gap < 0.5 * denominator
    # Either branch gets harmless arguments where the other is taken, for its gradient.
    far_log = jnp.log(jnp.where(near, denominator, numerator) / denominator)
    near_log = jnp.log1p(-jnp.where(near, gap, 0.0) / denominator)
    return jnp.where(near, near_log, far_log)


def _stirling_remainder(x: jax.Array) -> jax.Array:
    """
    Binet's function: ``gammaln(x)`` less ``(x - 1/2) log(x) - x + log(2 pi) / 2``, for
    positive ``x``.
    """
    # From 10 on seven terms of the asymptotic series are exact to float64 rounding.
    large = x >= 10.0
    x_large = jnp.where(large, x, 10.0)
    x_small = jnp.where(large, 10.0, x)
    bernoulli = (
        1 / 12,
        -1 / 360,
        1 / 1260,
        -1 / 1680,
        1 / 1188,
        -691 / 360360,
        1 / 156,
    )
    inverse_square = 1.0 / (x_large * x_large)
    series = jnp.zeros_like(x_large)
    for coefficient in reversed(bernoulli):
        series = series * inverse_square + coefficient
    series = series / x_large
    leading = (x_small - 0.5) * jnp.log(x_small) - x_small + 0.5 * np.log(2 * np.pi)
    return jnp.where(large, series, gammaln(x_small) - leading)


@partial(jax.jit, static_argnames=("axis",))
def _log_eppf(
    counts: ArrayLike, concentration: ArrayLike, discount: ArrayLike, *, axis: int = -1
) -> jax.Array:
    """
    Two-parameter EPPF from cluster sizes; see :class:`PitmanYorProcess`.

    The gamma functions of a million rows are of order 1e7 and often cancel to the last
    few units, which float32 cannot follow. So the factors of the denominator are
    split into the first K - 1 and the rest,

        [prod_{k<K} (c + k d) / (c + k)] [prod_k (1 - d)_{n_k - 1} / (c + K)_{N - K}],

    where neither bracket exceeds one (nothing cancels between them), the first is
    multiplied out, and the second takes Stirling's formula apart so that its large
    terms meet inside one logarithm.
    """
    concentration, discount = _float_parameters(concentration, discount)
    concentration, discount = concentration[..., None], discount[..., None]
    dtype = concentration.dtype
    counts = jnp.moveaxis(jnp.asarray(counts), axis, -1)
    num_rows = counts.sum(-1, keepdims=True)
    num_clusters = (counts > 0).sum(-1, keepdims=True)

    # First bracket; the gap to one of each factor is k (1 - d) / (c + k).
    k = jnp.arange(1, counts.shape[-1])
    used = k < num_clusters
    numerator = jnp.where(used, concentration + k * discount, 1.0)
    denominator = jnp.where(used, concentration + k, 1.0)
    gap = jnp.where(used, k * (1.0 - discount), 0.0)
    log_new = _log_ratio(numerator, denominator, gap).sum(-1)

    # Second bracket: log (a)_m = m log(a + m) + (a - 1/2) log(1 + m / a) - m
    # + remainder(a + m) - remainder(a), and the lone m cancel as they sum to N - K.
    a = 1.0 - discount
    m = jnp.where(counts > 0, counts - 1, 0).astype(dtype)
    b = concentration + jnp.maximum(num_clusters, 1)
    rest = (num_rows - num_clusters).astype(dtype)
    gap = (num_rows - counts).astype(dtype) + (concentration + discount)
    gap = jnp.where(counts > 0, gap, 0.0)

    def log_rising(start, length):
        remainder = _stirling_remainder(start + length) - _stirling_remainder(start)
        return (start - 0.5) * jnp.log1p(length / start) + remainder

    log_old = (m * _log_ratio(a + m, b + rest, gap) + log_rising(a, m)).sum(-1)
    return log_new + log_old - log_rising(b, rest)[..., 0]


@jax.jit
def _log_prob_labels(
    labels: jax.Array, concentration: ArrayLike, discount: ArrayLike
) -> jax.Array:
    """
    Log probability of the partition that labels of shape ``(..., N)`` stand for.

    Rows are exchangeable, so they may be seated in the order of their labels: then
    each row finds its cluster just before it, and its predictive probability follows
    from its place in the run of equal labels. Every factor is at most one, so the
    sum of the logs has no cancellation, as gamma functions would have.
    """
    concentration, discount = _float_parameters(concentration, discount)
    concentration, discount = concentration[..., None], discount[..., None]
    # NB: XLA would spend tens of seconds on folding the sums over a million labels that
    # are constants of the program, as labels that a model closes over are.
    labels = jnp.sort(lax.optimization_barrier(labels), axis=-1)
    place = jnp.arange(labels.shape[-1])
    assigned = labels >= 0
    first = jnp.ones_like(assigned[..., :1])
    changes = jnp.concatenate([first, labels[..., 1:] != labels[..., :-1]], axis=-1)
    opens = assigned & changes
    run_start = lax.cummax(jnp.where(opens, place, 0), axis=labels.ndim - 1)
    # What the row finds: rows in its cluster, clusters, rows in all.
    others = place - run_start
    num_clusters = jnp.cumsum(opens, axis=-1) - 1
    num_rows = place - jnp.sum(~assigned, axis=-1, keepdims=True)

    weight = jnp.where(
        opens, concentration + discount * num_clusters, others - discount
    )
    gap = jnp.where(
        opens,
        (num_rows - num_clusters) + (1.0 - discount) * num_clusters,
        (num_rows - others) + (concentration + discount),
    )
    # The first row has no choice, whatever the concentration.
    counted = assigned & (num_rows > 0)
    weight = jnp.where(counted, weight, 1.0)
    total = jnp.where(counted, concentration + num_rows, 1.0)
    gap = jnp.where(counted, gap, 0.0)
    return _log_ratio(weight, total, gap).sum(-1)


@partial(jax.jit, static_argnames=("shape",))
def _sample_labels(
    key: jax.Array, concentration: ArrayLike, discount: ArrayLike, *, shape: tuple
) -> jax.Array:
    r"""
    Draws labels of the given shape, rows on the last axis.

    An urn over the earlier rows in place of the clusters, so that a row costs O(1)
    draws. Every row weighs 1, of which, if it opened its cluster, a part d leads to a
    new cluster and 1 - d to its own; c more leads to a new cluster. So a cluster of n
    rows has weight n - d and a new one c + d K. If c is negative, it is taken from the
    share d of row 0, which then weighs 1 + c.

    Which row each row drew does not depend on what the others did, so the draws are
    made at once, and what is left, whether a row opens a cluster and which one it
    joins, is followed along chains of rows by pointer doubling. Their length is of
    order log N: on a million rows some five rounds of gathers.
    """
    concentration, discount = _float_parameters(concentration, discount)
    # One flat axis of draws: XLA takes eight times longer to compile gathers over four.
    *batch, num_rows = shape
    flat_shape = (math.prod(batch), num_rows)
    concentration = jnp.broadcast_to(concentration, batch).reshape(-1, 1)
    discount = jnp.broadcast_to(discount, batch).reshape(-1, 1)
    key_coins, key_row = random.split(key)
    # NB: coins of 32 bits, as the 23 of a float32 uniform are too few for the rare
    # openings of a small concentration (0.1 cluster too many in a million rows).
    coins = random.bits(key_coins, (2, *flat_shape), dtype=jnp.uint32)
    coin_kind, coin_share = coins.astype(concentration.dtype) * 2.0**-32
    row = jnp.arange(num_rows, dtype=jnp.int32)

    # Kind of the draw: from c (or if that is negative, from row 0), or from a row
    # that is picked uniformly.
    negative = concentration < 0.0
    own_weight = jnp.where(negative, 1.0 + concentration, concentration)
    lowest = jnp.where(negative, 1, 0).astype(jnp.int32)
    total = jnp.where(row > 0, concentration + row, 1.0)
    special = (row <= lowest) | (coin_kind < own_weight / total)
    # NB: not floor(uniform * row), as a float32 has too few bits for a million rows.
    picked = random.randint(
        key_row, flat_shape, lowest, jnp.maximum(row, lowest + 1), dtype=jnp.int32
    )
    picked = jnp.where(special, 0, picked)
    first_share = (concentration + discount) / jnp.where(negative, own_weight, 1.0)
    share = jnp.where(negative & special, first_share, discount)
    takes_share = coin_share < share

    # A row opens a cluster if `opens`, or if `may_open` and the row it points to does.
    opens = (row == 0) | (special & ~negative)
    may_open = takes_share & ~opens

    def follow_openings(state):
        opens, may_open, pointer = state
        opens = opens | (may_open & _take(opens, pointer))
        may_open = may_open & _take(may_open, pointer)
        return opens, may_open & ~opens, _take(pointer, pointer)

    opens, _, _ = lax.while_loop(
        lambda state: state[1].any(), follow_openings, (opens, may_open, picked)
    )

    def follow_pointers(state):
        pointer, _ = state
        further = _take(pointer, pointer)
        return further, (further != pointer).any()

    pointer = jnp.where(opens, row, picked)
    pointer, _ = lax.while_loop(
        lambda state: state[1], follow_pointers, (pointer, jnp.asarray(True))
    )
    names = jnp.cumsum(opens, axis=-1, dtype=jnp.int32) - 1
    return _take(names, pointer).reshape(shape)


def _take(values: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take_along_axis(values, index, axis=-1, mode="promise_in_bounds")
