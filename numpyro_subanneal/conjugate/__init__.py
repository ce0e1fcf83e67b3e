# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""Conjugate pairs: likelihoods whose cluster parameters integrate out exactly."""

from numpyro_subanneal.conjugate.base import AbstractConjugatePair
from numpyro_subanneal.conjugate.registry import PAIRS, known_pairs, register_conjugate

__all__ = ["PAIRS", "AbstractConjugatePair", "known_pairs", "register_conjugate"]
