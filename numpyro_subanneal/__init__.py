# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""Subsample-annealed collapsed Gibbs sampling for NumPyro."""

from numpyro_subanneal.distributions import (
    ChineseRestaurantProcess,
    PitmanYorProcess,
)
from numpyro_subanneal.kernel import (
    SubsampleAnnealedGibbs,
    SubsampleAnnealedGibbsState,
)
from numpyro_subanneal.plan import NotRecognised, explain
from numpyro_subanneal.schedule import (
    AbstractSchedule,
    LinearSchedule,
    PriorGibbs,
    SequentialGibbs,
)

__version__ = "0.1.0"

__all__ = [
    "AbstractSchedule",
    "ChineseRestaurantProcess",
    "LinearSchedule",
    "NotRecognised",
    "PitmanYorProcess",
    "PriorGibbs",
    "SequentialGibbs",
    "SubsampleAnnealedGibbs",
    "SubsampleAnnealedGibbsState",
    "explain",
]
