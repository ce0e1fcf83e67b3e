# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""Draws as ArviZ takes them, with the names of rows, columns, clusters and views."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import numpyro
from numpyro import handlers
from numpyro.infer import MCMC

from numpyro_subanneal.kernel import SubsampleAnnealedGibbs
from numpyro_subanneal.posterior import Imputation, Posterior
from numpyro_subanneal.reading import Plan
from numpyro_subanneal.skeleton import Args, Kwargs, Model, feasible, run_trace
from numpyro_subanneal.typing import Array

# Statistics that a composite kernel has as `block_states.<i>.<name>`.
_STATISTICS = (
    "log_joint",
    "num_clusters",
    "num_views",
    "subsample_size",
    "capacity_reached",
    "num_splits",
    "num_merges",
)

_SAMPLE_DIMS = ("chain", "draw")


class Warmup(NamedTuple):
    """
    Draws of the warm-up.

    - **samples** - of every latent site, ``[chains, steps, ...]``.
    - **statistics** - the extra fields, ``[chains, steps, ...]``.
    """

    samples: dict[str, np.ndarray]
    statistics: dict[str, np.ndarray]


def collect_warmup(mcmc: MCMC) -> Warmup:
    """
    The draws of the warm-up, to be kept before `run` takes their place.

    :param MCMC mcmc: after ``mcmc.warmup(..., collect_warmup=True)`` and before its
        `run`.
    :raises ValueError: if that is not what `mcmc` holds.

    **Example**

    .. doctest::

        >>> from functools import partial
        >>> import numpy as np
        >>> from jax import random
        >>> from numpyro.infer import MCMC
        >>> from numpyro_subanneal import SubsampleAnnealedGibbs
        >>> from numpyro_subanneal.inference_data import collect_warmup, to_arviz
        >>> from numpyro_subanneal.models import dpmm

        >>> x = np.random.default_rng(0).normal(size=(40, 2))
        >>> fixed = {"concentration": 1.0, "kappa": 0.3, "shape": 3.0}
        >>> model = partial(dpmm.real, num_clusters=16, **fixed)
        >>> mcmc = MCMC(SubsampleAnnealedGibbs(model), num_warmup=8,
        ...             num_samples=8, progress_bar=False)
        >>> mcmc.warmup(random.key(0), x, collect_warmup=True)
        >>> warmup = collect_warmup(mcmc)
        >>> mcmc.run(random.key(1), x)
        >>> data = to_arviz(mcmc, warmup=warmup)
        >>> data["warmup_posterior"]["z"].dims
        ('chain', 'draw', 'rows')
        >>> data["warmup_posterior"]["subsample_size"].values
        array([ 5, 10, 15, 20, 25, 30, 35, 40], dtype=int32)
    """
    if not _after_warmup(mcmc):
        raise ValueError(
            "`mcmc` does not hold the draws of a warm-up. Call this after "
            "`mcmc.warmup(..., collect_warmup=True)` and before `mcmc.run`, which "
            "discards them."
        )
    statistics = jax.device_get(mcmc.get_extra_fields(group_by_chain=True))
    size = _short_names(statistics).get("subsample_size")
    if mcmc.num_warmup == 0 or (size is not None and not size.any()):
        # NumPyro's draws are then zeros, which look like one cluster.
        raise ValueError(
            "No draws of the warm-up were collected. Call "
            "`mcmc.warmup(..., collect_warmup=True)`, with `num_warmup` above zero."
        )
    samples = jax.device_get(mcmc.get_samples(group_by_chain=True))
    return Warmup(samples, statistics)


def _after_warmup(mcmc: MCMC) -> bool:
    """Whether its `warmup` was the last that ran."""
    state = mcmc.last_state
    if state is None or state is not mcmc.post_warmup_state:
        return False
    # Not so where a chain is to be continued by `post_warmup_state = last_state`.
    return bool(np.max(getattr(state, "i", 0)) <= mcmc.num_warmup)


def to_arviz(
    mcmc: MCMC,
    *,
    coords: Mapping[str, Sequence] | None = None,
    dims: Mapping[str, Sequence[str | None]] | None = None,
    warmup: Warmup | None = None,
    log_likelihood: bool = False,
    posterior_predictive: Mapping[str, Array | Imputation] | None = None,
    predictions: Mapping[str, Array] | None = None,
):
    """
    What :func:`arviz.from_numpyro` makes of `mcmc`, with every axis named: an
    `InferenceData`, or a `DataTree` from ArviZ 1 on.

    Axes have the names of the model's plates. That of the rows in a partition site is
    named as in the observed sites, and without a plate ``<site>_row``. That of the
    columns in a site of views has the name of the columns' plate, or, where columns are
    of several sites, ``<site>_column``, with their names as labels. Any other axis is
    ``<site>_dim_<number>``, as in ArviZ.

    Groups are `posterior`, `observed_data` and `sample_stats`, where the log joint has
    its own name, not `lp`: it is that of the assignments and hyperparameters, cluster
    parameters integrated out. (NumPyro's `Gibbs` collects no statistics of its kernels;
    then that group is not there.) Others are there on request.

    :param MCMC mcmc: after its `run`.
    :param coords: labels along an axis, by its name, as in the example below or
        :attr:`Table.coords <numpyro_subanneal.tables.Table.coords>`. Labels of mixed
        types become strings, so that the data can be written to a file.
    :param dims: names of the axes of a site, in the place of those above; None in a
        list keeps one of them.
    :param Warmup warmup: draws of the warm-up, by :func:`collect_warmup`, for groups
        `warmup_posterior` and `warmup_sample_stats`. The number of rows included is
        their coordinate `subsample_size`, along the draws.
    :param bool log_likelihood: whether to compute the group `log_likelihood`: variable
        `joint`, one value a row, by :meth:`Posterior.log_likelihood`. It is the density
        of all of the row's cells given the other rows and their clusters, its own
        cluster summed over, so that :func:`arviz.loo` of it is cross-validation of
        rows. (What `from_numpyro` computes is given the cluster of the row itself,
        which has seen the row: its estimates are too good.)
    :param posterior_predictive: draws of observed sites, such as those of
        :meth:`Posterior.sample_rows` with ``given=[]``, ``[draws, rows, ...]`` or
        chains first; or what :meth:`Posterior.impute` gives, of which the masked cells
        are kept, along an axis ``<site>_cell``, with their rows and columns as its
        coordinates.
    :param predictions: the same of other rows; their axis is named ``new_<rows>``.
    :raises ValueError: naming what is not valid, and the axes that there are.

    **Example**

    .. doctest::

        >>> from functools import partial
        >>> import numpy as np
        >>> from jax import random
        >>> from numpyro.infer import MCMC
        >>> from numpyro_subanneal import SubsampleAnnealedGibbs
        >>> from numpyro_subanneal.inference_data import to_arviz
        >>> from numpyro_subanneal.models import dpmm

        >>> x = np.array([[1.2, 0.3], [0.9, 0.1], [5.1, 4.2]])
        >>> fixed = {"concentration": 1.0, "kappa": 0.3, "shape": 3.0}
        >>> model = partial(dpmm.real, num_clusters=3, **fixed)
        >>> mcmc = MCMC(SubsampleAnnealedGibbs(model), num_warmup=5,
        ...             num_samples=10, progress_bar=False)
        >>> mcmc.run(random.key(0), x)
        >>> names = {"rows": ["Ann", "Bob", "Cy"], "real_features": ["age", "size"]}
        >>> data = to_arviz(mcmc, coords=names, log_likelihood=True)
        >>> data["posterior"]["z"].sel(rows="Bob").shape
        (1, 10)
        >>> data["log_likelihood"]["joint"].dims
        ('chain', 'draw', 'rows')
    """
    # Not at the top: it takes seconds, and ArviZ 0.23 warns when it is imported.
    import arviz as az

    if mcmc.last_state is None or _after_warmup(mcmc):
        raise ValueError("`mcmc` has no draws of the posterior; call its `run` first.")
    if isinstance(mcmc.sampler, SubsampleAnnealedGibbs):
        mcmc.sampler._warn_of_capacity(mcmc.last_state)
    plan = _plan(mcmc)
    axes = _axes(mcmc.sampler.model, mcmc._args, mcmc._kwargs, plan)
    head = mcmc.num_chains, mcmc.num_samples // mcmc.thinning
    drawn = _predictive("posterior_predictive", posterior_predictive, axes, head)
    new = _predictive("predictions", predictions, axes, head, new_rows=True)
    names = _rename(axes, dims)
    new_names = {
        name: [
            f"new_{dim}" if i == 0 and axes[name].shape[:1] != value.shape[2:3] else dim
            for i, dim in enumerate(names[name])
        ]
        for name, value in new.items()
    }
    sizes = _sizes(
        [(name, names[name], axis.shape) for name, axis in axes.items()]
        + [(name, new_names[name], value.shape[2:]) for name, value in new.items()]
    )
    labels = _element_labels(plan, axes, names, coords) | _labels(coords, sizes)

    def dataset(values, dims):
        return az.dict_to_dataset(values, coords=labels, dims=dims)

    data = az.from_numpyro(mcmc, coords=labels, dims=names, log_likelihood=False)
    groups = {group: _dataset(data, group) for group in _groups(data)}
    # NumPyro's `Gibbs` has none.
    if "sample_stats" in groups:
        groups["sample_stats"] = _name_statistics(
            groups["sample_stats"], plan, names, labels
        )
    if log_likelihood:
        posterior = Posterior.from_mcmc(mcmc)
        values = posterior.log_likelihood().reshape(*head, posterior.num_rows)
        rows = "joint_row" if plan is None else names[plan.partition.name][-1]
        groups["log_likelihood"] = dataset({"joint": values}, {"joint": [rows]})
    if drawn:
        cells = {
            name: [f"{name}_cell"]
            for name, value in drawn.items()
            if isinstance(posterior_predictive[name], Imputation)
        }
        found = dataset(drawn, names | cells)
        for name, (cell,) in cells.items():
            index = posterior_predictive[name].index
            for dim, at in zip(names[name], index.T, strict=False):
                own = np.asarray(labels.get(dim, np.arange(sizes[dim])))
                found = found.assign_coords({f"{cell}_{dim}": (cell, own[at])})
        groups["posterior_predictive"] = found
    if new:
        groups["predictions"] = dataset(new, new_names)
    if warmup is not None:
        groups |= _warmup_groups(warmup, plan, names, labels, dataset)
    return _assemble(data, groups)


# --- axes ---------------------------------------------------------------------------


class _Axes(NamedTuple):
    """Names of the axes of a site, None where there is no plate, and its shape."""

    names: list[str | None]
    shape: tuple[int, ...]


def _plan(mcmc: MCMC) -> Plan | None:
    """That of the kernel, or of the one among the blocks of a composite kernel."""
    for kernel in (mcmc.sampler, *(getattr(mcmc.sampler, "_kernels", None) or ())):
        if isinstance(plan := getattr(kernel, "_plan", None), Plan):
            return plan
    return None


def _axes(model: Model, args: Args, kwargs: Kwargs, plan: Plan | None):
    found: dict[str, _Axes] = {}

    def read():
        for name, site in run_trace(model, args, kwargs, feasible).items():
            if site["type"] in ("sample", "deterministic"):
                found[name] = _axes_of(site)

    with numpyro.validation_enabled(False), handlers.block():
        jax.eval_shape(read)
    _make_distinct(found)
    if plan is not None:
        _name_rows_and_columns(plan, found)
    return found


def _axes_of(site) -> _Axes:
    shape = jnp.shape(site["value"])
    names: list[str | None] = [None] * len(shape)
    frames = site["cond_indep_stack"]
    if site["type"] == "sample":
        batch = len(site["fn"].batch_shape)
    else:
        # What is computed in plates need not have their axes; assume that they lead.
        batch = max((-frame.dim for frame in frames), default=0)
    for frame in frames:
        axis = batch + frame.dim
        if 0 <= axis < len(shape) and shape[axis] == frame.size:
            names[axis] = frame.name
    events = list(site.get("infer", {}).get("event_dims", ()))
    if len(events) == len(shape) - batch:
        names[batch:] = events
    return _Axes(names, shape)


def _make_distinct(found: dict[str, _Axes]) -> None:
    """A plate's name may be used again for one of another size, and be one of ArviZ's:
    xarray would fill up the shorter axis with NaN."""
    sizes: dict[str, set[int]] = {dim: {-1, -2} for dim in _SAMPLE_DIMS}
    for names, shape in found.values():
        for dim, size in zip(names, shape, strict=True):
            sizes.setdefault(dim, set()).add(size)
    for site, (names, _) in found.items():
        for i, dim in enumerate(names):
            if dim is not None and len(sizes[dim]) > 1:
                names[i] = f"{site}_{dim}"


def _name_rows_and_columns(plan: Plan, found: dict[str, _Axes]) -> None:
    for i, p in enumerate(plan.partitions):
        sites = [
            site
            for block, member in zip(plan.blocks, plan.memberships, strict=True)
            for site in block.sites
            if i in member.partition and site.name in found
        ]
        plates = [found[s.name].names[0] for s in sites]
        rows = next(filter(None, plates), f"{p.name}_row")
        for names in (found[s.name].names for s in sites):
            names[0] = names[0] or rows
        own = found[p.name].names
        own[-1] = own[-1] or rows
        if p.features is not None:
            columns = _plate_of_columns(plan, i, sites, found)
            found[p.features].names[-1] = columns or f"{p.features}_column"
        if p.weights is not None and found[p.weights].shape[-1] == plan.capacity:
            (cluster, *_) = plan.cluster_sites
            own = found[p.weights].names
            own[-1] = own[-1] or found[cluster].names[0]


def _plate_of_columns(plan, i, sites, found) -> str | None:
    """The one plate of the columns that partition site i partitions, if there is."""
    if len(sites) != 1:
        return None
    elements = [e for m in plan.memberships for e in m.element if e >= 0]
    if elements != list(range(plan.partitions[i].num_elements)):
        return None
    names = found[sites[0].name].names
    return names[1] if len(sites[0].feature_shape) == 1 else None


def _element_labels(plan, axes, names, coords) -> dict[str, np.ndarray]:
    """Names of the columns that a site of views partitions, of several sites."""
    found = {}
    for i, p in enumerate(() if plan is None else plan.partitions):
        if p.features is None or names[p.features] != [f"{p.features}_column"]:
            continue
        of_element: list[list[str]] = [[] for _ in range(p.num_elements)]
        for block, member in zip(plan.blocks, plan.memberships, strict=True):
            columns = [
                _column_name(site, index, names, coords)
                for site in block.sites
                for index in np.ndindex(site.feature_shape)
            ]
            seats = zip(columns, member.partition, member.element, strict=True)
            for column, own, element in seats:
                if own == i and element >= 0:
                    of_element[element].append(column)
        if all(len(columns) == 1 for columns in of_element):
            found[f"{p.features}_column"] = np.array([c[0] for c in of_element])
    return found


def _column_name(site, index, names, coords) -> str:
    if not index:
        return site.name
    dim = names[site.name][1]
    if len(index) == 1 and dim in (coords or {}):
        own = _as_labels(coords[dim])
        if len(own) == site.feature_shape[0]:  # it is refused later
            return str(own[index[0]])
    return f"{site.name}[{', '.join(map(str, index))}]"


# --- what the user says ---------------------------------------------------------------


def _rename(axes: dict[str, _Axes], dims) -> dict[str, list[str]]:
    """Full names of the axes of all sites."""
    names = {name: list(own.names) for name, own in axes.items()}
    for name, given in (dims or {}).items():
        if name not in names:
            raise ValueError(
                f"`dims` names '{name}', which is not a site of the model; those are "
                f"{list(names)}."
            )
        if isinstance(given, str) or len(given) != len(names[name]):
            raise ValueError(
                f"`dims['{name}']` must be a list of the names of the "
                f"{len(names[name])} axes of site '{name}', which has shape "
                f"{axes[name].shape}, got {given!r}."
            )
        own = zip(given, names[name], strict=True)
        names[name] = [old if new is None else new for new, old in own]
    for name, own in names.items():
        unnamed = iter(range(len(own)))
        names[name] = [
            f"{name}_dim_{next(unnamed)}" if dim is None else dim for dim in own
        ]
        for dim in names[name]:
            if dim in _SAMPLE_DIMS or dim in axes or names[name].count(dim) > 1:
                raise ValueError(
                    f"An axis of site '{name}' cannot be named '{dim}', which is the "
                    "name of a site, of another of its axes, or of an axis of the "
                    "draws. Name it otherwise by `dims`."
                )
    return names


def _sizes(variables) -> dict[str, int]:
    sizes: dict[str, tuple[int, str]] = {}
    for name, dims, shape in variables:
        for dim, size in zip(dims, shape, strict=True):
            known, other = sizes.setdefault(dim, (size, name))
            if known != size:
                raise ValueError(
                    f"Axis '{dim}' has length {known} in '{other}' and {size} in "
                    f"'{name}'. Name one of them otherwise by `dims`."
                )
    return {dim: size for dim, (size, _) in sizes.items()}


def _labels(coords, sizes: dict[str, int]) -> dict[str, np.ndarray]:
    found = {}
    given_to_axes = {
        label
        for dim, given in (coords or {}).items()
        if dim in sizes
        for label in _as_labels(given).tolist()
    }
    for dim, given in (coords or {}).items():
        if dim not in sizes:
            # All columns of a table, where a model has an axis for those of each kind.
            if given_to_axes.issuperset(_as_labels(given).tolist()):
                continue
            known = ", ".join(f"'{d}' ({n})" for d, n in sizes.items())
            raise ValueError(
                f"`coords` has labels of '{dim}', which is not an axis. The axes, and "
                f"their lengths, are {known}."
            )
        found[dim] = _as_labels(given)
        if len(found[dim]) != sizes[dim]:
            raise ValueError(
                f"`coords['{dim}']` has {len(found[dim])} labels, but axis '{dim}' has "
                f"length {sizes[dim]}."
            )
    return found


def _as_labels(given) -> np.ndarray:
    """Labels of a type that can be written to a file."""
    values = list(given)
    kinds = {type(v) for v in values}
    if all(issubclass(k, int | np.integer) and k is not bool for k in kinds):
        return np.array(values, np.int64)  # those of pandas may be objects
    plain = np.asarray(given)
    if plain.ndim == 1 and plain.dtype.kind in "bfmM" and len(kinds) == 1:
        return plain
    return np.array([str(v) for v in values])


# --- groups ---------------------------------------------------------------------------


def _predictive(argument, given, axes, head, new_rows=False) -> dict[str, np.ndarray]:
    """By site, ``[chains, draws, ...]``."""
    found = {}
    for name, value in (given or {}).items():
        if name not in axes:
            raise ValueError(
                f"`{argument}` has '{name}', which is not a site of the model; those "
                f"are {list(axes)}."
            )
        if isinstance(value, Imputation) and not new_rows:
            value, shape = np.asarray(value.draws), value.draws.shape[1:]
        else:
            value, shape = np.asarray(value), axes[name].shape
        lead = value.ndim - len(shape)
        own = value.shape[max(lead, 0) :]
        fits = own[1:] == shape[1:] if new_rows else own == shape
        draws = {1: (head[0] * head[1],), 2: head}
        if not fits or value.shape[: max(lead, 0)] != draws.get(lead):
            way = "" if new_rows else " Draws of other rows go to `predictions`."
            raise ValueError(
                f"`{argument}['{name}']` has shape {value.shape}; it must have shape "
                f"({head[0] * head[1]}, *{shape}), or that with the {head[0]} chains "
                f"first.{way}"
            )
        found[name] = value.reshape(*head, *own)
    return found


def _short_names(fields) -> dict[str, Any]:
    """Statistics of a block of a composite kernel, by the names of its own."""
    short = {
        name: tail
        for name in fields
        if (tail := name.rpartition(".")[2]) in _STATISTICS and tail not in fields
    }
    tails = list(short.values())
    return {
        short[name] if name in short and tails.count(short[name]) == 1 else name: value
        for name, value in fields.items()
    }


def _name_statistics(stats, plan, names, labels):
    """ArviZ does not name the axes of statistics."""
    short = _short_names(dict.fromkeys(map(str, stats.data_vars)))
    old = [str(name) for name in stats.data_vars]
    stats = stats.rename(
        {a: b for a, b in zip(old, short, strict=True) if a != b and a in stats}
    )
    if plan is None or "num_clusters" not in stats:
        return stats
    extra = [dim for dim in stats["num_clusters"].dims if dim not in _SAMPLE_DIMS]
    if not extra:
        return stats
    views = "num_clusters_view"
    if len(plan.partitions) == 1:
        views = names[plan.partition.name][0]
    stats = stats.rename({extra[0]: views})
    return stats.assign_coords({views: labels[views]}) if views in labels else stats


def _warmup_groups(warmup, plan, names, labels, dataset):
    if not isinstance(warmup, Warmup):
        raise ValueError(
            "`warmup` must be what `collect_warmup` gives, called between "
            f"`mcmc.warmup` and `mcmc.run`; got {type(warmup).__name__}."
        )
    values = {
        name: value
        for name, value in warmup.statistics.items()
        if not isinstance(value, dict | tuple)
    }
    stats = _name_statistics(dataset(values, {}), plan, names, labels)
    groups = {
        "warmup_posterior": dataset(warmup.samples, names),
        "warmup_sample_stats": stats,
    }
    if "subsample_size" in stats:
        size = stats["subsample_size"]
        if (size == size[0]).all():
            # The schedule is the same in every chain, unless they began differently.
            size = size[0].drop_vars("chain")
        groups = {
            name: group.assign_coords(subsample_size=size.variable)
            for name, group in groups.items()
        }
    return groups


def _groups(data) -> list[str]:
    # (`groups` is a method in ArviZ 0, and in ArviZ 1 an attribute, of paths.)
    return list(data.children) if hasattr(data, "children") else list(data.groups())


def _dataset(data, group):
    found = data[group]
    return found.to_dataset() if hasattr(found, "to_dataset") else found


def _assemble(data, groups):
    """The groups, as `data` has its own."""
    if hasattr(data, "children"):
        found = type(data).from_dict(groups)
        found.attrs = data.attrs
        return found
    return type(data)(attrs=data.attrs, **groups)


def posterior_samples(data: Any) -> dict[str, np.ndarray]:
    """
    The draws in the group `posterior`, ``[chains, draws, ...]`` by site.

    :param data: an `InferenceData`, a `DataTree`, or the path of a netCDF file that one
        was written to.
    :raises ValueError: if it has no such group, or its draws are not by chain.
    """
    opened = None
    if not hasattr(data, "groups"):
        import arviz as az

        data = opened = az.from_netcdf(data)
    try:
        if "posterior" not in _groups(data):
            raise ValueError(
                f"`data` has no group 'posterior'; it has {_groups(data)}."
            )
        group = _dataset(data, "posterior")
        if not set(_SAMPLE_DIMS) <= set(group.dims):
            raise ValueError(
                "The group 'posterior' must have axes 'chain' and 'draw'; it has "
                f"{list(map(str, group.dims))}."
            )
        group = group.transpose(*_SAMPLE_DIMS, ...)
        return {str(name): np.array(own) for name, own in group.data_vars.items()}
    finally:
        if opened is not None:
            opened.close()
