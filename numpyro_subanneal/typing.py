# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""Shape glossary.

Shapes in docstrings name their axes: rows ``N``, features ``D``, clusters ``K`` (the
capacity, where nothing else is said), categories ``C``. Rows are the first axis of
observed values and assignments, clusters the first axis of cluster parameters in a
model and the *last* axis of every array inside the Gibbs moves.
"""

from typing import TypeAlias

import jax

Array: TypeAlias = jax.Array
"""A JAX array; typed PRNG keys are arrays too."""
