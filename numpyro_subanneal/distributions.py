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
from typing import Any, final

import jax
from jax import lax, random
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from numpyro.distributions import Distribution, constraints
from numpyro.distributions.util import promote_shapes, validate_sample
from numpyro.util import is_prng_key, not_jax_tracer

from numpyro_subanneal.conjugate.base import loggamma
from numpyro_subanneal.conjugate.special import (
    log1p_nonnegative,
    log1p_of,
    stirling_remainder,
)

__all__ = [
    "ChineseRestaurantProcess",
    "FiniteDirichletMixture",
    "MixtureOfFiniteMixtures",
    "PartitionDistribution",
    "PitmanYorProcess",
]


class _PartitionMeta(type(Distribution), ABCMeta):
    pass


class CheckedParameters:
    """
    Part of a distribution whose own `parameter_error` checks its parameters, beyond
    what NumPyro's constraints can say.
    """

    @classmethod
    def gather_pytree_data_fields(cls) -> tuple[str, ...]:
        # NumPyro's are in the order of a set of strings, another in each process. Then
        # so would be the program's arguments, and JAX's persistent cache would miss.
        return tuple(sorted(super().gather_pytree_data_fields()))

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
        if strict and not all(map(not_jax_tracer, jax.tree.leaves(self))):
            raise RuntimeError("Cannot validate arguments inside jitted code.")


class PartitionDistribution(CheckedParameters, Distribution, metaclass=_PartitionMeta):
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

    def log_eppf_of_parameters(self, counts: ArrayLike, axis: int = -1) -> jax.Array:
        """
        :meth:`log_eppf` less what depends on the cluster sizes alone: a few units,
        however many rows there are, so that differences between parameters keep their
        digits. A subclass that does not override it gets :meth:`log_eppf` itself.

        :param counts: as of :meth:`log_eppf`.
        :param int axis: the axis of the clusters.
        :return: natural logs, the shape that :meth:`log_eppf` gives.
        """
        return self.log_eppf(counts, axis)

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
        _check_numbers(self, concentration=concentration, discount=discount)
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

    def log_eppf_of_parameters(self, counts: ArrayLike, axis: int = -1) -> jax.Array:
        return _log_eppf(
            counts, self.concentration, self.discount, axis=axis, relative=True
        )

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
    :math:`n_1, \dots, n_K` that sum to :math:`N` has probability (equivalent to
    the sampling formula of Ewens, 1972)

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
        _check_numbers(self, concentration=concentration)
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

    def log_eppf_of_parameters(self, counts: ArrayLike, axis: int = -1) -> jax.Array:
        return _log_eppf(counts, self.concentration, 0.0, axis=axis, relative=True)

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


@final
class FiniteDirichletMixture(PartitionDistribution):
    r"""
    Partition of ``size`` rows under a mixture of a known number of components.

    With :math:`\gamma` the concentration and :math:`K` the number of components, the
    weights are symmetric Dirichlet(:math:`\gamma, \dots, \gamma`) and each row takes a
    component by them. A partition into :math:`t \le K` clusters of sizes
    :math:`n_1, \dots, n_t` that sum to :math:`N` has probability (Pitman, 2006,
    Section 3.2, the case of negative discount; Green and Richardson, 2001)

    .. math::

        p(n_1, \dots, n_t) = \frac{K!}{(K - t)!}
        \frac{\Gamma(K \gamma)}{\Gamma(N + K \gamma)}
        \prod_{j=1}^{t} \frac{\Gamma(n_j + \gamma)}{\Gamma(\gamma)},

    which is the law of :class:`PitmanYorProcess` continued to the discount
    :math:`-\gamma` and the concentration :math:`K \gamma`. A partition into more than
    :math:`K` clusters has probability zero.

    Row by row: row :math:`i` (from zero) joins a cluster of :math:`n_j` earlier rows
    with probability :math:`(n_j + \gamma) / (K \gamma + i)`, and opens a new one with
    probability :math:`(K - t) \gamma / (K \gamma + i)`.

    :param concentration: :math:`\gamma > 0`, *of each component*. Most components stay
        empty in the sparse form ``concentration=alpha / num_components``, which tends
        to the :class:`ChineseRestaurantProcess` of concentration ``alpha``.
    :param int num_components: :math:`K`, a positive Python or NumPy integer.
    :param int size: number of rows, a nonnegative Python or NumPy integer.
    :param bool validate_args: whether to check the parameters and the values given
        to :meth:`log_prob`; by default as :func:`numpyro.enable_validation` says.
    :raises ValueError: if ``num_components`` is not a positive integer or ``size`` not
        a nonnegative one (always), or a concrete concentration is out of range or not
        finite (under validation).

    .. note:: :meth:`sample` flips coins of 32 bits: in float32 the probability of a
        component is right to :math:`2^{-32}` or, if that is more, to :math:`2^{-20}`
        of itself.

    **Example:**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_subanneal.distributions import FiniteDirichletMixture
        >>> prior = FiniteDirichletMixture(concentration=1.0, num_components=3, size=4)
        >>> # Two pairs: 3 * 2 * (2!)**2 / (3 * 4 * 5 * 6).
        >>> print(f"{jnp.exp(prior.log_prob(jnp.array([7, 7, 1, 1]))):.5f}")
        0.06667

    **References:**

    1. Green, P. J. and Richardson, S. (2001). *Modelling heterogeneity with and without
       the Dirichlet process*. Scandinavian Journal of Statistics 28.
    2. Pitman, J. (2006). *Combinatorial Stochastic Processes*. Springer.
    """

    arg_constraints = {"concentration": constraints.positive}
    pytree_aux_fields = ("num_components",)

    def __init__(
        self,
        concentration: ArrayLike,
        num_components: int,
        size: int,
        *,
        validate_args: bool | None = None,
    ) -> None:
        _check_numbers(self, concentration=concentration)
        self.concentration = concentration
        self.num_components = _positive_integer(
            type(self).__name__, "num_components", num_components, "of components"
        )
        super().__init__(size, jnp.shape(concentration), validate_args=validate_args)

    def parameter_error(self) -> str | None:
        return _component_concentration_error(self)

    def log_weight_existing(self, counts: ArrayLike) -> jax.Array:
        _, discount = self._two_parameters()
        return _log_weight_existing(counts, 0.0, discount)

    def log_weight_new(self, num_clusters: ArrayLike, num_rows: ArrayLike) -> jax.Array:
        return _log_weight_new(
            num_clusters, num_rows, *self._two_parameters(), self.num_components
        )

    def log_eppf(self, counts: ArrayLike, axis: int = -1) -> jax.Array:
        return _log_eppf(
            counts, *self._two_parameters(), self.num_components, axis=axis
        )

    def log_eppf_of_parameters(self, counts: ArrayLike, axis: int = -1) -> jax.Array:
        return _log_eppf(
            counts,
            *self._two_parameters(),
            self.num_components,
            axis=axis,
            relative=True,
        )

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
        return _sample_finite(
            key,
            self.concentration,
            self.num_components,
            max_components=self.num_components,
            shape=self.shape(sample_shape),
        )

    @validate_sample
    def log_prob(self, value: ArrayLike) -> jax.Array:
        labels = _as_labels(self, value)
        return _log_prob_labels(labels, *self._two_parameters(), self.num_components)

    def _two_parameters(self) -> tuple[jax.Array, jax.Array]:
        """
        Concentration and discount of the two-parameter law.
        """
        per_component, _ = _float_parameters(self.concentration, 0.0)
        return self.num_components * per_component, -per_component


@final
class MixtureOfFiniteMixtures(PartitionDistribution):
    r"""
    Partition of ``size`` rows under a mixture of an unknown number of components.

    The number of components less one follows ``extra_components``; given that it is
    :math:`K`, the weights are symmetric Dirichlet(:math:`\gamma, \dots, \gamma`) and
    each row takes a component by them. A partition into :math:`t` clusters of sizes
    :math:`n_1, \dots, n_t` that sum to :math:`N` has probability (Miller and Harrison,
    2018, Theorem 3.1 and Equation 3.2)

    .. math::

        p(n_1, \dots, n_t) = V_N(t) \prod_{j=1}^{t} \gamma^{(n_j)}, \qquad
        V_n(t) = \sum_{k=t}^{\infty} \frac{k_{(t)}}{(\gamma k)^{(n)}} p_K(k),

    where :math:`x^{(m)} = x (x + 1) \cdots (x + m - 1)` and
    :math:`x_{(m)} = x (x - 1) \cdots (x - m + 1)`.

    Row by row (ibid., restaurant process): with :math:`n` rows in :math:`t` clusters,
    the next one joins a cluster of :math:`n_j` rows with a weight of
    :math:`n_j + \gamma`,
    and opens a new one with :math:`\gamma V_{n+1}(t + 1) / V_{n+1}(t)`: that is
    :math:`\gamma` times the mean number of components that are empty, under
    :math:`p(k) \propto k_{(t)} / (\gamma k)^{(n+1)} p_K(k)`. Clusters are never
    more than components; their number tends to that of the components as rows are
    added.

    :param concentration: :math:`\gamma > 0`, of each component.
    :param extra_components: NumPyro distribution of :math:`K - 1` over 0, 1, 2, ...,
        such as ``dist.Poisson(1.0)``, ``dist.Geometric(0.2)`` or
        ``dist.DiscreteUniform(0, 9)``. Its batch shape broadcasts with
        ``concentration``.
    :param int size: number of rows, a nonnegative Python or NumPy integer.
    :param int max_components: where the sum over :math:`k` ends, a positive Python or
        NumPy integer; a Gibbs move takes time in proportion. The law is exactly that of
        ``extra_components`` restricted to :math:`K \le` ``max_components``
        (renormalised), so partitions into more clusters have probability zero. A
        concrete ``extra_components`` that puts more than :math:`10^{-6}` beyond it is
        refused; a traced one cannot be checked.
    :param bool validate_args: whether to check the parameters and the values given
        to :meth:`log_prob`; by default as :func:`numpyro.enable_validation` says.
    :raises ValueError: if ``extra_components`` is not a discrete distribution of
        scalars, ``max_components`` not a positive integer or ``size`` not a nonnegative
        one (always), or a concrete parameter is out of range (under validation).

    .. note:: :meth:`sample` flips coins of 32 bits: in float32 the probability of a
        component is right to :math:`2^{-32}` or, if that is more, to :math:`2^{-20}`
        of itself. It draws ``max_components`` gamma variates for every label vector.

    **Example:**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> import numpyro.distributions as dist
        >>> from numpyro_subanneal.distributions import MixtureOfFiniteMixtures
        >>> prior = MixtureOfFiniteMixtures(1.0, dist.DiscreteUniform(0, 1), size=2)
        >>> # One or two components: (1 + 2 / 3) / 2 that two rows are together.
        >>> print(f"{jnp.exp(prior.log_prob(jnp.array([0, 0]))):.5f}")
        0.83333

    **References:**

    1. Miller, J. W. and Harrison, M. T. (2018). *Mixture models with a prior on the
       number of components*. Journal of the American Statistical Association 113.
    """

    arg_constraints = {"concentration": constraints.positive}
    pytree_data_fields = ("concentration", "extra_components")
    pytree_aux_fields = ("max_components",)

    def __init__(
        self,
        concentration: ArrayLike,
        extra_components: Distribution,
        size: int,
        max_components: int = 160,
        *,
        validate_args: bool | None = None,
    ) -> None:
        name = type(self).__name__
        is_distribution = isinstance(extra_components, Distribution)
        if (
            not is_distribution
            or extra_components.event_shape
            or not extra_components.is_discrete
        ):
            raise ValueError(
                f"{name}: `extra_components` must be a discrete NumPyro distribution "
                f"of scalars, got {extra_components!r}; it is the law of the number of "
                "components less one, e.g. `dist.Poisson(1.0)`."
            )
        _check_numbers(self, concentration=concentration)
        self.concentration = concentration
        self.extra_components = extra_components
        self.max_components = _positive_integer(
            name, "max_components", max_components, "of components to sum over"
        )
        batch_shape = lax.broadcast_shapes(
            jnp.shape(concentration), extra_components.batch_shape
        )
        super().__init__(size, batch_shape, validate_args=validate_args)

    def parameter_error(self) -> str | None:
        message = _component_concentration_error(self)
        if message is not None:
            return message
        if not all(map(not_jax_tracer, jax.tree.leaves(self.extra_components))):
            return None
        # In float64, as the tail is what is left of one.
        with jax.enable_x64(True), jax.ensure_compile_time_eval():
            extra = jax.tree.map(_in_double, self.extra_components)
            log_probs = _log_probs_below(extra, self.max_components)
            outside = 1.0 - np.exp(np.asarray(log_probs)).sum(-1)
        problem = _offending(outside, outside <= 1e-6)
        if problem is None:
            return None
        return (
            "MixtureOfFiniteMixtures: `extra_components` must have all but 1e-6 of its "
            f"mass on 0, ..., `max_components` - 1 = {self.max_components - 1}, got "
            f"{problem} outside; pass a larger `max_components`, or a distribution "
            "with less mass on large numbers and none below zero."
        )

    def log_weight_existing(self, counts: ArrayLike) -> jax.Array:
        concentration, _ = _float_parameters(self.concentration, 0.0)
        # Of the batch shape, or less inside `vmap`.
        probs_shape = jax.eval_shape(self._log_probs).shape[:-1]
        return _log_weight_existing(counts, jnp.zeros(probs_shape), -concentration)

    def log_weight_new(self, num_clusters: ArrayLike, num_rows: ArrayLike) -> jax.Array:
        return _log_weight_new_mixed(
            num_clusters, num_rows, self.concentration, self._log_probs()
        )

    def log_eppf(self, counts: ArrayLike, axis: int = -1) -> jax.Array:
        return _log_eppf_mixed(counts, self.concentration, self._log_probs(), axis=axis)

    def log_eppf_of_parameters(self, counts: ArrayLike, axis: int = -1) -> jax.Array:
        return _log_eppf_mixed(
            counts, self.concentration, self._log_probs(), axis=axis, relative=True
        )

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
        key_number, key_labels = random.split(key)
        shape = self.shape(sample_shape)
        extra = random.categorical(key_number, self._log_probs(), shape=shape[:-1])
        return _sample_finite(
            key_labels,
            self.concentration,
            extra + 1,
            max_components=self.max_components,
            shape=shape,
        )

    @validate_sample
    def log_prob(self, value: ArrayLike) -> jax.Array:
        labels = _as_labels(self, value)
        return _log_prob_labels_mixed(labels, self.concentration, self._log_probs())

    def _log_probs(self) -> jax.Array:
        """
        Log probability of 1, ..., max_components components, on the last axis; not
        renormalised.
        """
        return _log_probs_below(self.extra_components, self.max_components)


# Checks of concrete values.


def _check_numbers(fn: Distribution, **parameters: Any) -> None:
    for name, value in parameters.items():
        if value is None or isinstance(value, str | bytes | Distribution):
            raise ValueError(
                f"{type(fn).__name__}: `{name}` must be a number or an array of "
                f"numbers, got {value!r}; to learn it, `numpyro.sample` it."
            )


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


def _positive_integer(class_name: str, name: str, value: int, what: str) -> int:
    """
    The value as a Python integer, or a ValueError.
    """
    is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_integer or not 1 <= value < 2**31:
        raise ValueError(
            f"{class_name}: `{name}` must be a positive Python or NumPy integer below "
            f"2**31, got {value!r}; pass the number {what}, e.g. `{name}=10`."
        )
    return int(value)


def _component_concentration_error(prior: PartitionDistribution) -> str | None:
    concentration = _concrete(prior.concentration)
    if concentration is None:
        return None
    problem = _offending(concentration, concentration > 0.0)
    if problem is None:
        return None
    return (
        f"{type(prior).__name__}: `concentration` must be finite and greater than 0, "
        f"got {problem}; it is the parameter of each component, e.g. "
        "`alpha / num_components` for few occupied ones."
    )


def _in_double(leaf: ArrayLike) -> ArrayLike:
    if jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
        return np.asarray(leaf, np.float64)
    return leaf


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


# The two-parameter law. Functions of arrays; discount 0 is the Dirichlet process. At a
# negative discount `num_components` is given, which is -concentration / discount.


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


def _weight_new(
    num_clusters: jax.Array,
    concentration: jax.Array,
    discount: jax.Array,
    num_components: ArrayLike | None,
) -> jax.Array:
    """
    Concentration plus discount times clusters, without cancellation where that falls
    to zero, and then zero for more clusters.
    """
    if num_components is None:
        return concentration + discount * num_clusters
    left = jnp.asarray(num_components, discount.dtype) - num_clusters
    return -discount * jnp.maximum(left, 0.0)


def _log_weight_new(
    num_clusters: ArrayLike,
    num_rows: ArrayLike,
    concentration: ArrayLike,
    discount: ArrayLike,
    num_components: ArrayLike | None = None,
) -> jax.Array:
    concentration, discount = _float_parameters(concentration, discount)
    num_clusters, _ = jnp.broadcast_arrays(num_clusters, num_rows)
    weight = _weight_new(num_clusters, concentration, discount, num_components)
    # The first row opens a cluster whatever the concentration, which may be negative.
    weight = jnp.where(num_clusters > 0, weight, 1.0)
    if num_components is None:
        return jnp.log(weight)
    positive = weight > 0.0
    return jnp.where(positive, jnp.log(jnp.where(positive, weight, 1.0)), -jnp.inf)


def _log_ratio(
    numerator: jax.Array, denominator: jax.Array, gap: jax.Array
) -> jax.Array:
    """
    Log of ``numerator / denominator``, exact to rounding also when it is close to
    zero, for positive arguments and ``gap = denominator - numerator``, which the
    caller knows without cancellation. Minus infinity for a numerator of zero, and NaN
    for a negative one: of parameters that are not possible.
    """
    # NB: two negative ones would have a ratio as good as any.
    positive = (numerator > 0) & (denominator > 0)
    log = log1p_of(
        jnp.where(positive, numerator / denominator, 1),
        jnp.where(positive, -gap / denominator, 0),
    )
    impossible = (numerator == 0) & (denominator > 0)
    return jnp.where(positive, log, jnp.where(impossible, -jnp.inf, jnp.nan))


@partial(jax.jit, static_argnames=("axis", "relative"))
def _log_eppf(
    counts: ArrayLike,
    concentration: ArrayLike,
    discount: ArrayLike,
    num_components: ArrayLike | None = None,
    *,
    axis: int = -1,
    relative: bool = False,
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
    if num_components is not None:
        num_components = jnp.asarray(num_components)[..., None]
    dtype = concentration.dtype
    counts = jnp.moveaxis(jnp.asarray(counts), axis, -1)
    num_rows = counts.sum(-1, keepdims=True)
    num_clusters = (counts > 0).sum(-1, keepdims=True)

    # First bracket; the gap to one of each factor is k (1 - d) / (c + k).
    k = jnp.arange(1, counts.shape[-1])
    used = k < num_clusters
    if num_components is not None:
        used = used & (k < num_components)
    opening = _weight_new(k, concentration, discount, num_components)
    numerator = jnp.where(used, opening, 1.0)
    denominator = jnp.where(used, concentration + k, 1.0)
    gap = jnp.where(used, k * (1.0 - discount), 0.0)
    log_new = _log_ratio(numerator, denominator, gap).sum(-1)

    # Second bracket: log (a)_m = m log(a + m) + (a - 1/2) log(1 + m / a) - m
    # + remainder(a + m) - remainder(a), and the lone m cancel as they sum to N - K.
    a = 1.0 - discount
    m = jnp.where(counts > 0, counts - 1, 0).astype(dtype)
    b = concentration + jnp.maximum(num_clusters, 1)
    rest = (num_rows - num_clusters).astype(dtype)
    beside = _weight_new(1, concentration, discount, num_components)
    gap = (num_rows - counts).astype(dtype) + beside
    gap = jnp.where(counts > 0, gap, 0.0)

    # NB: of all arguments at once, since each call is compiled.
    batch = jnp.broadcast_shapes(*(x.shape[:-1] for x in (a, b, m)))
    ends = np.cumsum([m.shape[-1], 1, 1])
    remainders = jnp.split(
        stirling_remainder(
            jnp.concatenate(
                [
                    jnp.broadcast_to(x, (*batch, x.shape[-1]))
                    for x in (a + m, a, b + rest, b)
                ],
                -1,
            )
        ),
        ends,
        axis=-1,
    )

    def log_rising(start, length, remainder, of_start):
        leading = (start - 0.5) * log1p_nonnegative(length / start)
        return leading + (remainder - of_start)

    def of_parameters(start, length):
        # length log(1 + start / length), whose counterpart is in `log_rising`.
        some = length > 0
        return jnp.where(
            some, length * jnp.log1p(start / jnp.where(some, length, 1)), 0
        )

    log_rising_old = log_rising(a, m, *remainders[:2])
    if relative:
        # Over the log of prod_k m_k^m_k / rest^rest.
        log_old = (of_parameters(a, m) + log_rising_old).sum(-1)
        log_old = log_old - of_parameters(b, rest)[..., 0]
    else:
        log_old = (m * _log_ratio(a + m, b + rest, gap) + log_rising_old).sum(-1)
    log_eppf = log_new + log_old - log_rising(b, rest, *remainders[2:])[..., 0]
    if num_components is None:
        return _in_range(log_eppf, concentration[..., 0], discount[..., 0])
    return jnp.where((num_clusters > num_components)[..., 0], -jnp.inf, log_eppf)


@jax.jit
def _log_prob_labels(
    labels: jax.Array,
    concentration: ArrayLike,
    discount: ArrayLike,
    num_components: ArrayLike | None = None,
) -> jax.Array:
    """
    Log probability of the partition that labels of shape ``(..., N)`` stand for.
    """
    log_prob = _log_prob_sorted(
        _sort_labels(labels), concentration, discount, num_components
    )
    if num_components is None:
        log_prob = _in_range(log_prob, *_float_parameters(concentration, discount))
    return log_prob


def _in_range(log_prob, concentration, discount):
    # One cluster has a finite density outside of it too. (Of a negative discount there
    # are laws too, those of finite mixtures.)
    out = (discount > 1) | (concentration < -discount)
    return jnp.where(out, jnp.nan, log_prob)


def _sort_labels(labels: jax.Array) -> jax.Array:
    # NB: XLA would spend tens of seconds on folding the sums over a million labels that
    # are constants of the program, as labels that a model closes over are.
    return jnp.sort(lax.optimization_barrier(labels), axis=-1)


def _opens(labels: jax.Array) -> jax.Array:
    """
    Which of the rows, sorted by their labels, are the first of a cluster.
    """
    first = jnp.ones_like(labels[..., :1], bool)
    changes = jnp.concatenate([first, labels[..., 1:] != labels[..., :-1]], axis=-1)
    return (labels >= 0) & changes


def _log_prob_sorted(
    labels: jax.Array,
    concentration: ArrayLike,
    discount: ArrayLike,
    num_components: ArrayLike | None = None,
) -> jax.Array:
    """
    :func:`_log_prob_labels` of labels in ascending order.

    Rows are exchangeable, so they may be seated in the order of their labels: then
    each row finds its cluster just before it, and its predictive probability follows
    from its place in the run of equal labels. Every factor is at most one, so the
    sum of the logs has no cancellation, as gamma functions would have.
    """
    concentration, discount = _float_parameters(concentration, discount)
    concentration, discount = concentration[..., None], discount[..., None]
    if num_components is not None:
        num_components = jnp.asarray(num_components)[..., None]
    place = jnp.arange(labels.shape[-1])
    assigned = labels >= 0
    opens = _opens(labels)
    run_start = lax.cummax(jnp.where(opens, place, 0), axis=labels.ndim - 1)
    # What the row finds: rows in its cluster, clusters, rows in all.
    others = place - run_start
    num_clusters = jnp.cumsum(opens, axis=-1) - 1
    num_rows = place - jnp.sum(~assigned, axis=-1, keepdims=True)

    opening = _weight_new(num_clusters, concentration, discount, num_components)
    beside = _weight_new(1, concentration, discount, num_components)
    weight = jnp.where(opens, opening, others - discount)
    gap = jnp.where(
        opens,
        (num_rows - num_clusters) + (1.0 - discount) * num_clusters,
        (num_rows - others) + beside,
    )
    # The first row has no choice, whatever the concentration.
    counted = assigned & (num_rows > 0)
    refused = jnp.zeros_like(opens)
    if num_components is not None:
        refused = opens & (num_clusters >= num_components)
        counted = counted & ~refused
    weight = jnp.where(counted, weight, 1.0)
    total = jnp.where(counted, concentration + num_rows, 1.0)
    gap = jnp.where(counted, gap, 0.0)
    log_prob = _log_ratio(weight, total, gap).sum(-1)
    return jnp.where(refused.any(-1), -jnp.inf, log_prob)


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


# Finite mixtures of an unknown number of components. `log_probs` are those of 1, 2, ...
# components on their last axis, up to a constant.


def _log_probs_below(extra_components: Distribution, stop: int) -> jax.Array:
    """
    Log probability of 0, ..., stop - 1, on the last axis.
    """

    # NB: mapped, as inside `vmap` a distribution's own batch shape is out of date. It
    # also keeps its validation from warning of numbers out of the support, for which
    # `log_prob` may be anything.
    def log_prob(k):
        in_support = extra_components.support(k)
        return jnp.where(in_support, extra_components.log_prob(k), -jnp.inf)

    return jax.vmap(log_prob, out_axes=-1)(jnp.arange(stop))


def _log_rising_difference(
    x: jax.Array, y: jax.Array, gap: jax.Array, m: jax.Array
) -> jax.Array:
    r"""
    Log of :math:`x^{(m)} / y^{(m)}`, rising factorials, for positive ``x`` and ``y``,
    ``gap = x - y`` and ``m >= 1``, without a large term that cancels.

    After a few factors that are divided out, Stirling's formula for both, whose terms
    are grouped by what vanishes with the gap:

        m log((x + m) / (y + m)) + gap log((y + m) / y)
        + (x - 1/2) log(y (x + m) / (x (y + m))) + remainders.
    """
    steps = 4 if jnp.finfo(x.dtype).bits <= 32 else 10
    product = jnp.ones_like(x)
    for i in range(steps):
        product = product * (1.0 + gap * (m / (y + i)) / (x + m + i))
    x, y = x + steps, y + steps
    upper = gap / (y + m)
    log_upper = log1p_of((x + m) / (y + m), upper)
    log_lower = log1p_of(y * (x + m) / (x * (y + m)), -upper * (m / x))
    remainder_x = stirling_remainder(x + m) - stirling_remainder(x)
    remainder_y = stirling_remainder(y + m) - stirling_remainder(y)
    return (
        jnp.log(product)
        + m * log_upper
        + gap * jnp.log1p(m / y)
        + (x - 0.5) * log_lower
        + (remainder_x - remainder_y)
    )


def _split_log_factorials(stop: int) -> tuple[np.ndarray, np.ndarray]:
    """
    Logs of 0!, ..., (stop - 1)! in two parts: sums and differences of the first ones
    are exact in float32, and the second ones are small.
    """
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, stop)))])
    grain = 2.0 ** (np.ceil(np.log2(log_factorial[-1] + 1.0)) - 23)
    high = np.round(log_factorial / grain) * grain
    return high, log_factorial - high


def _log_terms(
    num_clusters: jax.Array,
    num_rows: jax.Array,
    concentration: jax.Array,
    log_probs: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """
    Logs of the terms of ``V_n(t)``, for k = 1, 2, ... on the last axis: each is p(k)
    times the EPPF of k components over that of t components, over a scale. Then the log
    of that scale, and how many components are empty, k - t.

    :param num_clusters: t, from 1 up to the number of terms.
    :param num_rows: n, at least 1.
    """
    dtype = concentration.dtype
    max_components = log_probs.shape[-1]
    k = np.arange(1, max_components + 1)
    t = num_clusters[..., None]
    empty = k - t
    high, low = (
        jnp.asarray(part, dtype) for part in _split_log_factorials(max_components + 1)
    )
    # Log of k! / ((k - t)! t!).
    index = jnp.maximum(empty, 0)
    log_binomial = (high[1:] - high[index] - high[t]) + (low[1:] - low[index] - low[t])
    g = concentration[..., None]
    log_ratio = _log_rising_difference(
        g * k, g * t, g * empty, num_rows.astype(dtype)[..., None]
    )
    # Differences from p(t), as logs of probabilities far in the tail have few decimals.
    log_probs, index = jnp.broadcast_arrays(log_probs, t - 1)
    scale = _take(log_probs, index[..., :1])
    scale = jnp.where(jnp.isfinite(scale), scale, 0.0)
    terms = (log_probs - scale) + (log_binomial - log_ratio)
    return jnp.where(empty >= 0, terms, -jnp.inf), scale[..., 0], empty


def _log_sum(terms: jax.Array, factors: ArrayLike = 1.0) -> tuple[jax.Array, jax.Array]:
    """
    Log of the sum of ``factors * exp(terms)`` over the last axis, also if it is zero,
    in two parts that add up to it: the second may be large.
    """
    largest = lax.stop_gradient(terms.max(-1, keepdims=True))
    shift = jnp.where(jnp.isfinite(largest), largest, 0.0)
    total = (factors * jnp.exp(terms - shift)).sum(-1)
    positive = total > 0.0
    log_total = jnp.log(jnp.where(positive, total, 1.0))
    return jnp.where(positive, log_total, -jnp.inf), shift[..., 0]


@jax.jit
def _log_weight_new_mixed(
    num_clusters: ArrayLike,
    num_rows: ArrayLike,
    concentration: ArrayLike,
    log_probs: jax.Array,
) -> jax.Array:
    r"""
    Log of :math:`\gamma V_{n+1}(t + 1) / V_{n+1}(t)`; see
    :class:`MixtureOfFiniteMixtures`. With terms :math:`v_k` of the lower sum, those of
    the upper one are :math:`(k - t) v_k`.
    """
    concentration, log_probs = _float_parameters(concentration, log_probs)
    num_clusters, num_rows = jnp.broadcast_arrays(num_clusters, num_rows)
    t = jnp.clip(num_clusters, 1, log_probs.shape[-1]).astype(jnp.int32)
    terms, _, empty = _log_terms(t, num_rows + 1, concentration, log_probs)
    # Each sum is scaled by its own largest term: the ratio may be below 1e-38.
    upper, shift_upper = _log_sum(jnp.where(empty > 0, terms, -jnp.inf), empty)
    lower, shift_lower = _log_sum(terms)
    possible = (num_clusters <= log_probs.shape[-1]) & (upper > -jnp.inf)
    lower = jnp.where(possible, lower, 0.0)
    weight = jnp.log(concentration) + (upper - lower) + (shift_upper - shift_lower)
    weight = jnp.where(possible, weight, -jnp.inf)
    # The first row has no choice.
    return jnp.where(num_clusters > 0, weight, 0.0)


def _log_mixed(
    num_clusters: jax.Array,
    num_rows: jax.Array,
    concentration: jax.Array,
    log_probs: jax.Array,
) -> jax.Array:
    """
    Log of the EPPF over that for as many components as clusters.
    """
    t = jnp.clip(num_clusters, 1, log_probs.shape[-1])
    num_rows_or_one = jnp.maximum(num_rows, 1)
    terms, scale, _ = _log_terms(t, num_rows_or_one, concentration, log_probs)
    log_mixed = sum(_log_sum(terms)) + (scale - sum(_log_sum(log_probs)))
    log_mixed = jnp.where(num_clusters > log_probs.shape[-1], -jnp.inf, log_mixed)
    # The first row has no choice.
    return jnp.where(num_rows > 1, log_mixed, 0.0)


@partial(jax.jit, static_argnames=("axis", "relative"))
def _log_eppf_mixed(
    counts: ArrayLike,
    concentration: ArrayLike,
    log_probs: jax.Array,
    *,
    axis: int = -1,
    relative: bool = False,
) -> jax.Array:
    concentration, log_probs = _float_parameters(concentration, log_probs)
    counts = jnp.moveaxis(jnp.asarray(counts), axis, -1)
    num_clusters = (counts > 0).sum(-1)
    t = jnp.maximum(num_clusters, 1)
    log_finite = _log_eppf(
        counts, t * concentration, -concentration, t, relative=relative
    )
    log_mixed = _log_mixed(num_clusters, counts.sum(-1), concentration, log_probs)
    return log_finite + log_mixed


@jax.jit
def _log_prob_labels_mixed(
    labels: jax.Array, concentration: ArrayLike, log_probs: jax.Array
) -> jax.Array:
    concentration, log_probs = _float_parameters(concentration, log_probs)
    labels = _sort_labels(labels)
    num_clusters = _opens(labels).sum(-1)
    t = jnp.maximum(num_clusters, 1)
    log_finite = _log_prob_sorted(labels, t * concentration, -concentration, t)
    num_rows = (labels >= 0).sum(-1)
    return log_finite + _log_mixed(num_clusters, num_rows, concentration, log_probs)


@partial(jax.jit, static_argnames=("max_components", "shape"))
def _sample_finite(
    key: jax.Array,
    concentration: ArrayLike,
    num_components: ArrayLike,
    *,
    max_components: int,
    shape: tuple,
) -> jax.Array:
    """
    Draws labels of the given shape, rows on the last axis: the weights of the
    components, then labels, which are renamed.
    """
    concentration, _ = _float_parameters(concentration, 0.0)
    *batch, num_rows = shape
    num_draws = math.prod(batch)
    key_weights, key_labels = random.split(key)
    concentration = jnp.broadcast_to(concentration, batch).reshape(-1, 1)
    num_components = jnp.broadcast_to(num_components, batch).reshape(-1, 1)
    log_weights = loggamma(
        key_weights, jnp.broadcast_to(concentration, (num_draws, max_components))
    )
    exists = jnp.arange(max_components) < num_components
    log_weights = jnp.where(exists, log_weights, -jnp.inf)
    labels = _draw_labels(key_labels, log_weights, num_rows)

    # Names in order of first appearance: the rank of a component's first row.
    row = jnp.arange(num_rows, dtype=jnp.int32)
    draw = jnp.arange(num_draws)[:, None]
    first = jnp.full((num_draws, max_components), num_rows, jnp.int32)
    first = first.at[draw, labels].min(row, mode="promise_in_bounds")
    names = jnp.argsort(jnp.argsort(first, axis=-1), axis=-1).astype(jnp.int32)
    return _take(names, labels).reshape(shape)


def _draw_labels(key: jax.Array, log_weights: jax.Array, num_rows: int) -> jax.Array:
    """
    Draws int32 labels ``(B, num_rows)`` with probabilities in proportion to the weights
    ``(B, K)``, by inversion of their cumulative sums.
    """
    # Ascending, as cumulative sums and coins are the finer the closer to zero.
    order = jnp.argsort(log_weights, axis=-1).astype(jnp.int32)
    log_weights = _take(log_weights, order)
    cumulative = jnp.cumsum(jnp.exp(log_weights - log_weights[..., -1:]), axis=-1)
    # NB: coins of 32 bits, as the 23 of a float32 uniform are too few for small weights
    # at a million rows.
    coins = random.bits(key, (*order.shape[:-1], num_rows), dtype=jnp.uint32)
    point = coins.astype(log_weights.dtype) * 2.0**-32 * cumulative[..., -1:]
    place = jax.vmap(partial(jnp.searchsorted, side="right"))(cumulative, point)
    # A coin may round to one.
    return _take(order, jnp.minimum(place, order.shape[-1] - 1))
