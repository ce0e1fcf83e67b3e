# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

r"""
Laws of labelled assignments whose mixture weights are integrated out.

They belong to models that draw weights :math:`w` of ``K`` components and then, for each
of ``size`` rows, a label by them. Unlike in a partition, the components themselves are
told apart: all ``K`` of them are there whether or not they have rows, and they need not
be alike. The probability of the labels depends on the counts alone, how many rows each
component has, so that is what the methods here take.

Shapes: ``K`` components, on the last axis of counts, whose other axes are batches. The
parameters are vectors; for batches of them, map a method with :func:`jax.vmap`, as the
priors are pytrees.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from numpyro.util import not_jax_tracer

from numpyro_subanneal import variates
from numpyro_subanneal.conjugate.base import loggamma
from numpyro_subanneal.conjugate.special import (
    log1p_of,
    log_rising_of_scale,
    stirling_remainder,
)
from numpyro_subanneal.distributions import (
    _draw_labels,
    _log_ratio,
    _offending,
)
from numpyro_subanneal.typing import Array

__all__ = [
    "DirichletWeights",
    "KnownWeights",
    "LabelledPrior",
    "StickBreakingWeights",
]


class LabelledPrior(ABC):
    """
    Abstract base of the laws of labels; what the Gibbs kernel asks of one.

    A subclass is a frozen dataclass that is registered as a JAX pytree, with its
    parameters as data and ``size`` as metadata. Every method but
    :meth:`parameter_error` works with traced parameters.

    - **size** - number of rows ``N``, a nonnegative Python or NumPy integer.

    **References:**

    1. Connor, R. J. and Mosimann, J. E. (1969). *Concepts of independence for
       proportions with a generalization of the Dirichlet distribution*. Journal of the
       American Statistical Association 64.
    2. Ishwaran, H. and James, L. F. (2001). *Gibbs sampling methods for stick-breaking
       priors*. Journal of the American Statistical Association 96.
    """

    size: int

    @property
    @abstractmethod
    def num_components(self) -> int:
        """
        Number of components, ``K``.
        """

    @abstractmethod
    def parameter_error(self) -> str | None:
        """
        Says what is wrong with the parameters: the name, the value, a way out.

        :return: the message, or None if nothing is wrong. The values of traced
            parameters pass.
        """

    @abstractmethod
    def log_weights(self, counts: ArrayLike) -> Array:
        """
        Log of the unnormalised probability that the next row takes each label.

        :param counts: rows of each component, the row itself not counted,
            ``(..., K)``.
        :return: natural logs, ``(..., K)``. Minus infinity only where a known weight is
            zero.
        """

    @abstractmethod
    def log_prob(self, counts: ArrayLike) -> Array:
        """
        Log of the probability of any one vector of labels with these counts.

        :param counts: rows of each component, ``(..., K)``.
        :return: natural logs, ``(...)``. Zero if there are no rows.
        """

    @abstractmethod
    def log_prob_of_parameters(self, counts: ArrayLike) -> Array:
        """
        :meth:`log_prob` less what depends on the counts alone: a few units, however
        many rows there are, so that differences between parameters keep their digits.

        :param counts: rows of each component, ``(..., K)``.
        :return: natural logs, ``(...)``.
        """

    @abstractmethod
    def draw(self, rng_key: Array, counts: ArrayLike) -> Array | None:
        """
        Draws the latent variable that stands for the weights in a model, given the
        labels.

        :param jax.Array rng_key: random key, typed or of the old kind.
        :param counts: rows of each component, ``(..., K)``.
        :return: its value, the same leading axes; None if there is no such variable.
        """

    @abstractmethod
    def sample(self, rng_key: Array) -> Array:
        """
        Draws labels from the prior.

        :param jax.Array rng_key: random key, typed or of the old kind.
        :return: int32 labels in ``0, ..., K - 1``, ``(size,)``.
        """


def _prior_class(*parameters: str):
    """
    Class decorator: a frozen dataclass and pytree, compared by identity.
    """

    def decorate(cls):
        cls = dataclass(frozen=True, eq=False)(cls)
        return jax.tree_util.register_dataclass(
            cls, data_fields=list(parameters), meta_fields=["size"]
        )

    return decorate


@final
@_prior_class("concentration")
class DirichletWeights(LabelledPrior):
    r"""
    Labels under Dirichlet weights.

    With :math:`a` the concentration, :math:`A` its sum and :math:`N` the number of
    rows, labels with counts :math:`n_1, \dots, n_K` have probability

    .. math::

        p(z) = \frac{\Gamma(A)}{\Gamma(A + N)}
        \prod_{k=1}^{K} \frac{\Gamma(a_k + n_k)}{\Gamma(a_k)}

    (Gelman et al., 2013, Section 3.4: the Dirichlet is conjugate to the multinomial,
    so :math:`w \mid z` is Dirichlet of :math:`a + n`), and the next row takes label
    :math:`k` with probability :math:`(a_k + n_k) / (A + N)`.

    - **concentration** - :math:`a > 0`, ``(K,)``; not necessarily all the same.
    - **size** - number of rows.

    :raises ValueError: if ``size`` is not a nonnegative integer.

    .. note:: :meth:`draw` gives no weight of less than the smallest normal number of
        its type, as the density of a zero weight is zero or infinite.

    **Example:**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_subanneal.weights import DirichletWeights
        >>> prior = DirichletWeights(jnp.array([1.0, 2.0]), size=3)
        >>> # 1 / 3 * 2 / 4 * 2 / 5.
        >>> print(f"{jnp.exp(prior.log_prob(jnp.array([2, 1]))):.5f}")
        0.06667

    **References:**

    1. Gelman, A., Carlin, J. B., Stern, H. S., Dunson, D. B., Vehtari, A. and
       Rubin, D. B. (2013). *Bayesian Data Analysis*, third edition. CRC Press.
    """

    concentration: ArrayLike
    size: int

    def __post_init__(self) -> None:
        _check_size(self)

    @property
    def num_components(self) -> int:
        return jnp.shape(self.concentration)[-1]

    def parameter_error(self) -> str | None:
        return _shape_error(self, "concentration", 1) or _positive_error(
            self, "concentration", "a tiny positive value for a component of no weight"
        )

    def log_weights(self, counts: ArrayLike) -> Array:
        return jnp.log(_float(self.concentration) + jnp.asarray(counts))

    def log_prob(self, counts: ArrayLike) -> Array:
        return _log_dirichlet_multinomial(counts, self.concentration)

    def log_prob_of_parameters(self, counts: ArrayLike) -> Array:
        return _of_parameters(jnp.asarray(counts), _float(self.concentration))

    @jax.jit
    def draw(self, rng_key: Array, counts: ArrayLike) -> Array:
        log_gamma = loggamma(rng_key, _float(self.concentration) + jnp.asarray(counts))
        tiny = jnp.finfo(log_gamma.dtype).tiny
        return jnp.maximum(jax.nn.softmax(log_gamma, axis=-1), tiny)

    @jax.jit
    def sample(self, rng_key: Array) -> Array:
        key_weights, key_labels = variates.split(rng_key)
        log_weights = loggamma(key_weights, _float(self.concentration))
        return _sample(key_labels, log_weights, self.size)


@final
@_prior_class("a", "b")
class StickBreakingWeights(LabelledPrior):
    r"""
    Labels under the weights of a stick that is broken ``K - 1`` times.

    The breaks are :math:`v_k \sim \mathrm{Beta}(a_k, b_k)` and the weights
    :math:`w_k = v_k \prod_{j<k} (1 - v_j)`, the last one being what is left: the
    generalised Dirichlet distribution (Connor and Mosimann, 1969). With :math:`n_k`
    rows in component :math:`k` and :math:`n_{>k}` in later ones, labels have
    probability

    .. math::

        p(z) = \prod_{k=1}^{K-1}
        \frac{\mathrm{B}(a_k + n_k, b_k + n_{>k})}{\mathrm{B}(a_k, b_k)},

    as given the labels the breaks are :math:`\mathrm{Beta}(a_k + n_k, b_k + n_{>k})`
    (Ishwaran and James, 2001, blocked Gibbs sampler). So the next row stops at
    :math:`k`, if it gets there, with probability
    :math:`(a_k + n_k) / (a_k + b_k + n_k + n_{>k})`.

    At :math:`a_k = 1, b_k = \alpha` it is the Dirichlet process, truncated, its
    clusters named by their sticks.

    - **a** - :math:`a > 0`, ``(K - 1,)``.
    - **b** - :math:`b > 0`, ``(K - 1,)``.
    - **size** - number of rows.

    :raises ValueError: if ``size`` is not a nonnegative integer.

    .. note:: :meth:`draw` keeps breaks off zero and one, where their density is zero or
        infinite, by the smallest normal number and half the rounding error of one.

    **Example:**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_subanneal.weights import StickBreakingWeights
        >>> prior = StickBreakingWeights(jnp.ones(1), 2.0 * jnp.ones(1), size=2)
        >>> # 1 / 3 * 2 / 4.
        >>> print(f"{jnp.exp(prior.log_prob(jnp.array([2, 0]))):.5f}")
        0.16667

    **References:**

    1. Connor, R. J. and Mosimann, J. E. (1969). *Concepts of independence for
       proportions with a generalization of the Dirichlet distribution*. Journal of the
       American Statistical Association 64.
    2. Ishwaran, H. and James, L. F. (2001). *Gibbs sampling methods for stick-breaking
       priors*. Journal of the American Statistical Association 96.
    """

    a: ArrayLike
    b: ArrayLike
    size: int

    def __post_init__(self) -> None:
        _check_size(self)

    @property
    def num_components(self) -> int:
        return jnp.shape(self.a)[-1] + 1

    def parameter_error(self) -> str | None:
        message = _shape_error(self, "a", 0) or _shape_error(self, "b", 0)
        if message is None and jnp.shape(self.a) != jnp.shape(self.b):
            message = (
                "StickBreakingWeights: `a` and `b` must have the same shape, got "
                f"{jnp.shape(self.a)} and {jnp.shape(self.b)}; repeat the shorter one, "
                "e.g. `jnp.full(num_components - 1, alpha)`."
            )
        way_out = "1 and the concentration for a truncated Dirichlet process"
        return (
            message
            or _positive_error(self, "a", way_out)
            or _positive_error(self, "b", way_out)
        )

    def log_weights(self, counts: ArrayLike) -> Array:
        a, b = self._posterior(counts)
        stop = a / (a + b)
        # Of reaching k and then of stopping there; at the last one the row must stop.
        log_pass = _cumulative(log1p_of(b / (a + b), -stop))
        none = jnp.zeros((*stop.shape[:-1], 1), stop.dtype)
        return jnp.concatenate([none, log_pass], -1) + jnp.concatenate(
            [jnp.log(stop), none], -1
        )

    def log_prob(self, counts: ArrayLike) -> Array:
        counts = jnp.asarray(counts)
        pairs = jnp.stack([counts[..., :-1], _later(counts)], axis=-1)
        parameters = jnp.stack([_float(self.a), _float(self.b)], axis=-1)
        return _log_dirichlet_multinomial(pairs, parameters).sum(-1)

    def log_prob_of_parameters(self, counts: ArrayLike) -> Array:
        counts = jnp.asarray(counts)
        pairs = jnp.stack([counts[..., :-1], _later(counts)], axis=-1)
        parameters = jnp.stack([_float(self.a), _float(self.b)], axis=-1)
        return _of_parameters(pairs, parameters).sum(-1)

    @jax.jit
    def draw(self, rng_key: Array, counts: ArrayLike) -> Array:
        log_gamma = loggamma(rng_key, jnp.stack(self._posterior(counts)))
        info = jnp.finfo(log_gamma.dtype)
        v = jax.nn.sigmoid(log_gamma[0] - log_gamma[1])
        return jnp.clip(v, info.tiny, 1.0 - info.epsneg)

    @jax.jit
    def sample(self, rng_key: Array) -> Array:
        key_sticks, key_labels = variates.split(rng_key)
        log_gamma = loggamma(key_sticks, jnp.stack([_float(self.a), _float(self.b)]))
        log_odds = log_gamma[0] - log_gamma[1]
        none = jnp.zeros((1,), log_odds.dtype)
        log_stop = jnp.concatenate([jax.nn.log_sigmoid(log_odds), none])
        log_pass = _cumulative(jax.nn.log_sigmoid(-log_odds))
        log_weights = log_stop + jnp.concatenate([none, log_pass])
        return _sample(key_labels, log_weights, self.size)

    def _posterior(self, counts: ArrayLike) -> tuple[Array, Array]:
        counts = jnp.asarray(counts)
        return _float(self.a) + counts[..., :-1], _float(self.b) + _later(counts)


@final
@_prior_class("log_probs")
class KnownWeights(LabelledPrior):
    """
    Independent labels, of known weights.

    - **log_probs** - logs of the weights, which sum to one, ``(K,)``; minus infinity
      for a component that no row takes.
    - **size** - number of rows.

    :raises ValueError: if ``size`` is not a nonnegative integer.

    **Example:**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_subanneal.weights import KnownWeights
        >>> prior = KnownWeights(jnp.log(jnp.array([0.2, 0.8, 0.0])), size=3)
        >>> print(f"{jnp.exp(prior.log_prob(jnp.array([2, 1, 0]))):.5f}")
        0.03200
    """

    log_probs: ArrayLike
    size: int

    def __post_init__(self) -> None:
        _check_size(self)

    @property
    def num_components(self) -> int:
        return jnp.shape(self.log_probs)[-1]

    def parameter_error(self) -> str | None:
        message = _shape_error(self, "log_probs", 1)
        if message is not None or not not_jax_tracer(self.log_probs):
            return message
        log_probs = np.asarray(self.log_probs, dtype=np.float64)
        undefined = np.isnan(log_probs)
        if undefined.any():
            # They are the logs of the `probs` that a model gives to a categorical site.
            return (
                "KnownWeights: `log_probs` must be logs of weights, got nan at index "
                f"({undefined.argmax()},), as of `probs` negative or nan there; make "
                "the `probs` nonnegative, with a sum of 1."
            )
        total = np.exp(log_probs).sum(-1)
        problem = _offending(total, abs(total - 1.0) <= 1e-4)
        if problem is None:
            return None
        return (
            "KnownWeights: `log_probs` must be logs of weights that sum to 1 (within "
            f"1e-4), got a sum of {problem}; pass `jax.nn.log_softmax(log_probs)`, or, "
            "if the model gives `probs`, `probs / probs.sum()`."
        )

    def log_weights(self, counts: ArrayLike) -> Array:
        log_probs = _float(self.log_probs)
        return jnp.broadcast_to(
            log_probs, jnp.broadcast_shapes(log_probs.shape, jnp.shape(counts))
        )

    def log_prob(self, counts: ArrayLike) -> Array:
        counts = jnp.asarray(counts)
        log_probs = _float(self.log_probs)
        return jnp.where(counts > 0, counts * log_probs, 0.0).sum(-1)

    def log_prob_of_parameters(self, counts: ArrayLike) -> Array:
        counts = jnp.asarray(counts)
        log_share = jnp.log(jnp.maximum(counts, 1)) - jnp.log(
            jnp.maximum(counts.sum(-1, keepdims=True), 1)
        )
        change = counts * (_float(self.log_probs) - log_share)
        return jnp.where(counts > 0, change, 0.0).sum(-1)

    def draw(self, rng_key: Array, counts: ArrayLike) -> None:
        del rng_key, counts
        return None

    @jax.jit
    def sample(self, rng_key: Array) -> Array:
        return _sample(rng_key, _float(self.log_probs), self.size)


# Checks.


def _check_size(prior: LabelledPrior) -> None:
    size = prior.size
    is_integer = isinstance(size, (int, np.integer)) and not isinstance(size, bool)
    if not is_integer or not 0 <= size < 2**31:
        raise ValueError(
            f"{type(prior).__name__}: `size` must be a nonnegative Python or NumPy "
            f"integer below 2**31, got {size!r}; pass the number of rows, e.g. "
            "`size=x.shape[0]`."
        )


def _shape_error(prior: LabelledPrior, name: str, fewest: int) -> str | None:
    shape = jnp.shape(getattr(prior, name))
    if len(shape) == 1 and shape[0] >= fewest:
        return None
    at_least = " of at least one component" if fewest else ""
    return (
        f"{type(prior).__name__}: `{name}` must be a vector{at_least}, got shape "
        f"{shape}; for batches of parameters use `jax.vmap`."
    )


def _positive_error(prior: LabelledPrior, name: str, way_out: str) -> str | None:
    value = getattr(prior, name)
    if not not_jax_tracer(value):
        return None
    value = np.asarray(value, dtype=np.float64)
    problem = _offending(value, value > 0.0)
    if problem is None:
        return None
    return (
        f"{type(prior).__name__}: `{name}` must be finite and greater than 0, got "
        f"{problem}; pass {way_out}."
    )


# Functions of arrays.


def _float(parameter: ArrayLike) -> Array:
    """
    The parameter as floats of at least 32 bits.
    """
    dtype = jnp.promote_types(jnp.result_type(parameter, float), jnp.float32)
    return jnp.asarray(parameter, dtype)


def _later(counts: Array) -> Array:
    """
    How many rows are in later components, for all components but the last.
    """
    return _cumulative(counts[..., 1:], reverse=True)


def _cumulative(x: Array, *, reverse: bool = False) -> Array:
    # NB: on a CPU `jnp.cumsum` takes time in proportion to the square of the length.
    return lax.associative_scan(jnp.add, x, axis=x.ndim - 1, reverse=reverse)


@jax.jit
def _log_dirichlet_multinomial(counts: ArrayLike, a: ArrayLike) -> Array:
    r"""
    Log of :math:`\prod_k a_k^{(n_k)} / A^{(N)}`, rising factorials, over the last axis;
    see :class:`DirichletWeights`.

    The gamma functions of a million rows are of order 1e7 and often cancel to the last
    few units, which float32 cannot follow. So Stirling's formula is taken apart,

        log a^(n) = n log(a + n) + (a - 1/2) log(1 + n / a) - n
        + remainder(a + n) - remainder(a),

    its large terms meet those of the denominator inside one logarithm, and the lone n
    cancel as they sum to N.
    """
    a = _float(a)
    n = jnp.asarray(counts).astype(a.dtype)
    n, a = jnp.broadcast_arrays(n, a)
    num_rows, total = n.sum(-1, keepdims=True), a.sum(-1, keepdims=True)
    rows_beside, beside = _sum_of_others(n), _sum_of_others(a)

    # (a + n) / (A + N) and (a + n) / (A + N) over a / A.
    share = (a + n) / (total + num_rows)
    log_share = _log_ratio(
        a + n, total + num_rows, jnp.where(n > 0, rows_beside + beside, 0.0)
    )
    gap = (a * rows_beside - n * beside) / (total * (total + num_rows))
    log_change = _log_ratio(share, a / total, gap)

    def others(a, n):
        remainder = stirling_remainder(a + n) - stirling_remainder(a)
        return remainder - 0.5 * jnp.log1p(n / a)

    terms = n * log_share + a * log_change + others(a, n)
    return terms.sum(-1) - others(total, num_rows)[..., 0]


def _of_parameters(n: Array, a: Array) -> Array:
    """
    :func:`_log_dirichlet_multinomial` less the log of ``prod_k n_k^n_k / N^N``.
    """
    each = log_rising_of_scale(a, n).sum(-1)
    return each - log_rising_of_scale(a.sum(-1), n.sum(-1))


def _sum_of_others(x: Array) -> Array:
    """
    The sum less each term, without cancellation.
    """
    none = jnp.zeros_like(x[..., :1])
    before = jnp.concatenate([none, _cumulative(x[..., :-1])], -1)
    return before + jnp.concatenate([_later(x), none], -1)


def _sample(key: Array, log_weights: Array, size: int) -> Array:
    return _draw_labels(key, log_weights[None], size)[0]
