# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""Mixture models as plain NumPyro functions; installed as `numpyro_subanneal.models`.

:mod:`~numpyro_subanneal.models.dpmm`, :mod:`~numpyro_subanneal.models.pitman_yor` and
:mod:`~numpyro_subanneal.models.crosscat` each have `real`, `categorical` and `mixed`
for tables of real columns, of category codes, and of both;
:mod:`~numpyro_subanneal.models.mixture` has one for columns of all kinds.
"""
