# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""Conjugate pairs: likelihoods whose cluster parameters integrate out exactly."""

from numpyro_subanneal.conjugate.base import AbstractConjugatePair
from numpyro_subanneal.conjugate.dirichlet import DirichletCategorical
from numpyro_subanneal.conjugate.normal import NormalInverseGamma

__all__ = ["AbstractConjugatePair", "DirichletCategorical", "NormalInverseGamma"]
