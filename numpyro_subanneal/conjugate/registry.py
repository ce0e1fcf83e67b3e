# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""Which pairs are known, and how to add one."""

from collections.abc import Mapping

import numpyro.distributions as dist

from numpyro_subanneal.conjugate import (
    beta,
    dirichlet,
    gamma,
    multivariate,
    normal,
    vonmises,
)
from numpyro_subanneal.conjugate.base import AbstractConjugatePair

# Of two pairs that fit a model the first is taken.
PAIRS: tuple[AbstractConjugatePair, ...] = (
    normal.NormalInverseGamma(),
    normal.NormalGamma(),
    normal.NormalKnownMean(),
    normal.NormalKnownScale(),
    normal.NormalKnownScaleByRow(),
    normal.LogNormalInverseGamma(),
    normal.LogNormalGamma(),
    normal.LogNormalKnownMean(),
    normal.LogNormalKnownScale(),
    dirichlet.DirichletCategorical(),
    dirichlet.DirichletCategoricalLogits(),
    dirichlet.DirichletMultinomial(),
    beta.BetaBernoulli(),
    beta.BetaBernoulliLogits(),
    beta.BetaBinomial(),
    beta.BetaBinomialLogits(),
    beta.BetaBinomialByRow(),
    beta.BetaBinomialByRowLogits(),
    beta.BetaGeometric(),
    beta.BetaGeometricLogits(),
    beta.BetaNegativeBinomial(),
    beta.BetaNegativeBinomialLogits(),
    gamma.GammaPoisson(),
    gamma.GammaExponential(),
    gamma.GammaGamma(),
    vonmises.VonMisesKnownConcentration(),
    multivariate.MultivariateNormalInverseWishart(),
    multivariate.MultivariateNormalWishart(),
    multivariate.MultivariateNormalKnownCovariance(),
)

_registered: list[AbstractConjugatePair] = []


def register_conjugate(pair: AbstractConjugatePair) -> AbstractConjugatePair:
    """
    Make a conjugate pair known to
    :class:`~numpyro_subanneal.kernel.SubsampleAnnealedGibbs`.

    It then comes before the built-in pairs, and before those registered earlier, for
    observed sites of its `likelihood` whose cluster sites have the types of its
    `prior`. :func:`numpyro_subanneal.testing.check_conjugate` tests that it obeys the
    laws that the sampler relies on.

    :param AbstractConjugatePair pair: an instance of a class that states the pair.
        Registering another instance of the same class replaces the first.
    :return: `pair`.
    :raises TypeError: if `pair` is not an instance, or states something of a wrong
        type.
    """
    if isinstance(pair, type) and issubclass(pair, AbstractConjugatePair):
        raise TypeError(
            f"`register_conjugate` needs an instance: `register_conjugate("
            f"{pair.__name__}())`."
        )
    if not isinstance(pair, AbstractConjugatePair):
        raise TypeError(
            "`pair` must be an instance of a subclass of `AbstractConjugatePair`, got "
            f"{pair!r}."
        )
    name = type(pair).__name__
    for attribute in ("likelihood", "prior", "form"):
        if not hasattr(pair, attribute):
            raise TypeError(f"{name} lacks the class attribute `{attribute}`.")
    if not isinstance(pair.likelihood, tuple) or not all(
        map(_is_distribution, pair.likelihood)
    ):
        raise TypeError(
            f"{name}: `likelihood` must be a tuple of NumPyro distribution classes, "
            f"got {pair.likelihood!r}."
        )
    if not isinstance(pair.prior, Mapping) or not all(
        map(_is_distribution, pair.prior.values())
    ):
        raise TypeError(
            f"{name}: `prior` must be a dict from roles to NumPyro distribution "
            f"classes, got {pair.prior!r}."
        )
    if len(set(pair.prior.values())) != len(pair.prior):
        raise TypeError(
            f"{name}: the roles of `prior` must have different types, by which the "
            "cluster sites of a model are told apart."
        )
    _registered[:] = [p for p in _registered if type(p) is not type(pair)]
    _registered.insert(0, pair)
    return pair


def _is_distribution(kind) -> bool:
    return isinstance(kind, type) and issubclass(kind, dist.Distribution)


def known_pairs() -> tuple[AbstractConjugatePair, ...]:
    """All pairs, in the order in which they are tried."""
    return (*_registered, *PAIRS)


def match_roles(
    pair: AbstractConjugatePair, prior: Mapping[str, type[dist.Distribution]]
) -> tuple[tuple[str, str], ...] | None:
    """
    Which of the cluster sites, given by name and type, plays which role of `pair`:
    pairs of (role, site), or None if they are not of its types.
    """
    if len(prior) != len(pair.prior):
        return None
    roles = []
    for role, fn in pair.prior.items():
        found = [name for name, kind in prior.items() if issubclass(kind, fn)]
        if len(found) != 1:
            return None
        roles.append((role, found[0]))
    return tuple(roles) if len({name for _, name in roles}) == len(roles) else None


def for_likelihood(likelihood: type[dist.Distribution]) -> list[AbstractConjugatePair]:
    """Known pairs for an observed site of type `likelihood`."""
    return [pair for pair in known_pairs() if likelihood in pair.likelihood]
