# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""Multivariate normal values of unknown mean and covariance."""

from typing import ClassVar

import jax
from jax import lax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
import numpy as np

import numpyro.distributions as dist

from numpyro_subanneal.conjugate.base import AbstractConjugatePair
from numpyro_subanneal.conjugate.normal import NormalInverseGamma
from numpyro_subanneal.conjugate.special import (
    log1p_nonnegative,
    log_gamma_half_step,
    log_rising,
)


class MultivariateNormalInverseWishart(AbstractConjugatePair):
    r"""
    ``x ~ MultivariateNormal(loc, cov)`` with ``cov ~ InverseWishart(concentration,
    scale_matrix)`` and ``loc ~ MultivariateNormal(mean, cov / kappa)``. The covariance
    matrices may be written by any of NumPyro's parameters.

    Hyperparameters: `mean` ``[p]`` of the cluster means; `kappa` > 0, the number of
    values that the prior mean counts for; `concentration` > p - 1, the degrees of
    freedom, and `scale_matrix` ``[p, p]`` of the inverse Wishart. For one dimension
    this is :class:`NormalInverseGamma` with :math:`2\,shape` degrees of freedom and the
    scale :math:`2\,rate`.

    Statistics: count; mean of the posterior; and inverse :math:`W` of the Cholesky
    factor of the posterior's scale matrix, :math:`\Psi_n^{-1} = W^\top W`. To add or
    remove a value changes :math:`\Psi_n` by a multiple of an outer product, and
    :math:`W` in :math:`O(p^2)`; to score one takes the product with :math:`W`.

    .. note:: In float32 the removal of a value that lies :math:`r` times as far out as
        the rest of its cluster (in units of the posterior's scale matrix, which the
        prior's is part of) leaves a relative error of about :math:`10^{-7} r^2` in the
        variance along its direction, until the statistics are built anew from the data,
        as they are at every step. The variance never falls below the prior's share, so
        that the matrix stays positive definite whatever is removed.

    **References:**

    1. *Conjugate Bayesian analysis of the Gaussian distribution*, K. P. Murphy (2007),
       section 9
    2. *Methods for Modifying Matrix Factorizations*, P. E. Gill, G. H. Golub,
       W. Murray, M. A. Saunders (1974), section 3
    """

    likelihood = (dist.MultivariateNormal,)
    prior = {"covariance": dist.InverseWishart, "loc": dist.MultivariateNormal}
    form = (
        "The form is cov ~ InverseWishart(concentration, scale_matrix), loc ~ "
        "MultivariateNormal(mean, cov / kappa), x ~ MultivariateNormal(loc[z], "
        "cov[z]), with constants concentration, scale_matrix, mean and kappa."
    )
    positive = frozenset({"kappa"})
    event_dim = {"mean": 1, "scale_matrix": 2}
    location = ("mean", "loc")
    scale: ClassVar[str] = "scale_matrix"

    def parameters(self, theta):
        return {"loc": theta["loc"], "covariance_matrix": theta["covariance"]}

    def hyperparameters(self, prior, theta):
        return {
            "mean": prior["loc"].mean,
            "kappa": _factor_between(prior["loc"].covariance_matrix, theta["covariance"]),
            "concentration": prior["covariance"].concentration,
            "scale_matrix": prior["covariance"].scale_matrix,
        }

    def hyper_error(self, hyper):
        error = _matrix_error(self.scale, hyper[self.scale])
        if error is not None:
            return error
        concentration = np.asarray(hyper["concentration"])
        size = hyper[self.scale].shape[-1]
        bad = ~(concentration > size - 1)
        if bad.any():
            return (
                f"has a concentration of {concentration[bad].flat[0]:g}; in {size} "
                f"dimensions it must be more than {size - 1}"
            )
        return None

    def data_error(self, x, hyper):
        return _coordinate_error(x)

    def theta(self, hyper, sample):
        fn = dist.InverseWishart(
            hyper["concentration"], scale_matrix=hyper["scale_matrix"]
        )
        covariance = _definite(sample("covariance", fn))
        spread = covariance / jnp.asarray(hyper["kappa"])[..., None, None]
        fn = dist.MultivariateNormal(hyper["mean"], covariance_matrix=spread)
        return {"covariance": covariance, "loc": sample("loc", fn)}

    def empty(self, hyper):
        # NB: XLA moves the factorisation, of constants, out of the loop over moves.
        inverse = _inverse_factor(hyper[self.scale])
        return jnp.zeros((), inverse.dtype), hyper["mean"], inverse

    def add(self, hyper, stat, x):
        count, mean, inverse = stat
        kappa = hyper["kappa"] + count
        delta = x - mean
        step = 1 / (kappa + 1)
        inverse = _raise(inverse, delta, kappa * step)
        return count + 1, mean + delta * step, inverse

    def remove(self, hyper, stat, x):
        count, mean, inverse = stat
        left = count - 1
        empty = self.empty(hyper)
        # Of the cluster without the value; one that is emptied is taken care of below.
        kappa = hyper["kappa"] + jnp.maximum(left, 1)
        delta = x - mean
        rest = mean - delta / kappa
        # The determinant shrinks to what the value has left of it, which is the more
        # the larger the scale matrix is without it: at least as if that were the
        # prior's.
        whole = jnp.sum((empty[2] @ (x - rest)) ** 2)
        floor = 1 / (1 + kappa / (kappa + 1) * whole)
        inverse = _lower(inverse, delta, (kappa + 1) / kappa, floor)
        # An emptied cluster starts again from nothing, not from rounding errors.
        return (
            left,
            jnp.where(left > 0, rest, empty[1]),
            jnp.where(left > 0, inverse, empty[2]),
        )

    def merge(self, hyper, a, b):
        # The scale matrices added, the prior's taken off, which is in both, and the
        # same with the parts of the means.
        _, origin, prior = self.empty(hyper)
        kappa0 = hyper["kappa"]
        kappa_a, kappa_b = kappa0 + a[0], kappa0 + b[0]
        kappa = kappa_a + b[0]
        share = jnp.maximum(b[0], 1)
        mean_b = b[1] + (b[1] - origin) * (kappa0 / share)
        between = jnp.sqrt(kappa_a * b[0] / kappa) * (mean_b - a[1])
        own = jnp.sqrt(kappa0 * b[0] / kappa_b) * (mean_b - origin)

        # NB: matrices as factors, and what is taken off last: all of them together are
        # at most three times the result, so that nothing cancels.
        def change(step):
            def one(inverse, v):
                return step(inverse, v), None

            return one

        tiny = jnp.finfo(prior.dtype).eps
        more = jnp.concatenate([_inverse(b[2]).T, between[None]])
        less = jnp.concatenate([_inverse(prior).T, own[None]])
        inverse, _ = lax.scan(change(lambda w, v: _raise(w, v, 1)), a[2], more)
        inverse, _ = lax.scan(change(lambda w, v: _lower(w, v, 1, tiny)), inverse, less)
        mean = a[1] + (mean_b - a[1]) * (b[0] / kappa)
        whole = a[0] + b[0], mean, inverse
        whole = jax.tree.map(lambda w, a: jnp.where(b[0] > 0, w, a), whole, a)
        return jax.tree.map(lambda w, b: jnp.where(a[0] > 0, w, b), whole, b)

    def posterior(self, hyper, stat):
        # Murphy (2007), Eqs. 251-254.
        count, mean, inverse = stat
        factor = _inverse(inverse)
        return {
            "mean": mean,
            "kappa": hyper["kappa"] + count,
            "concentration": hyper["concentration"] + count,
            self.scale: jnp.where(
                count > 0, _definite(factor @ factor.T), hyper[self.scale]
            ),
        }

    def log_marginal(self, hyper, stat):
        # Murphy (2007), Eq. 266, by dimension, that is by factor of the determinants
        # and of the multivariate gamma functions.
        count, _, inverse = stat
        _, _, prior = self.empty(hyper)
        degrees = hyper["concentration"] - jnp.arange(inverse.shape[-1])
        per_variance = jnp.diagonal(inverse) ** 2
        growth = jnp.log(jnp.diagonal(prior) / jnp.diagonal(inverse))
        each = log_rising(degrees / 2, count / 2, jnp.pi / per_variance)
        each = each - hyper["concentration"] * growth
        size = inverse.shape[-1]
        return each.sum() - 0.5 * size * jnp.log1p(count / hyper["kappa"])

    def predictive(self, hyper, stat):
        # Student-t, Murphy (2007), Eq. 258: location, inverse Cholesky factor of the
        # scale times the degrees of freedom, exponent, log normaliser.
        count, mean, inverse = stat
        kappa = hyper["kappa"] + count
        degrees = hyper["concentration"] + count
        inverse = inverse * jnp.sqrt(kappa / (kappa + 1))
        each = log_gamma_half_step((degrees - jnp.arange(mean.shape[-1])) / 2)
        each = each + jnp.log(jnp.diagonal(inverse) / jnp.sqrt(jnp.pi))
        return mean, inverse.T.reshape(-1), (degrees + 1) / 2, each.sum()

    def score(self, table, x):
        location, columns, exponent, constant = table
        square = _square_norm(columns, x - location)
        return constant - exponent * log1p_nonnegative(square)


class MultivariateNormalWishart(MultivariateNormalInverseWishart):
    r"""
    :class:`MultivariateNormalInverseWishart` written by precision matrix:
    ``x ~ MultivariateNormal(loc, precision_matrix=prec)`` with ``prec ~
    Wishart(concentration, rate_matrix=rate_matrix)`` and ``loc ~
    MultivariateNormal(mean, precision_matrix=kappa * prec)``. The matrices may be
    written by any of NumPyro's parameters.

    Hyperparameters: `mean` ``[p]`` of the cluster means; `kappa` > 0, the number of
    values that the prior mean counts for; `concentration` > p - 1, the degrees of
    freedom, and `rate_matrix` ``[p, p]`` of the Wishart, the inverse of its scale
    matrix (and the scale matrix of the inverse Wishart over covariances).

    Statistics: as of :class:`MultivariateNormalInverseWishart`.

    **References:**

    1. *Conjugate Bayesian analysis of the Gaussian distribution*, K. P. Murphy (2007),
       section 8
    """

    prior = {"precision": dist.Wishart, "loc": dist.MultivariateNormal}
    form = (
        "The form is prec ~ Wishart(concentration, rate_matrix=rate_matrix), loc ~ "
        "MultivariateNormal(mean, precision_matrix=kappa * prec), x ~ "
        "MultivariateNormal(loc[z], precision_matrix=prec[z]), with constants "
        "concentration, rate_matrix, mean and kappa."
    )
    event_dim = {"mean": 1, "rate_matrix": 2}
    scale = "rate_matrix"

    def parameters(self, theta):
        return {"loc": theta["loc"], "precision_matrix": theta["precision"]}

    def hyperparameters(self, prior, theta):
        return {
            "mean": prior["loc"].mean,
            "kappa": _factor_between(theta["precision"], prior["loc"].precision_matrix),
            "concentration": prior["precision"].concentration,
            "rate_matrix": prior["precision"].rate_matrix,
        }

    def theta(self, hyper, sample):
        fn = dist.Wishart(hyper["concentration"], rate_matrix=hyper["rate_matrix"])
        precision = _definite(sample("precision", fn))
        tightness = precision * jnp.asarray(hyper["kappa"])[..., None, None]
        fn = dist.MultivariateNormal(hyper["mean"], precision_matrix=tightness)
        return {"precision": precision, "loc": sample("loc", fn)}


class MultivariateNormalKnownCovariance(AbstractConjugatePair):
    r"""
    ``x ~ MultivariateNormal(loc, covariance_matrix)`` with a known covariance matrix,
    the same in all rows, and ``loc ~ MultivariateNormal(mean, covariance0)``. The
    covariance matrices may be written by any of NumPyro's parameters.

    Hyperparameters: `mean` ``[p]`` and covariance matrix `covariance0` ``[p, p]`` of
    the cluster means; and the known `covariance_matrix` ``[p, p]`` of the values.

    Statistics: count, mean, and sum of squared Mahalanobis distances from that mean.

    In coordinates in which the known covariance matrix is the identity and
    `covariance0` diagonal, all dimensions are independent, each as
    :class:`NormalKnownScale`; so no matrix is factored for a cluster.

    **References:**

    1. *Bayesian Data Analysis*, A. Gelman et al., 3rd edition (2013), section 3.5
    2. *Matrix Computations*, G. H. Golub, C. F. Van Loan, 4th edition (2013),
       section 8.7
    """

    likelihood = (dist.MultivariateNormal,)
    prior = {"loc": dist.MultivariateNormal}
    given = ("covariance_matrix",)
    form = (
        "The form is loc ~ MultivariateNormal(mean, covariance0), x ~ "
        "MultivariateNormal(loc[z], covariance_matrix), with constants mean, "
        "covariance0 and covariance_matrix."
    )
    event_dim = {"mean": 1, "covariance0": 2, "covariance_matrix": 2}
    location = ("mean", "loc")

    def parameters(self, theta):
        return {"loc": theta["loc"]}

    def hyperparameters(self, prior, theta):
        del theta
        fn = prior["loc"]
        return {"mean": fn.mean, "covariance0": fn.covariance_matrix}

    def hyper_error(self, hyper):
        for name in ("covariance0", "covariance_matrix"):
            error = _matrix_error(name, hyper[name])
            if error is not None:
                return error
        return None

    def data_error(self, x, hyper):
        return _coordinate_error(x)

    def theta(self, hyper, sample):
        fn = dist.MultivariateNormal(
            hyper["mean"], covariance_matrix=hyper["covariance0"]
        )
        return {"loc": sample("loc", fn)}

    def empty(self, hyper):
        zero = jnp.zeros_like(hyper["mean"])
        return zero[0], zero, zero[0]

    def add(self, hyper, stat, x):
        before, mean, square = stat
        count = before + 1
        delta = x - mean
        distance = jnp.sum((_axes(hyper)[0] @ delta) ** 2)
        return count, mean + delta / count, square + distance * (before / count)

    def remove(self, hyper, stat, x):
        count, mean, square = stat
        left = count - 1
        rest = jnp.maximum(left, 1)
        delta = x - mean
        distance = jnp.sum((_axes(hyper)[0] @ delta) ** 2)
        square = square - distance * (count / rest)
        # An emptied cluster starts again from nothing, not from rounding errors.
        return (
            left,
            jnp.where(left > 0, mean - delta / rest, 0),
            jnp.where(left > 1, jnp.maximum(square, 0), 0),
        )

    def merge(self, hyper, a, b):
        count = a[0] + b[0]
        share = b[0] / jnp.maximum(count, 1)
        delta = b[1] - a[1]
        distance = jnp.sum((_axes(hyper)[0] @ delta) ** 2)
        return count, a[1] + delta * share, a[2] + b[2] + distance * a[0] * share

    def posterior(self, hyper, stat):
        # `precision` is the data's, in units of the prior's, along each axis.
        count, mean, _ = stat
        axes, back, ratio = _axes(hyper)
        precision = count * ratio
        shift = axes @ (mean - hyper["mean"]) * (precision / (1 + precision))
        scaled = back * jnp.sqrt(ratio / (1 + precision))
        return {
            "mean": hyper["mean"] + back @ shift,
            "covariance0": jnp.where(
                count > 0, _definite(scaled @ scaled.T), hyper["covariance0"]
            ),
        }

    def log_marginal(self, hyper, stat):
        count, mean, square = stat
        axes, back, ratio = _axes(hyper)
        precision = count * ratio
        shift = axes @ (mean - hyper["mean"])
        square = square + jnp.sum(count * shift**2 / (1 + precision))
        each = 0.5 * jnp.log(2 * jnp.pi) * len(ratio) + _half_log_det(hyper)
        return -count * each - 0.5 * square - 0.5 * jnp.log1p(precision).sum()

    def predictive(self, hyper, stat):
        # Normal: mean, inverse Cholesky factor of twice the covariance matrix (but for
        # a rotation), log normaliser.
        count, mean, _ = stat
        axes, back, ratio = _axes(hyper)
        precision = count * ratio
        shift = axes @ (mean - hyper["mean"]) * (precision / (1 + precision))
        weight = 0.5 / (1 + ratio / (1 + precision))
        constant = 0.5 * jnp.log(weight / jnp.pi).sum() - _half_log_det(hyper)
        columns = (jnp.sqrt(weight)[:, None] * axes).T.reshape(-1)
        return hyper["mean"] + back @ shift, columns, constant

    def score(self, table, x):
        mean, columns, constant = table
        return constant - _square_norm(columns, x - mean)


# --- Matrices as inverse Cholesky factors ---------------------------------------------


def _inverse(factor):
    """Inverse of a lower triangular matrix."""
    return solve_triangular(factor, jnp.eye(len(factor), dtype=factor.dtype), lower=True)


def _inverse_factor(matrix):
    """``W`` with ``inv(matrix) = W.T @ W``, lower triangular."""
    return jnp.tril(_inverse(jnp.linalg.cholesky(matrix)))


def _raise(inverse, v, weight):
    """The inverse factor after ``weight * outer(v, v)`` was added to the matrix."""
    y = inverse @ v
    squares = weight * y * y
    after = 1 + _running_sum(squares)
    before = jnp.concatenate([jnp.ones_like(after[:1]), after[:-1]])
    return _rotate(inverse, y, weight, before, after)


def _lower(inverse, v, weight, floor):
    """
    The inverse factor after ``weight * outer(v, v)`` was taken off the matrix. Its
    determinant falls to no less than the share `floor` > 0.
    """
    y = inverse @ v
    squares = weight * y * y
    # From the end, where all is taken off, so that no share is a difference again.
    left = jnp.maximum(1 - jnp.sum(squares), floor)
    before = left + _running_sum(squares, reverse=True)
    after = jnp.concatenate([before[1:], left[None]])
    return _rotate(inverse, y, -weight, before, after)


def _rotate(inverse, y, weight, before, after):
    """
    Inverse factor of ``L @ (I + weight * outer(y, y)) @ L.T``, where `inverse` is that
    of ``L @ L.T``. Leading minors of the matrix in brackets: `after`, and `before`
    those one smaller.

    Row i of the inverse factor is what is left of coordinate i when it is regressed
    upon those before it.
    """
    rows = y[:, None] * inverse
    earlier = _running_sum(rows) - rows
    return (inverse - (weight * y / before)[:, None] * earlier) * jnp.sqrt(
        before / after
    )[:, None]


def _running_sum(values, reverse=False):
    # NB: jnp.cumsum takes time of the square of the length on a CPU.
    return lax.associative_scan(jnp.add, values, reverse)


def _definite(matrix):
    """
    Symmetric positive definite in floating point too: a matrix that is so nearly
    singular that rounding could make it indefinite gets a rounding error's worth more
    on its diagonal.
    """
    size = matrix.shape[-1]
    eye = jnp.eye(size, dtype=matrix.dtype)
    return matrix * (1 + 4 * size * jnp.finfo(matrix.dtype).eps * eye)


def _square_norm(columns, v):
    """Squared norm of ``matrix @ v``; `columns` are those of the matrix, end to end."""
    # NB: not a matrix, nor a sum over an axis. For all clusters at once XLA would not
    # vectorise the one, and hand the other to a library that takes 0.1 ms a call.
    p = len(v)
    y = sum(columns[j * p : (j + 1) * p] * v[j] for j in range(p))
    return sum(y[i] ** 2 for i in range(p))


def _axes(hyper):
    """
    ``T``, its inverse, and ``r`` with ``T @ covariance_matrix @ T.T = I`` and ``T @
    covariance0 @ T.T = diag(r)``.
    """
    # NB: XLA moves this, a function of constants, out of the loop over moves.
    factor = jnp.linalg.cholesky(hyper["covariance_matrix"])
    half = solve_triangular(factor, hyper["covariance0"], lower=True)
    both = solve_triangular(factor, half.T, lower=True)
    ratio, axes = jnp.linalg.eigh(both)
    return axes.T @ _inverse(factor), factor @ axes, jnp.maximum(ratio, 0)


def _half_log_det(hyper):
    factor = jnp.linalg.cholesky(hyper["covariance_matrix"])
    return jnp.log(jnp.diagonal(factor)).sum()


# --- Reading a model ------------------------------------------------------------------


def _factor_between(a, b):
    """
    The number that `b` is of the positive definite `a`, ``[..., p, p]``. If `b` is no
    multiple of `a`, a number that changes with them.
    """
    size = jnp.sqrt(jnp.diagonal(a, axis1=-2, axis2=-1))
    factor = b[..., 0, 0] / a[..., 0, 0]
    gap = b / factor[..., None, None] - a
    gap = jnp.abs(gap / (size[..., :, None] * size[..., None, :])).max((-1, -2))
    # A multiple to rounding is one, and the factor is read exactly.
    return factor * (1 + jnp.where(gap > jnp.finfo(gap.dtype).eps ** 0.5, gap, 0))


def _matrix_error(name, matrix):
    scale = np.sqrt(np.abs(np.diagonal(matrix, axis1=-2, axis2=-1)))
    size = scale[..., :, None] * scale[..., None, :]
    gap = np.abs(matrix - np.swapaxes(matrix, -1, -2))
    if not np.all(gap <= 1e-6 * size):
        return f"has a `{name}` that is not symmetric"
    if not np.all(np.linalg.eigvalsh(matrix) > 0):
        return f"has a `{name}` that is not positive definite"
    return None


def _coordinate_error(x):
    for j in range(x.shape[-1]):
        error = NormalInverseGamma().data_error(x[..., j], {})
        if error is not None:
            return f"in coordinate {j} {error}"
    return None
