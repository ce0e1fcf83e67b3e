# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""Reading an ordinary NumPyro model.

1. *Skeleton*: an abstract trace and the provenance of every distribution's parameters
   say which sites there are and what depends on what; no array is computed.
2. *Candidates*: registered pairs with the site's likelihood and the types of its
   cluster sites.
3. *Probes*: the model is evaluated at a few rows, with random cluster parameters, and
   must behave as the pair says.
4. *Certificate*: Bayes' law, with NumPyro's own densities of the user's model.

What does not pass is refused by :class:`NotRecognised`, which says why.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
from jax import random
import jax.numpy as jnp
import numpy as np

import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer.initialization import (
    init_to_feasible,
    init_to_sample,
    init_to_uniform,
)
from numpyro.ops.provenance import eval_provenance

from numpyro_subanneal.conjugate import registry
from numpyro_subanneal.conjugate.base import (
    AbstractBlock,
    AbstractConjugatePair,
    Hyper,
    SiteShape,
)
from numpyro_subanneal.distributions import PartitionDistribution
from numpyro_subanneal.rows import Component
from numpyro_subanneal.typing import Array

Model: TypeAlias = Callable[..., Any]
Args: TypeAlias = Sequence[Any]
Kwargs: TypeAlias = Mapping[str, Any]


class NotRecognised(ValueError):
    """
    The model, or its data, is not one that :class:`SubsampleAnnealedGibbs` can sample.
    The message names the site and says what to do.
    """


@dataclass(frozen=True)
class Plan:
    """
    What the kernel needs to know of a model: names and shapes, no arrays.

    - **partition** - name of the partition site.
    - **num_rows** - number of rows.
    - **capacity** - size of the clusters plate.
    - **blocks** - observed sites and their cluster sites, packed by conjugate pair.
    - **has_deterministic** - whether the model has deterministic sites.
    """

    partition: str
    num_rows: int
    capacity: int
    blocks: tuple[AbstractBlock, ...]
    has_deterministic: bool

    @property
    def cluster_sites(self) -> tuple[str, ...]:
        """Names of the cluster sites."""
        return tuple(
            name for block in self.blocks for s in block.sites for _, name in s.roles
        )


# --- skeleton ----------------------------------------------------------------------


@dataclass(frozen=True)
class Site:
    """A sample site of the skeleton: shapes and types only (none if its value is not
    an array)."""

    name: str
    observed: bool
    fn: type[dist.Distribution]
    shape: tuple[int, ...] | None
    dtype: np.dtype | None
    fn_shape: tuple[int, ...]
    event_dim: int
    masked: bool
    scaled: bool


def _peel(fn: dist.Distribution) -> dist.Distribution:
    """The distribution inside `expand`, `to_event` and `mask`."""
    while isinstance(
        fn,
        dist.ExpandedDistribution | dist.Independent | dist.MaskedDistribution,
    ):
        fn = fn.base_dist
    return fn


def _is_masked(fn: dist.Distribution) -> bool:
    while isinstance(fn, dist.ExpandedDistribution | dist.Independent):
        fn = fn.base_dist
    return isinstance(fn, dist.MaskedDistribution)


def _trace(model: Model, args: Args, kwargs: Kwargs, substitute_fn, seed=0) -> dict:
    seeded = handlers.seed(model, random.key(seed))
    substituted = handlers.substitute(seeded, substitute_fn=substitute_fn)
    return handlers.trace(substituted).get_trace(*args, **kwargs)


@dataclass(frozen=True)
class Skeleton:
    """
    - **sites** - sample sites by name, in the order of the model.
    - **deterministic** - names of deterministic sites.
    - **subsampled** - names of plates that take a subsample.
    """

    sites: dict[str, Site]
    deterministic: tuple[str, ...]
    subsampled: tuple[str, ...]


def _skeleton(model: Model, args: Args, kwargs: Kwargs) -> Skeleton:
    found = []

    def read():
        sites, deterministic, subsampled = {}, [], []
        for name, site in _trace(model, args, kwargs, init_to_sample).items():
            if site["type"] == "plate":
                size, subsample_size = site["args"]
                if subsample_size is not None and subsample_size != size:
                    subsampled.append(name)
            elif site["type"] == "deterministic":
                deterministic.append(name)
            elif site["type"] == "sample":
                base = _peel(site["fn"])
                value = site["value"]
                if isinstance(value, bool | int | float):
                    value = np.asarray(value)
                is_array = isinstance(value, np.ndarray | np.generic | jax.Array)
                sites[name] = Site(
                    name=name,
                    observed=site["is_observed"],
                    fn=type(base),
                    shape=value.shape if is_array else None,
                    dtype=value.dtype if is_array else None,
                    fn_shape=tuple(site["fn"].shape()),
                    event_dim=base.event_dim,
                    masked=_is_masked(site["fn"]),
                    scaled=site["scale"] is not None,
                )
        found.append(Skeleton(sites, tuple(deterministic), tuple(subsampled)))

    try:
        jax.eval_shape(read)
    except AssertionError as error:
        plate = _empty_plate(error)
        if plate is None:
            raise
        raise NotRecognised(
            f"Plate '{plate}' of the model has size 0. The plate of the clusters must "
            "hold at least one (its size is the capacity), and so must that of the "
            "rows."
        ) from error
    return found[0]


def _empty_plate(error: AssertionError) -> str | None:
    # NumPyro asserts that a plate has a positive size before it sends any message that
    # a handler could see, and does not say which plate.
    tb = error.__traceback__
    while tb is not None:
        if tb.tb_frame.f_code is numpyro.plate.__init__.__code__:
            if tb.tb_frame.f_locals.get("size") == 0:
                return tb.tb_frame.f_locals["name"]
        tb = tb.tb_next
    return None


# --- recognition -------------------------------------------------------------------


def recognise(model: Model, args: Args, kwargs: Kwargs) -> Plan:
    """
    Read `model`.

    :param model: a NumPyro model with one partition site.
    :param args: its positional arguments, concrete.
    :param kwargs: its keyword arguments, concrete.
    :return: the plan.
    :raises NotRecognised: if the model or its data cannot be sampled, with the reason.
    """
    return _Reader(model, args, kwargs).plan()


def explain(model: Model, *args: Any, **kwargs: Any) -> None:
    """
    Print how :class:`SubsampleAnnealedGibbs` reads `model`: a table of its sites with
    the role and the conjugate pair of each, and, where it is refused, why.

    :param model: a NumPyro model.
    :param args: its positional arguments.
    :param kwargs: its keyword arguments.
    """
    refusal = None
    reader = _Reader(model, args, kwargs)
    try:
        reader.plan()
    except NotRecognised as error:
        refusal = str(error)
    rows = [("site", "role", "pair", "why"), *reader.table]
    sizes = [max(len(row[i]) for row in rows) for i in range(4)]
    for row in rows:
        print("  ".join(x.ljust(n) for x, n in zip(row, sizes, strict=True)).rstrip())
    if refusal is not None:
        print(f"\nNot recognised: {refusal}")


def pair_name(pair: AbstractConjugatePair) -> str:
    """For example ``(InverseGamma, Normal)-Normal``."""
    prior = ", ".join(t.__name__ for t in pair.prior.values())
    return f"({prior})-{_short(pair.likelihood[0])}"


def _short(fn: type[dist.Distribution]) -> str:
    return fn.__name__


class _Reader:
    """One reading of a model; `table` holds what was found so far, for `explain`."""

    def __init__(self, model: Model, args: Args, kwargs: Kwargs):
        self.model = model
        self.args = tuple(args)
        self.kwargs = dict(kwargs)
        self.table: list[tuple[str, str, str, str]] = []

    def plan(self) -> Plan:
        # Under validation NumPyro warns of bad data and bad hyperparameters, which are
        # refused below by the name of their site.
        with handlers.block(), numpyro.validation_enabled(False):
            return self._plan()

    def _plan(self) -> Plan:
        leaves = jax.tree.leaves((self.args, self.kwargs))
        if any(isinstance(x, jax.core.Tracer) for x in leaves):
            raise NotRecognised(
                "The model's arguments are traced (`MCMC.run` was called inside "
                "`jax.jit` or another transformation), so that the data cannot be "
                "checked. Call `MCMC.run` outside the transformation; "
                "`jit_model_args=True` makes data an argument of the compiled program."
            )
        skeleton = _skeleton(self.model, self.args, self.kwargs)
        sites = skeleton.sites
        if skeleton.subsampled:
            raise NotRecognised(
                f"Plate '{skeleton.subsampled[0]}' takes a subsample "
                "(`subsample_size`). Subsample annealing keeps its own subsample; give "
                "the plate its full size."
            )
        partition = self._partition(sites)
        num_rows = sites[partition].shape[-1]
        mixtures, clusters = self._roles(sites, partition, num_rows)
        capacity = self._capacity(sites, clusters)
        shapes = [
            self._shape(sites[name], sites, roles, capacity)
            for name, roles in mixtures.items()
        ]
        shapes = self._probe(partition, num_rows, capacity, shapes)
        by_pair: dict[AbstractConjugatePair, list[SiteShape]] = {}
        for pair, shape in shapes:
            by_pair.setdefault(pair, []).append(shape)
        return Plan(
            partition=partition,
            num_rows=num_rows,
            capacity=capacity,
            blocks=tuple(pair.block(group) for pair, group in by_pair.items()),
            has_deterministic=bool(skeleton.deterministic),
        )

    # --- roles -------------------------------------------------------------------

    def _note(self, site: str, role: str, pair: str = "", why: str = "") -> None:
        self.table.append((site, role, pair, why))

    def _partition(self, sites: Mapping[str, Site]) -> str:
        found = [
            s.name
            for s in sites.values()
            if issubclass(s.fn, PartitionDistribution) and not s.observed
        ]
        if len(found) != 1:
            problem = (
                "The model has no partition site"
                if not found
                else f"The model has {len(found)} partition sites, "
                + ", ".join(f"'{name}'" for name in found)
            )
            raise NotRecognised(
                f"{problem}; it must have exactly one latent site with a partition "
                "prior, such as `z = numpyro.sample('z', "
                "ChineseRestaurantProcess(1.0, size=num_rows))`. Its sample sites are "
                f"{list(sites)}."
            )
        (name,) = found
        shape = sites[name].shape
        if len(shape) != 1:
            raise NotRecognised(
                f"Partition site '{name}' has shape {shape}; it must have one axis, "
                "the rows. Take it out of its plate, or give its prior scalar "
                "parameters."
            )
        if shape[0] == 0:
            raise NotRecognised(f"Partition site '{name}' has zero rows.")
        self._note(name, "partition", sites[name].fn.__name__, f"{shape[0]} rows")
        return name

    def _roles(
        self, sites: Mapping[str, Site], partition: str, num_rows: int
    ) -> tuple[dict[str, list[str]], list[str]]:
        self._check_observed_rows(sites, num_rows)
        upstream = self._upstream(sites)
        mixtures = {
            name: [u for u in upstream[name] if u != partition]
            for name, site in sites.items()
            if site.observed and partition in upstream[name]
        }
        if not mixtures:
            raise NotRecognised(
                f"No observed site depends on partition site '{partition}'. Index the "
                f"cluster parameters of the likelihood by it, as in `loc[{partition}]`."
            )
        owner: dict[str, str] = {}
        for name, roles in mixtures.items():
            if sites[name].fn is dist.Unit:
                raise NotRecognised(
                    f"Factor '{name}' depends on partition site '{partition}'; only "
                    "observed sites with a registered likelihood can."
                )
            for role in roles:
                if role in owner:
                    raise NotRecognised(
                        f"Cluster site '{role}' is used by two observed sites, "
                        f"'{owner[role]}' and '{name}'. Each needs cluster parameters "
                        "of its own."
                    )
                owner[role] = name
        for name, site in sites.items():
            if site.observed or name == partition:
                continue
            if name not in owner:
                raise NotRecognised(
                    f"Latent site '{name}' is neither the partition nor a parameter of "
                    "a cluster: no observed site that is indexed by "
                    f"'{partition}' depends on it directly. Hyperparameters must be "
                    "constants: replace the site by a value, for example with "
                    "`numpyro.handlers.condition`."
                )
            inner = [u for u in upstream[name] if owner.get(u) != owner[name]]
            if inner:
                raise NotRecognised(
                    f"The prior of cluster site '{name}' depends on latent site "
                    f"'{inner[0]}'; it may depend only on constants and on cluster "
                    f"parameters of the same observed site '{owner[name]}'."
                )
        if upstream[partition]:
            raise NotRecognised(
                f"The prior of partition site '{partition}' depends on latent site "
                f"'{upstream[partition][0]}'. Hyperparameters must be constants."
            )
        return mixtures, list(owner)

    def _upstream(self, sites: Mapping[str, Site]) -> dict[str, list[str]]:
        """Latent sites that the distribution of each site depends on directly."""

        def parameters(**values):
            def pick(site):
                return values.get(site["name"]) if site["type"] == "sample" else None

            trace = _trace(self.model, self.args, self.kwargs, pick)
            return {name: jax.tree.leaves(trace[name]["fn"]) for name in sites}

        latent = {
            name: jax.ShapeDtypeStruct(site.shape, site.dtype)
            for name, site in sites.items()
            if not site.observed
        }
        found = eval_provenance(parameters, **latent)
        return {
            name: [u for u in latent if any(u in leaf for leaf in leaves) and u != name]
            for name, leaves in found.items()
        }

    def _check_observed_rows(self, sites: Mapping[str, Site], num_rows: int) -> None:
        for site in sites.values():
            if site.scaled:
                raise NotRecognised(
                    f"The log density of site '{site.name}' is scaled "
                    "(`numpyro.handlers.scale`); a scaled model has no conjugate "
                    "marginal."
                )
            if not site.observed or site.fn is dist.Unit:
                continue
            if site.shape is None:
                raise NotRecognised(
                    f"The value of observed site '{site.name}' is not an array. Give a "
                    "NumPy or JAX array (of a data frame, its `.to_numpy()`)."
                )
            if site.dtype.kind not in "biuf":
                raise NotRecognised(
                    f"Observed site '{site.name}' holds values of type {site.dtype}; "
                    "it must be numeric (encode categories as integers)."
                )
            if site.masked:
                raise NotRecognised(
                    f"Observed site '{site.name}' is masked; masked cells are not "
                    "supported. Leave out the rows with missing cells."
                )
            if 0 in site.shape[1:]:
                raise NotRecognised(
                    f"Observed site '{site.name}' has no features (shape {site.shape})."
                )
            if site.shape[:1] != (num_rows,):
                rows = site.shape[0] if site.shape else "no"
                raise NotRecognised(
                    f"Observed site '{site.name}' has {rows} rows (shape "
                    f"{site.shape}), but the partition has {num_rows}. Rows are the "
                    "first axis of an observed value."
                )
            if site.shape != site.fn_shape:
                raise NotRecognised(
                    f"The value of observed site '{site.name}' has shape {site.shape}, "
                    f"but its distribution has shape {site.fn_shape}."
                )

    def _capacity(self, sites: Mapping[str, Site], clusters: Sequence[str]) -> int:
        sizes = {name: sites[name].shape[:1] for name in clusters}
        for name, size in sizes.items():
            if not size:
                raise NotRecognised(
                    f"Latent site '{name}' is a scalar, so it is not indexed by the "
                    "partition. Put it in a plate of clusters and index it, as in "
                    f"`{name}[z]`."
                )
        first = clusters[0]
        for name in clusters:
            if sizes[name] != sizes[first]:
                raise NotRecognised(
                    f"Cluster sites '{first}' and '{name}' have {sizes[first][0]} and "
                    f"{sizes[name][0]} clusters on their first axis; all must have the "
                    "same number, the capacity."
                )
        if sizes[first][0] == 0:
            raise NotRecognised(f"Cluster site '{first}' has capacity 0.")
        return sizes[first][0]

    def _shape(
        self, site: Site, sites: Mapping[str, Site], roles: list[str], capacity: int
    ) -> tuple[AbstractConjugatePair, SiteShape]:
        name = site.name
        types = [sites[r].fn for r in roles]
        found = registry.candidates(site.fn, types)
        if not found:
            raise NotRecognised(self._unregistered(site, sites, roles))
        pair = found[0]
        named = []
        for role, fn in pair.prior.items():
            (cluster,) = [r for r in roles if sites[r].fn is fn]
            named.append((role, cluster))
        feature_shape = site.shape[1:]
        event_shape: tuple[int, ...] = ()
        for _, cluster in named:
            event_dim = sites[cluster].event_dim
            shape = sites[cluster].shape
            event = shape[len(shape) - event_dim :]
            if shape != (capacity, *feature_shape, *event):
                wanted = (capacity, *feature_shape, *event)
                raise NotRecognised(
                    f"Cluster site '{cluster}' has shape {shape}, but observed site "
                    f"'{name}' with features {feature_shape} needs {wanted}: one "
                    "parameter for each cluster and feature."
                )
            event_shape = event or event_shape
        return pair, SiteShape(name, tuple(named), feature_shape, event_shape)

    def _unregistered(
        self, site: Site, sites: Mapping[str, Site], roles: list[str]
    ) -> str:
        known = registry.for_likelihood(site.fn)
        if known:
            options = "; ".join(pair_name(pair) for pair in known)
            way_out = f"Registered for {_short(site.fn)}: {options}."
        else:
            options = "; ".join(pair_name(pair) for pair in registry.PAIRS)
            way_out = (
                f"No pair is registered for {_short(site.fn)}; registered are "
                f"{options}."
            )
        priors = ", ".join(f"'{r}' ~ {_short(sites[r].fn)}" for r in roles)
        return (
            f"Observed site '{site.name}' ~ {_short(site.fn)} with cluster sites "
            f"{priors or 'none'} is not a registered conjugate pair. {way_out}"
        )

    # --- probes ------------------------------------------------------------------

    def _probe(
        self,
        partition: str,
        num_rows: int,
        capacity: int,
        shapes: list[tuple[AbstractConjugatePair, SiteShape]],
    ) -> list[tuple[AbstractConjugatePair, SiteShape]]:
        data = self._data([shape.name for _, shape in shapes])
        # In double precision: the laws then hold to many more digits than a wrong model
        # could by chance, whatever the scale of the data.
        with jax.enable_x64(True):
            prober = _Prober(
                self.model,
                self.args,
                self.kwargs,
                partition,
                num_rows,
                capacity,
                shapes,
            )
            prober.check_prior()
        for pair, shape in shapes:
            self._check_data(pair, shape, prober.hyper[shape.name], data[shape.name])
        with jax.enable_x64(True):
            prober.check_parameters()
            prober.check_certificate(data)
        for pair, shape in shapes:
            why = f"{shape.num_features} feature(s); densities agree with Bayes' law"
            self._note(shape.name, "observed", pair_name(pair), why)
            for role, cluster in shape.roles:
                why = f"{role} of {capacity} clusters, integrated out"
                self._note(cluster, "cluster", pair_name(pair), why)
        return shapes

    def _data(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Observed values of sites `names`, on the host."""
        found = []

        def read():
            trace = _trace(self.model, self.args, self.kwargs, init_to_sample)
            found.append({name: trace[name]["value"] for name in names})

        jax.eval_shape(read)
        (values,) = found
        traced = [n for n in names if isinstance(values[n], jax.core.Tracer)]
        if traced:
            # Computed inside the model: evaluate just that.
            fn, arrays = with_array_arguments(self.args, self.kwargs)

            def compute(arrays):
                trace = _trace(self.model, *fn(arrays), init_to_sample)
                return {name: trace[name]["value"] for name in traced}

            values |= _compile(compute, arrays)(arrays)
        return {name: np.asarray(value) for name, value in values.items()}

    def _check_data(
        self,
        pair: AbstractConjugatePair,
        shape: SiteShape,
        hyper: Mapping[str, np.ndarray],
        x: np.ndarray,
    ) -> None:
        columns = x.reshape(x.shape[0], -1)
        for d, index in enumerate(np.ndindex(shape.feature_shape)):
            error = pair.data_error(
                np.ascontiguousarray(columns[:, d]),
                {name: values[index] for name, values in hyper.items()},
            )
            if error is not None:
                raise NotRecognised(_column(shape, index) + " " + error + ".")


def _column(shape: SiteShape, index: tuple[int, ...]) -> str:
    if not index:
        return f"Observed site '{shape.name}'"
    position = ", ".join(str(i) for i in index)
    return f"Column {position} of observed site '{shape.name}'"


def with_array_arguments(args, kwargs):
    """
    Split arguments into arrays, which a compiled function should take as arguments (as
    constants they would be copied into the program), and a function that restores them.
    """
    leaves, treedef = jax.tree.flatten((tuple(args), dict(kwargs)))
    is_array = [isinstance(x, np.ndarray | jax.Array) for x in leaves]
    arrays = [x for x, a in zip(leaves, is_array, strict=True) if a]

    def rebuild(arrays):
        rest = iter(arrays)
        return jax.tree.unflatten(
            treedef,
            [next(rest) if a else x for x, a in zip(leaves, is_array, strict=True)],
        )

    return rebuild, arrays


def _compile(fn, *args):
    """
    `fn`, compiled for arguments like `args`. Calls are executed there and then, also
    while JAX traces the caller: `MCMC` traces `init` when it runs chains in parallel.
    """
    return jax.jit(fn).lower(*args).compile()


_TOLERANCE = 1e-6

# Rows at which the model is looked at: all, or so many at random.
_NUM_PROBED = 2000
_NUM_CERTIFIED = 5


class _Values(NamedTuple):
    """
    What the model says of one observed site.

    - **parameters** - of the likelihood at the probed rows, ``[rows, features]``.
    - **log_prob** - of the observed values in these rows, ``[rows, features]``.
    - **hyper** - hyperparameters of every cluster, ``[clusters, features]``.
    - **log_prior** - of the cluster parameters, ``[clusters, features]``.
    """

    parameters: dict[str, Any]
    log_prob: Any
    hyper: dict[str, Any]
    log_prior: Any


def _by_role(shape: SiteShape, values: Mapping[str, Any]) -> dict[str, Any]:
    return {role: values[cluster] for role, cluster in shape.roles}


def _hyperparameters(
    pair: AbstractConjugatePair, shape: SiteShape, trace: dict, capacity: int
) -> dict[str, Array]:
    """Hyperparameters of every cluster, ``[clusters, *feature_shape, *event]``."""
    priors = {role: _peel(trace[c]["fn"]) for role, c in shape.roles}
    theta = {role: trace[c]["value"] for role, c in shape.roles}
    batch = (capacity, *shape.feature_shape)
    return {
        name: jnp.broadcast_to(
            value, batch + (shape.event_shape if name in pair.vectors else ())
        )
        for name, value in pair.hyperparameters(priors, theta).items()
    }


class _Prober:
    """Evaluates the model at chosen assignments and cluster parameters."""

    def __init__(self, model, args, kwargs, partition, num_rows, capacity, shapes):
        self.model = model
        self.partition = partition
        self.num_rows = num_rows
        self.capacity = capacity
        self.shapes = shapes
        self.rng = np.random.default_rng(0)
        self.rebuild, arrays = with_array_arguments(args, kwargs)
        # NB: views. JAX remembers an array that was a constant of an unfinished trace
        # (the model raised an error) as it converted it there, in 32 bits.
        self.arrays = [x.view() if isinstance(x, np.ndarray) else x for x in arrays]
        self.hyper: dict[str, dict[str, np.ndarray]] = {}
        # The first ones, spread over the table, are those of the certificate.
        spread = np.linspace(0, num_rows - 1, _NUM_CERTIFIED).astype(np.int32)
        others = self.rng.permutation(num_rows)[:_NUM_PROBED].astype(np.int32)
        self.rows = np.concatenate([spread, others])
        seed = np.uint32(0)
        draw = _compile(self._random_theta, seed, self.arrays)
        self.theta = [jax.device_get(draw(seed + i, self.arrays)) for i in range(2)]
        z = np.zeros(num_rows, np.int32)
        self._evaluate = _compile(
            self._compute, z, self.theta[0], self.rows, self.arrays
        )

    def _random_theta(self, seed, arrays):
        """Values of the cluster sites, spread over their supports."""

        def pick(site):
            if site["name"] == self.partition:
                return jnp.zeros(self.num_rows, jnp.int32)
            if site["type"] == "sample" and not site["is_observed"]:
                return init_to_uniform(site, radius=1)
            return None

        args, kwargs = self.rebuild(arrays)
        trace = _trace(self.model, args, kwargs, pick, seed)
        return {n: trace[n]["value"] for _, s in self.shapes for _, n in s.roles}

    def _compute(self, z, theta, rows, arrays):
        args, kwargs = self.rebuild(arrays)
        values = {self.partition: z, **theta}

        def pick(site):
            return values.get(site["name"]) if site["type"] == "sample" else None

        trace = _trace(self.model, args, kwargs, pick)
        out = {}
        for pair, shape in self.shapes:
            base = _peel(trace[shape.name]["fn"])
            batch = (self.num_rows, *shape.feature_shape)
            parameters = {}
            for name in pair.parameters(_by_role(shape, theta)):
                value = jnp.asarray(getattr(base, name))
                event_dim = type(base).arg_constraints[name].event_dim
                event = value.shape[value.ndim - event_dim :]
                # NB: XLA pushes the selection of rows through the gather by cluster, so
                # that nothing of the table's size is made.
                parameters[name] = jnp.broadcast_to(value, batch + event)[rows]
            x = jnp.asarray(trace[shape.name]["value"])[rows]
            if base.support.is_discrete:
                x = x.astype(int)
            log_prob = type(base)(**parameters).log_prob(x)
            log_prior = sum(
                jnp.broadcast_to(
                    _peel(trace[cluster]["fn"]).log_prob(theta[cluster]),
                    (self.capacity, *shape.feature_shape),
                )
                for _, cluster in shape.roles
            )
            hyper = _hyperparameters(pair, shape, trace, self.capacity)
            out[shape.name] = _Values(parameters, log_prob, hyper, log_prior)
        return out, _peel(trace[self.partition]["fn"])

    def evaluate(self, z, theta) -> dict[str, _Values]:
        z = np.asarray(z, np.int32)
        values, self.prior = jax.device_get(
            self._evaluate(z, theta, self.rows, self.arrays)
        )
        return values

    def _assignments(self):
        """Random assignments; neighbouring probed rows share a cluster, so that rows in
        the same cluster and rows in different ones are both seen."""
        z = self.rng.integers(self.capacity, size=self.num_rows)
        z[self.rows[:4]] = (np.arange(min(4, len(self.rows))) // 2) % self.capacity
        return z

    def check_prior(self) -> None:
        z = self._assignments()
        first, second = (self.evaluate(z, theta) for theta in self.theta)
        error = self.prior.parameter_error()
        if error is not None:
            raise NotRecognised(
                f"The prior of partition site '{self.partition}': {error}"
            )
        for pair, shape in self.shapes:
            clusters = " and ".join(f"'{c}'" for _, c in shape.roles)
            for name, value in first[shape.name].hyper.items():
                valid = np.isfinite(value)
                if name in pair.positive:
                    valid &= value > 0
                if not valid.all():
                    raise NotRecognised(
                        f"Hyperparameter `{name}` of cluster sites {clusters} of "
                        f"'{shape.name}' is {value[~valid].flat[0]}; it must be finite"
                        f"{' and positive' if name in pair.positive else ''}."
                    )
                if not _close(value, second[shape.name].hyper[name]):
                    raise NotRecognised(
                        f"The prior of cluster sites {clusters} of '{shape.name}' does "
                        f"not have the form of {pair_name(pair)}: its hyperparameter "
                        f"`{name}` depends on the values of the cluster parameters. "
                        f"{pair.form}"
                    )
                if not _close(value, np.broadcast_to(value[:1], value.shape)):
                    raise NotRecognised(
                        f"Hyperparameter `{name}` of cluster sites {clusters} of "
                        f"'{shape.name}' differs between clusters. All clusters must "
                        "have the same prior."
                    )
            self.hyper[shape.name] = {
                name: value[0] for name, value in first[shape.name].hyper.items()
            }

    def check_parameters(self) -> None:
        z = self._assignments()
        theta = self.theta[0]
        values = self.evaluate(z, theta)
        for pair, shape in self.shapes:
            by_role = {r: theta[c][z[self.rows]] for r, c in shape.roles}
            expected = jax.device_get(_compile(pair.parameters, by_role)(by_role))
            for name, value in values[shape.name].parameters.items():
                if not _close(value, expected[name]):
                    self._say_why(pair, shape, name, z, theta, value, expected[name])

    def _say_why(self, pair, shape, name, z, theta, value, expected) -> None:
        """Tell in which way parameter `name` of a likelihood is not the pair's own."""
        site = f"observed site '{shape.name}'"

        def parameter(z, theta):
            return self.evaluate(z, theta)[shape.name].parameters[name]

        for _, cluster in shape.roles:
            changed = {**theta, cluster: self.theta[1][cluster]}
            if self.capacity == 1 or _close(parameter(z, changed), value):
                continue  # The parameter has nothing to do with this site.
            # All rows are moved to another cluster, and nothing else.
            if _close(parameter((z + 1) % self.capacity, theta), value):
                raise NotRecognised(
                    f"Parameter `{name}` of {site} does not depend on the cluster of "
                    f"the row: is '{cluster}' indexed by '{self.partition}', as in "
                    f"`{cluster}[{self.partition}]`?"
                )
            used = int(z[self.rows[0]])
            moved = theta[cluster].copy()
            moved[used] = moved[(used + 1) % self.capacity]
            elsewhere = z[self.rows] != used
            change = parameter(z, {**theta, cluster: moved})
            if not _close(change[elsewhere], value[elsewhere]):
                raise NotRecognised(
                    f"Clusters are coupled: parameter `{name}` of {site} in one "
                    f"cluster changes with '{cluster}' of another. A row's likelihood "
                    "may depend on the parameters of its own cluster only."
                )
        same = np.zeros_like(z)
        together = parameter(same, theta)
        if not _close(together, np.broadcast_to(together[:1], together.shape)):
            raise NotRecognised(
                f"Parameter `{name}` of {site} differs between rows of the same "
                "cluster. The likelihood of a row may depend on the row through its "
                "cluster only (no covariates, no row-dependent offsets)."
            )
        scale = np.maximum(np.abs(value), np.abs(expected))
        worst = np.argmax(np.abs(value - expected) > _TOLERANCE * scale)
        got, wanted = float(value.flat[worst]), float(expected.flat[worst])
        raise NotRecognised(
            f"Parameter `{name}` of {site} is not what {pair_name(pair)} expects "
            f"(for one row it is {got:.4g}, expected {wanted:.4g}). "
            f"{pair.form}"
        )

    def check_certificate(self, data: Mapping[str, np.ndarray]) -> None:
        """
        ``log p(x | theta) + log p(theta) - log p(theta | x) = log m(x)``, the first two
        by the user's model, the others by the pair, at a theta near the posterior.
        """
        shift = np.float64(0)
        bayes = {}
        for pair, shape in self.shapes:
            given = self.hyper[shape.name], data[shape.name][0]
            bayes[shape.name] = _compile(partial(_bayes, pair, shape), *given, shift)
        for i, row in enumerate(self.rows[:_NUM_CERTIFIED]):
            z = np.zeros(self.num_rows, int)
            theta, expected, log_posterior = {}, {}, {}
            for _, shape in self.shapes:
                at, log_posterior[shape.name], expected[shape.name] = jax.device_get(
                    bayes[shape.name](
                        self.hyper[shape.name], data[shape.name][row], 1 / (2 + i)
                    )
                )
                for role, cluster in shape.roles:
                    theta[cluster] = self.theta[1][cluster].copy()
                    theta[cluster][0] = at[role]
            values = self.evaluate(z, theta)
            for pair, shape in self.shapes:
                log_prob, log_prior = (
                    values[shape.name].log_prob,
                    values[shape.name].log_prior,
                )
                terms = log_prob[i], log_prior[0], -log_posterior[shape.name]
                gap = np.abs(sum(terms) - expected[shape.name])
                size = 1 + sum(np.abs(t) for t in terms) + np.abs(expected[shape.name])
                bad = ~(gap <= _TOLERANCE * size)
                if np.any(bad):
                    index = tuple(int(j[0]) for j in np.nonzero(np.atleast_1d(bad)))
                    index = index if shape.feature_shape else ()
                    worst = float(np.asarray(gap)[index])
                    clusters = " and ".join(f"'{c}'" for _, c in shape.roles)
                    raise NotRecognised(
                        f"{_column(shape, index)} with cluster sites {clusters} fails "
                        f"Bayes' law for {pair_name(pair)} by {worst:.3g} nats in row "
                        f"{row}: the model's densities are not those of the pair. "
                        f"{pair.form}"
                    )


def _bayes(pair: AbstractConjugatePair, shape: SiteShape, hyper: Hyper, x, shift):
    """
    Given one row `x`, for every feature: a point theta inside the posterior, its log
    posterior density, and the log marginal likelihood of the row.
    """

    def one_feature(hyper, x):
        stat = pair.add(pair.empty(hyper), x)
        posterior = pair.posterior(hyper, stat)
        theta = pair.theta(posterior, partial(_inside, shift))
        density = []

        def record(role, fn):
            density.append(fn.log_prob(theta[role]))
            return theta[role]

        pair.theta(posterior, record)
        return theta, sum(density), pair.log_marginal(hyper, stat)

    num = len(shape.feature_shape)
    flat = {
        name: jnp.reshape(value, (shape.num_features, *jnp.shape(value)[num:]))
        for name, value in hyper.items()
    }
    out = jax.vmap(one_feature)(flat, jnp.reshape(x, shape.num_features))
    return jax.tree.map(lambda v: v.reshape(shape.feature_shape + v.shape[1:]), out)


def _inside(shift, role: str, fn: dist.Distribution) -> Array:
    """`SampleFn` for a point well inside the distribution. The certificate holds at
    every point, but a draw from a vague posterior may overflow."""
    del role
    if isinstance(fn, dist.Normal):
        return fn.loc + shift * fn.scale
    if isinstance(fn, dist.InverseGamma):
        return (1 + shift) * fn.rate / (fn.concentration + 1)
    return fn.mean


def _close(a, b) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    scale = np.maximum(np.abs(a), np.abs(b))
    with np.errstate(invalid="ignore"):
        return bool(np.all((a == b) | (np.abs(a - b) <= _TOLERANCE * scale)))


# --- reading values ------------------------------------------------------------------


class Reading(NamedTuple):
    """
    What a model says for given arguments.

    - **prior** - prior of the partition.
    - **components** - for each block its hyperparameters and data.
    - **theta** - feasible values of the cluster sites, by name.
    """

    prior: PartitionDistribution
    components: tuple[Component, ...]
    theta: dict[str, Array]


def read(plan: Plan, model: Model, args: Args, kwargs: Kwargs) -> Reading:
    """
    Read the values behind `plan`. Traceable; the likelihood is never evaluated, and is
    dead code once compiled.
    """

    def pick(site):
        if site["type"] != "sample" or site["is_observed"]:
            return None
        if site["name"] == plan.partition:
            return jnp.zeros(plan.num_rows, jnp.int32)
        return init_to_feasible(site)

    with handlers.block():
        trace = _trace(model, args, kwargs, pick)
    components = []
    for block in plan.blocks:
        hyper, data = [], []
        for shape in block.sites:
            values = _hyperparameters(block.pair, shape, trace, plan.capacity)
            hyper.append({name: value[0] for name, value in values.items()})
            data.append(jnp.asarray(trace[shape.name]["value"]))
        components.append(Component(block, block.pack(hyper), data))
    return Reading(
        prior=_peel(trace[plan.partition]["fn"]),
        components=tuple(components),
        theta={name: trace[name]["value"] for name in plan.cluster_sites},
    )
