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

    Statistics: count; mean of the posterior; the upper triangular :math:`R` with
    :math:`\Psi_n = R^\top R`, the scale matrix of the posterior; and
    :math:`R^{-\top}`, by which to score a value takes a product. To add or remove a
    value changes :math:`\Psi_n` by a multiple of an outer product, and both matrices
    in :math:`O(p^2)`.

    .. note:: To remove a value that lies :math:`r` times as far out as the rest of its
        cluster (in units of the scale matrix that is left, which the prior's is part
        of) leaves a relative error of about :math:`r^2` roundings in the variance along
        its direction, :math:`10^{-7} r^2` in float32. The error lasts until the
        statistics are built anew from the data, as they are at every step. Whatever is
        removed, the matrix stays positive definite: its Cholesky factor keeps a
        diagonal of at least the prior's.

    **References:**

    1. *Conjugate Bayesian analysis of the Gaussian distribution*, K. P. Murphy (2007),
       section 9
    2. *Methods for Modifying Matrix Factorizations*, P. E. Gill, G. H. Golub,
       W. Murray, M. A. Saunders (1974), modification of Cholesky factors
    3. *A Note on Downdating the Cholesky Factorization*, A. W. Bojanczyk, R. P. Brent,
       P. Van Dooren, F. R. de Hoog (1987)
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
            "kappa": _factor_between(
                prior["loc"].covariance_matrix, theta["covariance"]
            ),
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
        roots = _roots(hyper[self.scale])
        return jnp.zeros((), roots.dtype), hyper["mean"], roots

    def add(self, hyper, stat, x):
        count, mean, roots = stat
        kappa = hyper["kappa"] + count
        delta = x - mean
        step = 1 / (kappa + 1)
        roots = _raise(roots, delta * jnp.sqrt(kappa * step))
        return count + 1, mean + delta * step, roots

    def remove(self, hyper, stat, x):
        count, mean, roots = stat
        left = count - 1
        empty = self.empty(hyper)
        # Of the cluster without the value; one that is emptied is taken care of below.
        kappa = hyper["kappa"] + jnp.maximum(left, 1)
        delta = x - mean
        v = delta * jnp.sqrt((kappa + 1) / kappa)
        rest = left, mean - delta / kappa, _lower(roots, v, empty[2])
        # An emptied cluster starts again from nothing, not from rounding errors.
        return tuple(
            jnp.where(left > 0, r, e) for r, e in zip(rest, empty, strict=True)
        )

    def merge(self, hyper, a, b):
        _, origin, prior = self.empty(hyper)
        kappa0 = hyper["kappa"]
        kappa = kappa0 + a[0] + b[0]
        mean_b = b[1] + (b[1] - origin) * (kappa0 / jnp.maximum(b[0], 1))
        # The scale matrices added, what is in both of them taken off, and the same for
        # the parts of the means. What is taken off comes last: all that is added is at
        # most three times the result, so that nothing cancels.
        between = (mean_b - a[1]) * jnp.sqrt((kappa0 + a[0]) * b[0] / kappa)
        own = (mean_b - origin) * jnp.sqrt(kappa0 * b[0] / (kappa0 + b[0]))
        roots, _ = lax.scan(
            lambda roots, v: (_raise(roots, v), None),
            a[2],
            jnp.concatenate([_factor(b[2]), between[None]]),
        )
        roots, _ = lax.scan(
            lambda roots, v: (_lower(roots, v, prior), None),
            roots,
            jnp.concatenate([_factor(prior), own[None]]),
        )
        whole = a[0] + b[0], a[1] + (mean_b - a[1]) * (b[0] / kappa), roots
        whole = jax.tree.map(lambda w, a: jnp.where(b[0] > 0, w, a), whole, a)
        return jax.tree.map(lambda w, b: jnp.where(a[0] > 0, w, b), whole, b)

    def rebase(self, old, new, stat):
        # The sample mean and the scatter about it stay; the prior's parts change.
        count, mean, roots = stat
        _, origin, prior = self.empty(old)
        empty = self.empty(new)
        share = old["kappa"] / jnp.maximum(count, 1)
        sample_mean = mean + (mean - origin) * share

        def between(hyper):
            delta = sample_mean - hyper["mean"]
            kappa = hyper["kappa"] * count / (hyper["kappa"] + count)
            return kappa * jnp.outer(delta, delta)

        changed = _square(empty[2]) - _square(prior)
        changed = _square(roots) + changed + (between(new) - between(old))
        share = count / (new["kappa"] + count)
        mean = new["mean"] + (sample_mean - new["mean"]) * share
        rest = count, mean, _roots(changed)
        return tuple(
            jnp.where(count > 0, r, e) for r, e in zip(rest, empty, strict=True)
        )

    def posterior(self, hyper, stat):
        # Murphy (2007), Eqs. 251-254.
        count, mean, roots = stat
        return {
            "mean": mean,
            "kappa": hyper["kappa"] + count,
            "concentration": hyper["concentration"] + count,
            self.scale: jnp.where(
                count > 0, _definite(_square(roots)), hyper[self.scale]
            ),
        }

    def log_marginal(self, hyper, stat):
        # Murphy (2007), Eq. 266, by dimension, that is by factor of the determinants
        # and of the multivariate gamma functions.
        count, _, roots = stat
        prior = self.empty(hyper)[2]
        prior, root = (jnp.diagonal(_factor(r)) for r in (prior, roots))
        size = len(root)
        degrees = hyper["concentration"] - jnp.arange(size)
        rising = log_rising(degrees / 2, count / 2, jnp.pi * root**2)
        each = rising - hyper["concentration"] * jnp.log(root / prior)
        return each.sum() - 0.5 * size * jnp.log1p(count / hyper["kappa"])

    def predictive(self, hyper, stat):
        # Student-t, Murphy (2007), Eq. 258: location, inverse Cholesky factor of the
        # scale matrix times the degrees of freedom, exponent, log normaliser.
        count, mean, roots = stat
        kappa = hyper["kappa"] + count
        degrees = hyper["concentration"] + count
        inverse = _whitener(roots) * jnp.sqrt(kappa / (kappa + 1))
        each = log_gamma_half_step((degrees - jnp.arange(len(mean))) / 2)
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
    in_statistics = frozenset({"covariance_matrix"})
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


# --- Triangular matrices --------------------------------------------------------------

# The upper triangular `R` with ``R.T @ R`` a given matrix, and the inverse of ``R.T``,
# side by side: ``[p, 2 p]``. One loop turns the rows of both.


def _roots(matrix):
    factor = jnp.linalg.cholesky(matrix)
    return jnp.concatenate([factor.T, _inverse(factor)], -1)


def _factor(roots):
    return roots[:, : len(roots)]


def _whitener(roots):
    """The inverse of ``R.T``."""
    return roots[:, len(roots) :]


def _square(roots):
    """The matrix that `roots` are of."""
    return _factor(roots).T @ _factor(roots)


def _raise(roots, v):
    """
    Of the matrix plus ``outer(v, v)``, by Givens rotations: Gill et al. (1974),
    section 3.
    """

    def rotate(rest, row, k):
        length = jnp.sqrt(row[k] ** 2 + rest[k] ** 2)
        c, s = row[k] / length, rest[k] / length
        return c * rest - s * row, c * row + s * rest

    return _rotated(rotate, roots, v)


def _lower(roots, v, prior):
    """
    Of the matrix minus ``outer(v, v)``, by hyperbolic rotations in the mixed form of
    Bojanczyk et al. (1987).

    What is left is known to be no less than the matrix that `prior` are the roots of;
    so neither is the diagonal of its factor, whose columns are no longer than they
    were; and no column of the inverse is longer than that of `prior`. Rounding errors
    are held within these bounds, so that the result is finite and positive definite.
    """
    index = np.arange(2 * len(v))
    least = jnp.diagonal(_factor(prior))
    parts = _factor(roots), _whitener(prior)
    longest = jnp.concatenate([jnp.sqrt(jnp.sum(part**2, 0)) for part in parts])
    # NB: the barrier keeps XLA from summing again in each of the rotations.
    longest = lax.optimization_barrier(longest)

    def rotate(rest, row, k):
        a, b = row[k], rest[k]
        length = jnp.sqrt(jnp.maximum((a - b) * (a + b), 0))
        short = length < least[k]
        c = jnp.where(short, jnp.minimum(least[k] / a, 1), length / a)
        s = jnp.where(short, jnp.sign(b) * jnp.sqrt((1 - c) * (1 + c)), b / a)
        # NB: or XLA computes both again in every element of the rows.
        c, s = lax.optimization_barrier(jnp.stack([c, s]))
        turned = jnp.clip((row - s * rest) / c, -longest, longest)
        row = jnp.where(index == k, c * a, turned)
        return c * rest - s * row, row

    return _rotated(rotate, roots, v)


def _rotated(rotate, roots, v):
    size = len(v)
    index = np.arange(2 * size)

    def each(rest, row_and_k):
        row, k = row_and_k
        rest, row = rotate(rest, row, k)
        # The rotation is such that this entry is turned to zero.
        return jnp.where(index == k, 0, rest), row

    rest = jnp.concatenate([v, jnp.zeros_like(v)])
    # NB: a loop, which XLA compiles in less time than the same without a loop, and runs
    # as fast or faster.
    return lax.scan(each, rest, (roots, jnp.arange(size)))[1]


def _inverse(factor):
    """Inverse of a lower triangular matrix."""
    eye = jnp.eye(len(factor), dtype=factor.dtype)
    return solve_triangular(factor, eye, lower=True)


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
