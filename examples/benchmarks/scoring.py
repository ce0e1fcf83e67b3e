# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""
Scores of partitions that do not depend on what found them
==========================================================

:func:`score` is the mean log predictive density of held-out rows, in nats, given the
views of the columns and the clusters of the training rows: of a new row under the
Chinese restaurant process and conjugate clusters, parameters integrated out. Every
prior is the one of largest marginal likelihood on a grid, given the partition. So it is
the quality of the partition alone that counts, not a sampler's hyperparameters, nor how
it averages over them.

A table is an array of floats, NaN where a cell is missing; a column has so many
categories, coded from 0, or 0 if it is real. Nothing here is of `numpyro_subanneal`
but the adjusted Rand index.
"""

import numpy as np
from scipy.special import gammaln, logsumexp, multigammaln

from numpyro_subanneal.partitions import adjusted_rand

CONCENTRATIONS = np.geomspace(0.05, 50, 40)
STRENGTHS = np.geomspace(0.01, 30, 25)
KAPPAS = 0.01, 0.03, 0.1, 0.3, 1.0
SHAPES = 0.5, 1.5, 5.0
SHARES = 0.003, 0.01, 0.03, 0.1, 0.3, 1.0  # of a column's variance


def score(x, num_categories, train, test, views, clusters) -> float:
    """
    :param x: table ``[N, D]``.
    :param num_categories: ``[D]``, 0 of a real column.
    :param train, test: indices of rows.
    :param views: view of each column, ``[D]``, from 0.
    :param clusters: cluster of each training row in each view, a list of arrays.
    """
    total = np.zeros(len(test))
    for view in np.unique(views):
        _, z = np.unique(clusters[view], return_inverse=True)
        density = log_weights(np.bincount(z))[:, None]
        for d in np.flatnonzero(views == view):
            old, new = x[train, d], x[test, d]
            if num_categories[d]:
                own = _log_categorical(old, z, int(num_categories[d]), new)
            else:
                own = _log_real(old, z, new)
            density = density + np.where(np.isnan(new), 0, own)
        total += logsumexp(density, 0)
    return float(total.mean())


def score_ellipses(x, train, test, z) -> float:
    """The same of one view with a covariance matrix for each cluster (Murphy, 2007)."""
    _, z = np.unique(z, return_inverse=True)
    old, new = x[train], x[test] - x[train].mean(0)
    old = old - old.mean(0)
    p, k = x.shape[1], z.max() + 2  # the last has no rows
    n = np.bincount(z, minlength=k).astype(float)
    mean = np.stack([np.bincount(z, old[:, d], minlength=k) for d in range(p)], 1)
    mean /= np.maximum(n, 1)[:, None]
    rest = old - mean[z]
    spread = np.zeros((k, p, p))
    for i in range(p):
        for j in range(p):
            spread[:, i, j] = np.bincount(z, rest[:, i] * rest[:, j], minlength=k)
    best = -np.inf
    for kappa in KAPPAS:
        for extra in (1.0, 3.0, 10.0):
            for share in SHARES:
                df = p + extra
                prior = np.cov(old.T) * share * df
                between = (kappa * n / (kappa + n))[:, None, None]
                scale = prior + spread + between * mean[:, :, None] * mean[:, None, :]
                marginal = (
                    multigammaln((df + n) / 2, p)
                    - multigammaln(df / 2, p)
                    + df / 2 * np.linalg.slogdet(prior)[1]
                    - (df + n) / 2 * np.linalg.slogdet(scale)[1]
                    + p / 2 * np.log(kappa / (kappa + n))
                    - n * p / 2 * np.log(np.pi)
                ).sum()
                if marginal > best:
                    best, found = marginal, (kappa, df, scale)
    kappa, df, scale = found
    kappa, df = kappa + n, df + n - p + 1
    scale = scale * ((kappa + 1) / (kappa * df))[:, None, None]
    centre = mean * (n / kappa)[:, None]
    y = np.linalg.solve(
        np.linalg.cholesky(scale), (new[None] - centre[:, None]).swapaxes(1, 2)
    )
    df = df[:, None]
    density = (
        gammaln((df + p) / 2)
        - gammaln(df / 2)
        - p / 2 * np.log(df * np.pi)
        - np.linalg.slogdet(scale)[1][:, None] / 2
        - (df + p) / 2 * np.log1p((y**2).sum(1) / df)
    )
    return float(logsumexp(log_weights(n[:-1])[:, None] + density, 0).mean())


def log_weights(counts):
    """Of the clusters and of a new one, by the best concentration, ``[K + 1]``."""
    n, a = counts.sum(), CONCENTRATIONS
    marginal = len(counts) * np.log(a) + gammaln(a) - gammaln(a + n)
    a = a[marginal.argmax()]
    return np.log(np.append(counts, a) / (n + a))


def _log_categorical(old, z, size, new):
    """Predictive density of each new cell in each cluster and a new one."""
    seen = ~np.isnan(old)
    num = z.max() + 2
    counts = np.bincount(
        z[seen] * size + old[seen].astype(int), minlength=num * size
    ).reshape(num, size)
    a = STRENGTHS[:, None]
    total = counts.sum(1)
    marginal = (gammaln(size * a) - gammaln(size * a + total)).sum(1)
    marginal += (gammaln(a[..., None] + counts) - gammaln(a[..., None])).sum((1, 2))
    a = STRENGTHS[marginal.argmax()]
    density = np.log(counts + a) - np.log(total + size * a)[:, None]
    return density[:, np.nan_to_num(new).astype(int)]


def _log_real(old, z, new):
    """The same of a real column, a Student t (Murphy, 2007, Eq. 100)."""
    seen = ~np.isnan(old)
    num = z.max() + 2
    z, old = z[seen], old[seen]
    centre, variance = (old.mean(), old.var()) if len(old) else (0.0, 1.0)
    variance = variance or 1.0
    n = np.bincount(z, minlength=num).astype(float)
    mean = np.bincount(z, old - centre, minlength=num) / np.maximum(n, 1)
    rest = np.bincount(z, (old - centre - mean[z]) ** 2, minlength=num)
    kappa, shape, share = np.meshgrid(KAPPAS, SHAPES, SHARES, indexing="ij")
    kappa, shape, share = (g.reshape(-1, 1) for g in (kappa, shape, share))
    rate = shape * share * variance
    after = rate + (rest + n * kappa / (kappa + n) * mean**2) / 2
    marginal = (
        gammaln(shape + n / 2)
        - gammaln(shape)
        + np.log(kappa / (kappa + n)) / 2
        + shape * np.log(rate)
        - (shape + n / 2) * np.log(after)
        - n / 2 * np.log(2 * np.pi)
    ).sum(1)
    i = marginal.argmax()
    kappa, shape, rate = kappa[i, 0] + n, shape[i, 0] + n / 2, after[i]
    scale = rate * (kappa + 1) / (kappa * shape)
    y = (new[None] - centre) - (n / kappa * mean)[:, None]
    df, scale = 2 * shape[:, None], scale[:, None]
    return (
        gammaln((df + 1) / 2)
        - gammaln(df / 2)
        - np.log(df * np.pi * scale) / 2
        - (df + 1) / 2 * np.log1p(y**2 / (df * scale))
    )


def agreement(views, clusters, true_views, true_clusters) -> tuple[float, float]:
    """
    Adjusted Rand index of the columns, and the mean of that of the rows of each true
    view with the found view that has most of its columns.
    """
    rows = []
    for v, truth in enumerate(true_clusters):
        own = np.bincount(views[true_views == v]).argmax()
        rows.append(float(adjusted_rand(np.asarray(clusters[own]), truth)))
    # Of a single view that is found the index is 0 / 0, or 1.
    columns = 1.0 if len(set(views)) == len(set(true_views)) == 1 else None
    if columns is None:
        columns = float(adjusted_rand(np.asarray(views), np.asarray(true_views)))
    return columns, float(np.mean(rows))
