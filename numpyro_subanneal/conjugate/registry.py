# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""Which pairs are known."""

from collections.abc import Iterable

import numpyro.distributions as dist

from numpyro_subanneal.conjugate.base import AbstractConjugatePair
from numpyro_subanneal.conjugate.dirichlet import DirichletCategorical
from numpyro_subanneal.conjugate.normal import NormalInverseGamma

PAIRS: tuple[AbstractConjugatePair, ...] = (
    NormalInverseGamma(),
    DirichletCategorical(),
)


def candidates(
    likelihood: type[dist.Distribution], prior: Iterable[type[dist.Distribution]]
) -> list[AbstractConjugatePair]:
    """
    Registered pairs for an observed site of type `likelihood` whose cluster sites have
    the types `prior`, in any order.
    """
    names = sorted(t.__name__ for t in prior)
    return [
        pair
        for pair in for_likelihood(likelihood)
        if sorted(t.__name__ for t in pair.prior.values()) == names
    ]


def for_likelihood(likelihood: type[dist.Distribution]) -> list[AbstractConjugatePair]:
    """Registered pairs for an observed site of type `likelihood`."""
    return [pair for pair in PAIRS if likelihood in pair.likelihood]
