# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""Subsample-annealed collapsed Gibbs sampling for NumPyro."""

from numpyro_subanneal.columns import FeatureMoves
from numpyro_subanneal.conjugate.base import AbstractConjugatePair
from numpyro_subanneal.conjugate.registry import register_conjugate
from numpyro_subanneal.distributions import (
    ChineseRestaurantProcess,
    FiniteDirichletMixture,
    MixtureOfFiniteMixtures,
    PitmanYorProcess,
)
from numpyro_subanneal.grid import Grid
from numpyro_subanneal.kernel import (
    SubsampleAnnealedGibbs,
    SubsampleAnnealedGibbsState,
)
from numpyro_subanneal.plan import NotRecognised, explain
from numpyro_subanneal.posterior import Posterior, cross_validate
from numpyro_subanneal.schedule import (
    AbstractSchedule,
    AcceleratingSchedule,
    LinearSchedule,
    PriorGibbs,
    SequentialGibbs,
    Steps,
)
from numpyro_subanneal.splitmerge import SplitMerge
from numpyro_subanneal.tables import Table

__version__ = "0.1.0"

__all__ = [
    "AbstractConjugatePair",
    "AbstractSchedule",
    "AcceleratingSchedule",
    "ChineseRestaurantProcess",
    "FeatureMoves",
    "FiniteDirichletMixture",
    "Grid",
    "LinearSchedule",
    "MixtureOfFiniteMixtures",
    "NotRecognised",
    "PitmanYorProcess",
    "Posterior",
    "PriorGibbs",
    "SequentialGibbs",
    "SplitMerge",
    "Steps",
    "SubsampleAnnealedGibbs",
    "SubsampleAnnealedGibbsState",
    "Table",
    "cross_validate",
    "explain",
    "register_conjugate",
]
