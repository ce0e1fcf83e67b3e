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

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.distributions.discrete import CategoricalLogits, CategoricalProbs
from numpyro.infer.gibbs import GIBBS_SITES_KWARG

from numpyro_subanneal import hyper as hyper_moves
from numpyro_subanneal.compiling import compile_for
from numpyro_subanneal.conjugate import registry
from numpyro_subanneal.conjugate.base import (
    AbstractBlock,
    AbstractConjugatePair,
    SiteShape,
)
from numpyro_subanneal.distributions import PartitionDistribution
from numpyro_subanneal.probe import Prober, Seats, column_name, pair_name
from numpyro_subanneal.reading import (
    HyperSite,
    Partition,
    Plan,
    with_array_arguments,
)
from numpyro_subanneal.skeleton import (
    Args,
    Kwargs,
    Model,
    NotRecognised,
    Site,
    Skeleton,
    cell_mask,
    feasible,
    partial_mask_message,
    read_skeleton,
    run_trace,
)
from numpyro_subanneal.views import Membership

# --- recognition -------------------------------------------------------------------


def recognise(model: Model, args: Args, kwargs: Kwargs) -> Plan:
    """
    Read `model`.

    :param model: a NumPyro model with one partition of the rows, or several, each of
        some features, which a site may partition too.
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


class _Reader:
    """One reading of a model; `table` holds what was found so far, for `explain`."""

    def __init__(self, model: Model, args: Args, kwargs: Kwargs):
        self.model = model
        self.args = tuple(args)
        self.kwargs = dict(kwargs)
        # What other kernels of a composite sample, whatever their values are now.
        self.siblings = tuple(self.kwargs.pop(GIBBS_SITES_KWARG, {}))
        self.table: list[tuple[str, str, str, str]] = []

    def plan(self) -> Plan:
        # Under validation NumPyro warns of bad data and bad hyperparameters, which are
        # refused below by the name of their site.
        try:
            with handlers.block(), numpyro.validation_enabled(False):
                return self._plan()
        except (
            jax.errors.TracerArrayConversionError,
            jax.errors.ConcretizationTypeError,
        ) as error:
            raise NotRecognised(
                "The model needs a value of its data, or of a latent site, while JAX "
                "traces it: NumPy functions, `float`, `int` and `if` cannot take such "
                "a value. Write `jax.numpy` in their place, such as `jnp.isnan`, and "
                "`jnp.asarray(x)[index]` where a NumPy array is indexed by a latent "
                "site or by the index of a plate; give `handlers.condition` arrays of "
                "JAX; or compute what depends on the data alone beforehand and hand "
                "it to the model. JAX said: " + str(error).split("\n")[0]
            ) from error

    def _plan(self) -> Plan:
        check_arguments(self.args, self.kwargs)
        leaves = jax.tree.leaves((self.args, self.kwargs))
        if any(isinstance(x, jax.core.Tracer) for x in leaves):
            raise NotRecognised(
                "The model's arguments are traced (`MCMC.run` was called inside "
                "`jax.jit` or another transformation), so that the data cannot be "
                "checked. Call `MCMC.run` outside the transformation; "
                "`jit_model_args=True` makes data an argument of the compiled program."
            )
        skeleton = read_skeleton(self.model, self.args, self.kwargs)
        sites = skeleton.sites
        partitions = self._partitions(sites)
        imputed = self._imputed(skeleton)
        mixtures, clusters, hyper = self._roles(sites, partitions, imputed)
        per_view = self._per_view(sites, partitions, hyper, imputed)
        capacity = self._capacity(sites, partitions, clusters)
        self._check_components(sites, partitions[0], clusters[0], capacity)
        shapes = [
            self._shape(sites[name], sites, roles, capacity)
            for name, roles in mixtures.items()
        ]
        follows = {
            name: partition
            for name in mixtures
            for partition in partitions
            if partition.name in sites[name].upstream
        }
        parents = {p.name: [p.name] for p in partitions}
        parents |= {name: [name, *roles] for name, roles in mixtures.items()}
        fixed = {
            name
            for name, own in parents.items()
            if not any(h in sites[n].upstream for h in hyper for n in own)
        }
        seats = self._probe(
            partitions, follows, per_view, capacity, hyper, imputed, shapes, fixed
        )
        by_pair: dict[AbstractConjugatePair, list[SiteShape]] = {}
        for pair, shape in shapes:
            by_pair.setdefault(pair, []).append(shape)
        blocks = tuple(b for p, group in by_pair.items() for b in p.blocks(group))
        memberships = tuple(
            _membership(block, partitions, follows, seats) for block in blocks
        )
        plan = Plan(
            partitions=partitions,
            capacity=capacity,
            blocks=blocks,
            memberships=memberships,
            hyper=self._hyper_sites(sites, partitions, mixtures, hyper, per_view),
            imputed=imputed,
            deterministic=skeleton.deterministic,
        )
        if plan.viewed:
            plan = replace(plan, blocks=tuple(b.apart() for b in blocks))
        return self._separated(plan)

    # --- roles -------------------------------------------------------------------

    def _note(self, site: str, role: str, pair: str = "", why: str = "") -> None:
        self.table.append((site, role, pair, why))

    def _partitions(self, sites: Mapping[str, Site]) -> tuple[Partition, ...]:
        """The partitions of the rows, each with the one of its features, if any."""
        names = [
            s.name
            for s in sites.values()
            if issubclass(s.fn, PartitionDistribution) and not s.observed
        ]
        if not names:
            return (self._labelled(sites),)
        for name in names:
            *views, size = sites[name].shape
            if size == 0 or 0 in views:
                what = "rows" if len(names) == 1 else "rows or features"
                raise NotRecognised(
                    f"Partition site '{name}' has zero {'views' if size else what} "
                    f"(shape {sites[name].shape})."
                )
        features = self._feature_partitions(sites, names)
        columns = set(features.values())
        return tuple(
            self._partition(sites, sites[name], features.get(name))
            for name in names
            if name not in columns
        )

    def _feature_partitions(
        self, sites: Mapping[str, Site], names: Sequence[str]
    ) -> dict[str, str | None]:
        """Of each partition of rows, the site that partitions features into its
        views."""
        found: dict[str, str | None] = {}
        user: dict[str, str] = {}  # The first observed site that depends on each.
        for site in sites.values():
            behind = [u for u in site.upstream if u in names]
            # Factors are refused later.
            if not site.observed or not behind or site.fn is dist.Unit:
                continue
            rows, features = _split(sites, site, behind)
            if rows in found.values() or features in found:
                name, of = (
                    (rows, "rows") if rows in found.values() else (features, "features")
                )
                other = "features" if of == "rows" else "rows"
                raise NotRecognised(
                    f"Partition site '{name}' partitions the {of} of observed site "
                    f"'{site.name}', but the {other} of '{user[name]}'. Give rows and "
                    "features partition sites of their own."
                )
            if features is not None and found.get(rows) != features:
                other = next((r for r, f in found.items() if f == features), rows)
                if other != rows:
                    raise NotRecognised(
                        f"'{features}' partitions features into the views of "
                        f"'{other}' for observed site '{user[features]}' and of "
                        f"'{rows}' for '{site.name}'. Give each partition of rows a "
                        "partition of its own features."
                    )
            if found.setdefault(rows, features) != features:
                by = [f"'{f}'" if f else "none" for f in (found[rows], features)]
                raise NotRecognised(
                    f"Observed sites '{user[rows]}' and '{site.name}' depend on "
                    f"partition site '{rows}' with different partitions of the "
                    f"features, {by[0]} and {by[1]}. Views that features are "
                    "partitioned into are told apart by that partition alone: index "
                    "both sites by it, or by rows' partitions of their own."
                )
            for name in behind:
                user.setdefault(name, site.name)
        return found

    def _partition(
        self, sites: Mapping[str, Site], site: Site, features: str | None
    ) -> Partition:
        if len(site.shape) > 2:
            raise NotRecognised(
                f"Partition site '{site.name}' has shape {site.shape}; it must have "
                "one axis, the rows, or two, views and rows. Take it out of a plate, "
                "or give it parameters of fewer axes."
            )
        *views, num_rows = site.shape
        num_views = views[0] if views else None
        num_elements = 0
        if features is not None:
            (num_elements,) = sites[features].shape
            kind = sites[features].fn.__name__
            if num_views == 1 and num_elements > 1:
                raise NotRecognised(
                    f"Partition site '{site.name}' has one view, into which "
                    f"'{features}' cannot partition {num_elements} features. Let the "
                    "plate of the views hold at least 2; as many as there are "
                    "features are always enough."
                )
            why = f"{num_elements} features into at most {num_views} views"
            self._note(features, "features", kind, why)
        why = f"{num_rows} rows" + (f", {num_views} views" if views else "")
        self._note(site.name, "partition", site.fn.__name__, why)
        return Partition(
            site.name,
            num_rows,
            num_views=num_views,
            features=features,
            num_elements=num_elements,
        )

    def _labelled(self, sites: Mapping[str, Site]) -> Partition:
        """A mixture of so many components: the assignments are a categorical site that
        observed sites depend on."""
        used = {u for s in sites.values() if s.observed for u in s.upstream}
        found = [
            s.name
            for s in sites.values()
            if s.name in used and issubclass(s.fn, CategoricalProbs | CategoricalLogits)
        ]
        if len(found) != 1:
            for s in sites.values():
                if s.observed and issubclass(s.fn, PartitionDistribution):
                    raise NotRecognised(
                        f"Partition site '{s.name}' is observed, so that there is "
                        "nothing to sample. Leave out its `obs`; to start from an "
                        f"assignment, give `MCMC.run` init_params={{'{s.name}': ...}}."
                    )
            problem = (
                "The model has no partition site"
                if not found
                else f"The model has {len(found)} partition sites, "
                + ", ".join(f"'{name}'" for name in found)
            )
            raise NotRecognised(
                f"{problem}; it must have exactly one latent site with a partition "
                "prior, such as `z = numpyro.sample('z', "
                "ChineseRestaurantProcess(1.0, size=num_rows))`, or a categorical one "
                "in a plate of rows. "
                + (f"{_SEVERAL} " if found else "")
                + f"Its sample sites are {list(sites)}."
            )
        (name,) = found
        site = sites[name]
        if len(site.shape) != 1:
            raise NotRecognised(
                f"Partition site '{name}' has shape {site.shape}; it must have one "
                "axis, the rows. Sample it in a plate of the rows."
                + (f" {_SEVERAL}" if len(site.shape) > 1 else "")
            )
        if site.shape[0] == 0:
            raise NotRecognised(f"Partition site '{name}' has zero rows.")
        weights = self._weights(sites, site)
        self._note(name, "partition", site.fn.__name__, f"{site.shape[0]} rows")
        if weights is not None:
            kind = sites[weights].fn.__name__
            self._note(weights, "weights", kind, "of the clusters, integrated out")
        return Partition(name, site.shape[0], weights, labelled=True)

    def _weights(self, sites: Mapping[str, Site], site: Site) -> str | None:
        """The latent site that the probabilities of a categorical partition site are
        made of."""
        if not site.upstream:
            return None
        if len(site.upstream) > 1:
            raise NotRecognised(
                f"The probabilities of partition site '{site.name}' depend on "
                f"{len(site.upstream)} latent sites, {list(site.upstream)}; they must "
                "be one Dirichlet site, or the sticks broken off by one Beta site."
            )
        weights = sites[site.upstream[0]]
        if not issubclass(weights.fn, dist.Dirichlet | dist.Beta):
            raise NotRecognised(
                f"The weights '{weights.name}' of partition site '{site.name}' have "
                f"the prior {weights.fn.__name__}; known are Dirichlet and, broken off "
                "a stick, Beta."
            )
        if len(weights.shape) != 1:
            raise NotRecognised(
                f"The weights '{weights.name}' of partition site '{site.name}' have "
                f"shape {weights.shape}; they must have one axis, the clusters."
            )
        return weights.name

    def _check_components(self, sites, partition, cluster, capacity) -> None:
        if partition.weights is None:
            return
        weights = sites[partition.weights]
        missing = 1 if issubclass(weights.fn, dist.Beta) else 0
        if weights.shape[0] + missing != capacity:
            raise NotRecognised(
                f"The weights '{weights.name}' are of {weights.shape[0] + missing} "
                f"clusters, but cluster site '{cluster}' has {capacity}. Both must "
                "have the same number"
                + (" (one more than sticks are broken off)." if missing else ".")
            )

    def _imputed(self, skeleton: Skeleton) -> tuple[str, ...]:
        """Latent sites for masked cells, which `numpyro.sample` makes of `obs_mask`."""
        sites = skeleton.sites
        used = {u for s in sites.values() for u in s.upstream}
        found = []
        for name, site in sites.items():
            twin = _observed_twin(sites, name)
            if (
                twin is not None
                and twin.observed
                and not site.observed
                and site.masked
                and twin.masked
                and site.fn is twin.fn
                and name not in used
            ):
                found.append(name)
                self._note(name, "masked cells", "", "drawn from the likelihood")
        return tuple(found)

    def _roles(
        self,
        sites: Mapping[str, Site],
        partitions: Sequence[Partition],
        imputed: Sequence[str],
    ) -> tuple[dict[str, list[str]], list[str], list[str]]:
        assigned = _assigned(partitions)
        self._check_observed_rows(sites, partitions)
        self._check_used(sites, partitions)
        mixtures = {
            name: self._cluster_sites(sites, site, assigned)
            for name, site in sites.items()
            if site.observed and any(u in assigned for u in site.upstream)
        }
        owner: dict[str, str] = {}
        for name, roles in mixtures.items():
            if sites[name].fn is dist.Unit:
                behind = next(u for u in sites[name].upstream if u in assigned)
                raise NotRecognised(
                    f"Factor '{name}' depends on partition site '{behind}'; "
                    "only observed sites with a registered likelihood can."
                )
            self._check_discrete(sites, sites[name], roles, partitions)
            for role in roles:
                if role in owner:
                    raise NotRecognised(
                        f"Cluster site '{role}' is used by two observed sites, "
                        f"'{owner[role]}' and '{name}'. Each needs cluster parameters "
                        "of its own."
                    )
                owner[role] = name
        weights = partitions[0].weights
        integrated = (*assigned, weights, *imputed, *owner)
        hyper = [
            name
            for name, site in sites.items()
            if not site.observed and name not in integrated
        ]
        for name, site in sites.items():
            # What a site may depend on, besides hyperparameters.
            if name in assigned:
                allowed = [weights]
            elif name in mixtures:
                allowed = [*assigned, *mixtures[name]]
            elif name in owner:
                allowed = mixtures[owner[name]]
            elif name in imputed:
                continue
            else:
                allowed = []
            inner = [u for u in site.upstream if u not in (*hyper, *allowed)]
            if inner and name in owner:
                raise NotRecognised(
                    f"The prior of cluster site '{name}' depends on latent site "
                    f"'{inner[0]}'; it may depend only on hyperparameters and on "
                    f"cluster parameters of the same observed site '{owner[name]}'."
                )
            if inner:
                raise NotRecognised(self._misplaced(sites, site, inner[0], mixtures))
        return mixtures, list(owner), hyper

    def _check_used(
        self, sites: Mapping[str, Site], partitions: Sequence[Partition]
    ) -> None:
        used = {u for s in sites.values() if s.observed for u in s.upstream}
        if not any(s.observed for s in sites.values()):
            raise NotRecognised(
                "The model has no observed site: give the data to "
                "`numpyro.sample(..., obs=data)`."
            )
        for name in _assigned(partitions):
            if name not in used:
                way_out = (
                    f"Index the cluster parameters of the likelihood by it, as in "
                    f"`loc[{name}]`"
                )
                if len(partitions) > 1:
                    way_out += (
                        ", or the views of rows' partitions, if they are what it "
                        f"partitions features into, as in `z[{name}].T`"
                    )
                raise NotRecognised(
                    f"No observed site depends on partition site '{name}'. {way_out}."
                )
        first = partitions[0]
        for other in partitions:
            if other.num_rows != first.num_rows:
                raise NotRecognised(
                    f"Partition sites '{first.name}' and '{other.name}' have "
                    f"{first.num_rows} and {other.num_rows} rows; all partitions must "
                    "be of the same rows."
                )

    def _misplaced(
        self,
        sites: Mapping[str, Site],
        site: Site,
        inner: str,
        mixtures: Mapping[str, Sequence[str]],
    ) -> str:
        kind = "Observed" if site.observed else "Latent"
        problem = (
            f"{kind} site '{site.name}' depends on latent site '{inner}', which is "
            "integrated out; that only parameters of the same clusters and observed "
            "sites that are indexed by the partition can."
        )
        for name, roles in mixtures.items():
            if site.name in sites[name].upstream and inner in roles:
                wanted = sites[inner].shape[:1] + sites[name].feature_shape
                return (
                    f"{problem} If it is a parameter of the clusters of '{name}', it "
                    f"must have shape {wanted}, one for each cluster and feature, not "
                    f"{site.shape}."
                )
        twin = _observed_twin(sites, site.name)
        if twin is not None:
            name = twin.name.removesuffix("_observed")
            shape = twin.shape[:1] + twin.feature_shape
            return (
                f"{problem} NumPyro made it of the `obs_mask` of '{name}', which must "
                f"be an array of {shape} booleans; leave it out where all cells are "
                "observed."
            )
        return problem

    def _cluster_sites(
        self, sites: Mapping[str, Site], site: Site, assigned: Sequence[str]
    ) -> list[str]:
        """
        Latent sites that may be parameters of clusters of an observed site: those with
        a value for each of its features, and one more axis. Others are parameters that
        all clusters have in common.
        """
        latent = [u for u in site.upstream if u not in assigned]
        found = [
            u
            for u in latent
            if len(sites[u].shape) > sites[u].event_dim
            and sites[u].feature_shape == site.feature_shape
            and u not in self.siblings
        ]
        # If there are none, what is wrong is said of all.
        return found or [u for u in latent if u not in self.siblings] or latent

    def _per_view(
        self,
        sites: Mapping[str, Site],
        partitions: Sequence[Partition],
        hyper: Sequence[str],
        imputed: Sequence[str],
    ) -> dict[str, str]:
        """Hyperparameters in a plate of views that features are partitioned into, with
        the name of the site of these views."""
        found: dict[str, str] = {}
        for partition in partitions:
            if partition.features is None:
                continue
            views = [n for n, axis in sites[partition.name].plates.items() if axis == 0]
            inside = [n for n in hyper if any(v in sites[n].plates for v in views)]
            for name in inside:
                site = sites[name]
                (plate,) = (v for v in views if v in site.plates)
                what = (
                    f"Latent site '{name}' is in plate '{plate}' of the views of "
                    f"'{partition.name}'"
                )
                if name in found:
                    raise NotRecognised(
                        f"{what}, and of those of '{found[name]}'. Views of different "
                        "sites are different: give each a plate of its own."
                    )
                if site.plates[plate] != 0:
                    raise NotRecognised(
                        f"{what}, but has shape {site.shape}: the views must be the "
                        "only axis of its batch. Take it out of other plates; `expand` "
                        "and `to_event` make vectors."
                    )
                if name in self.siblings:
                    raise NotRecognised(
                        f"{what}, but is sampled by another kernel. Views that "
                        "features are partitioned into change their labels, and it "
                        "with them: leave it to `SubsampleAnnealedGibbs`."
                    )
                for other in sites.values():
                    if name not in other.upstream or other.name in imputed:
                        continue
                    if other.name not in (partition.name, *inside):
                        kind = "observed" if other.observed else "latent"
                        raise NotRecognised(
                            f"{what}, and {kind} site '{other.name}' depends on it. "
                            f"Only '{partition.name}' and sites in that plate can: "
                            f"'{partition.features}' partitions features into views "
                            "whose labels mean nothing. Sample it outside the plate, "
                            "once for all views or for each feature."
                        )
                found[name] = partition.name
        return found

    def _hyper_sites(
        self,
        sites: Mapping[str, Site],
        partitions: Sequence[Partition],
        mixtures: Mapping[str, Sequence[str]],
        hyper: Sequence[str],
        per_view: Mapping[str, str],
    ) -> tuple[HyperSite, ...]:
        """The latent sites that the kernel samples itself, given the assignments."""
        behind = {
            name: {
                u for n in (name, *mixtures.get(name, ())) for u in sites[n].upstream
            }
            for name in sites
            if name in (*_assigned(partitions), *mixtures, *hyper)
            or sites[name].observed
        }
        weights = partitions[0].weights
        if weights is not None:
            behind[partitions[0].name] |= set(sites[weights].upstream)
        found = []
        for name in hyper:
            site = sites[name]
            if name in self.siblings:
                self._note(name, "given", "", "sampled by another kernel")
                continue
            if site.discrete and not site.finite:
                raise NotRecognised(
                    f"Latent site '{name}' ~ {site.fn.__name__} is discrete and cannot "
                    "be enumerated. Give it a finite support, such as `Grid` or "
                    "`Categorical`."
                )
            factors = tuple(n for n in behind if n == name or name in behind[n])
            finite = site.finite and site.discrete
            if finite and site.made_event:
                raise NotRecognised(
                    f"Latent site '{name}' ~ {site.fn.__name__} is made an event by "
                    "`to_event`, the values of which cannot be enumerated one element "
                    "at a time. Put it into a plate instead."
                )
            of = per_view.get(name)
            found.append(HyperSite(name, finite, site.shape, factors, per_view=of))
            how = "enumerated" if finite else "real"
            if of is not None:
                how += f"; for each view of '{of}'"
            others = ", ".join(f"'{n}'" for n in factors if n != name) or "nothing"
            self._note(name, "hyperparameter", "", f"{how}; of {others}")
        return tuple(found)

    def _separated(self, plan: Plan) -> Plan:
        """`plan`, with what elements of hyperparameters can be updated at once."""
        rebuild, arrays = with_array_arguments(self.args, self.kwargs)
        with jax.enable_x64(True):
            arrays = [x.view() if isinstance(x, np.ndarray) else x for x in arrays]
            together = hyper_moves.find_separable(plan, self.model, rebuild, arrays)
        return replace(
            plan,
            hyper=tuple(
                replace(site, separable=together.get(site.name, True))
                for site in plan.hyper
            ),
        )

    def _check_observed_rows(
        self, sites: Mapping[str, Site], partitions: Sequence[Partition]
    ) -> None:
        assigned = _assigned(partitions)
        rows = {p.name: p.num_rows for p in partitions}
        for site in sites.values():
            mixed = any(n in assigned for n in (site.name, *site.upstream))
            if site.scaled and (mixed or not site.observed):
                raise NotRecognised(
                    f"The log density of site '{site.name}' is scaled "
                    "(`numpyro.handlers.scale`); a scaled model has no conjugate "
                    "marginal."
                )
            if site.masked and not site.observed and "_unobserved" not in site.name:
                raise NotRecognised(
                    f"Latent site '{site.name}' is masked; only observed sites can be. "
                    "Put `numpyro.handlers.mask` around those alone."
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
            if site.mask_upstream:
                raise NotRecognised(
                    f"The mask of observed site '{site.name}' depends on latent site "
                    f"'{site.mask_upstream[0]}'; it must be a constant."
                )
            if 0 in site.shape[1:]:
                raise NotRecognised(
                    f"Observed site '{site.name}' has no features (shape {site.shape})."
                )
            if not mixed:
                continue
            num_rows = next(rows[u] for u in site.upstream if u in rows)
            if site.shape[:1] != (num_rows,):
                own = site.shape[0] if site.shape else "no"
                raise NotRecognised(
                    f"Observed site '{site.name}' has {own} rows (shape "
                    f"{site.shape}), but the partition has {num_rows}. Rows are the "
                    "first axis of an observed value."
                )
            if site.shape != site.fn_shape:
                if site.masked and site.event_dim > 0:
                    raise NotRecognised(partial_mask_message(site.name))
                by = [sites[u] for u in site.upstream if u in rows]
                hint = "".join(
                    f" If plate '{plate}' of '{u.name}' is that of the rows, take "
                    f"'{u.name}' out of it: its `size` gives each row a cluster."
                    for u in by
                    if u.shape == (num_rows, num_rows)
                    for plate in u.plates
                )
                shapes = " and ".join(f"'{u.name}' of shape {u.shape}" for u in by)
                raise NotRecognised(
                    f"The value of observed site '{site.name}' has shape {site.shape}, "
                    f"but its distribution has shape {site.fn_shape}; it is indexed by "
                    f"partition site {shapes}.{hint}"
                )

    def _check_discrete(
        self,
        sites: Mapping[str, Site],
        site: Site,
        roles: Sequence[str],
        partitions: Sequence[Partition],
    ) -> None:
        """Refuse assignments, of rows or of features, that are no partition site."""
        if partitions[0].labelled:
            return
        known = set(_assigned(partitions))
        if len({sites[role].shape[:1] for role in roles}) == 1:
            known.update(roles)
        viewed = any(
            p.num_views is not None for p in partitions if p.name in site.upstream
        )
        for name in site.upstream:
            latent = sites[name]
            of_rows = (
                latent.shape[-1:] == site.shape[:1] != (1,)
                and site.shape[0] not in site.feature_shape
                and issubclass(latent.fn, CategoricalProbs | CategoricalLogits)
            )
            # Features could be in other views at every value of it.
            index = viewed and latent.dtype.kind in "biu"
            if name not in known and (of_rows or index):
                raise NotRecognised(
                    f"Observed site '{site.name}' depends on latent site '{name}' ~ "
                    f"{latent.fn.__name__} besides partition sites. {_SEVERAL}"
                )

    def _capacity(
        self,
        sites: Mapping[str, Site],
        partitions: Sequence[Partition],
        clusters: Sequence[str],
    ) -> int:
        sizes = {name: sites[name].shape[:1] for name in clusters}
        for name, size in sizes.items():
            if not size:
                raise NotRecognised(
                    f"Latent site '{name}' is a scalar, so it is not indexed by the "
                    "partition. Put it in a plate of clusters and index it, as in "
                    f"`{name}[z]`. (In NumPyro's `Gibbs` this kernel needs the "
                    "parameters of the clusters among its sites, beside the partition.)"
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
        for partition in partitions:
            if partition.num_views is not None and sizes[first][0] == 1:
                raise NotRecognised(
                    f"Cluster site '{first}' has capacity 1, so that the views of "
                    f"'{partition.name}' are all the same. The plate of the clusters "
                    "must hold at least 2."
                )
        return sizes[first][0]

    def _shape(
        self, site: Site, sites: Mapping[str, Site], roles: list[str], capacity: int
    ) -> tuple[AbstractConjugatePair, SiteShape]:
        types = {r: sites[r].fn for r in roles}
        by_row = None
        for pair in registry.for_likelihood(site.fn):
            named = registry.match_roles(pair, types)
            if named is None:
                continue
            varying = [name for name in pair.given if _varies_by_row(site, name)]
            if varying:
                by_row = pair, varying[0]
                continue
            return pair, self._site_shape(site, sites, named, capacity)
        if by_row is not None:
            pair, name = by_row
            raise NotRecognised(
                f"Parameter `{name}` of observed site '{site.name}' differs between "
                f"rows; for {pair_name(pair)} it must be the same known value in all "
                f"of them. {pair.form}"
            )
        raise NotRecognised(self._unregistered(site, types))

    def _site_shape(self, site, sites, named, capacity) -> SiteShape:
        role_shapes = []
        for _, cluster in named:
            event_shape = sites[cluster].event_shape
            wanted = (capacity, *site.feature_shape, *event_shape)
            shape = sites[cluster].shape
            if shape != wanted:
                hint = ""
                viewed = any(
                    issubclass(sites[u].fn, PartitionDistribution)
                    and len(sites[u].shape) > 1
                    for u in site.upstream
                )
                if viewed and shape[2:] == wanted[1:]:
                    hint = " All views use the same, so that it has no axis of views."
                raise NotRecognised(
                    f"Cluster site '{cluster}' has shape {shape}, but observed site "
                    f"'{site.name}' with features {site.feature_shape} needs {wanted}: "
                    f"one parameter for each cluster and feature.{hint}"
                )
            role_shapes.append(event_shape)
        return SiteShape(
            site.name,
            named,
            site.feature_shape,
            site.event_shape,
            tuple(role_shapes),
            site.masked,
        )

    def _unregistered(
        self, site: Site, types: Mapping[str, type[dist.Distribution]]
    ) -> str:
        fn = site.fn.__name__
        here = ", ".join(f"'{r}' ~ {t.__name__}" for r, t in types.items())
        problem = (
            f"Observed site '{site.name}' ~ {fn} with cluster sites {here or 'none'} "
            "is not a registered conjugate pair."
        )
        known = registry.for_likelihood(site.fn)
        if known:
            options = [f"{pair_name(p)} ({_difference(p, types)})" for p in known]
            return f"{problem} Registered for {fn}: {'; '.join(options)}."
        names = sorted(
            {f.__name__ for p in registry.known_pairs() for f in p.likelihood}
        )
        return (
            f"{problem} No pair is registered for {fn}; there are pairs for "
            f"{', '.join(names)}, and `register_conjugate` adds one."
        )

    # --- probes ------------------------------------------------------------------

    def _probe(
        self,
        partitions: Sequence[Partition],
        follows: Mapping[str, Partition],
        per_view: Mapping[str, str],
        capacity: int,
        hyper: Sequence[str],
        imputed: Sequence[str],
        shapes: list[tuple[AbstractConjugatePair, SiteShape]],
        fixed: Collection[str],
    ) -> dict[str, Seats]:
        """Check what can only be seen with values, and find what features are indexed
        by."""
        data, live = self._data([shape for _, shape in shapes])
        for _, shape in shapes:
            if shape.name in live:
                data[shape.name] = _fill(data[shape.name], live[shape.name])
        dtype = np.dtype(jax.dtypes.canonicalize_dtype(np.float64))
        # In double precision: the laws then hold to many more digits than a wrong model
        # could by chance, whatever the scale of the data.
        with jax.enable_x64(True):
            prober = Prober(
                self.model,
                self.args,
                self.kwargs,
                partitions,
                follows,
                per_view,
                capacity,
                hyper,
                imputed,
                shapes,
                data,
                live,
            )
            prober.check_prior(dtype, fixed)
            prober.check_exchangeable()
            prober.check_learned([n for n in hyper if n not in self.siblings])
            by_row = prober.given_by_row()
        for pair, shape in shapes:
            hyper = prober.hyper[shape.name]
            given = by_row[shape.name]
            x, mask = data[shape.name], live.get(shape.name)
            check_data(pair, shape, hyper, given, x, mask)
        with jax.enable_x64(True):
            prober.check_parameters()
            prober.check_certificate()
        for pair, shape in shapes:
            why = f"{shape.num_features} feature(s); densities agree with Bayes' law"
            if len(_assigned(partitions)) > 1 or partitions[0].num_views is not None:
                partition = follows[shape.name]
                why += f"; clusters of '{partition.name}'"
                if partition.features is not None:
                    why += f" in the views of '{partition.features}'"
            if shape.name in live:
                masked = int((~live[shape.name]).sum())
                why += f"; {masked} of {live[shape.name].size} cells masked"
            self._note(shape.name, "observed", pair_name(pair), why)
            for role, cluster in shape.roles:
                why = f"{role} of {capacity} clusters, integrated out"
                self._note(cluster, "cluster", pair_name(pair), why)
        return prober.seats

    def _data(
        self, shapes: Sequence[SiteShape]
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Observed values, and which cells of masked sites count, on the host."""
        found = []

        def collect(trace):
            values = {shape.name: trace[shape.name]["value"] for shape in shapes}
            live = {
                shape.name: cell_mask(
                    trace[shape.name]["fn"],
                    values[shape.name].shape[:1] + shape.feature_shape,
                )
                for shape in shapes
                if shape.masked
            }
            return values, live

        def read():
            trace = run_trace(self.model, self.args, self.kwargs, feasible)
            found.append(collect(trace))

        jax.eval_shape(read)
        ((values, live),) = found
        traced = [n for n in values if isinstance(values[n], jax.core.Tracer)]
        if traced or live:
            # Computed inside the model: evaluate just that.
            fn, arrays = with_array_arguments(self.args, self.kwargs)

            def compute(arrays):
                values, live = collect(run_trace(self.model, *fn(arrays), feasible))
                return {name: values[name] for name in traced}, live

            computed, live = compile_for(compute, arrays, quickly=True)(arrays)
            values |= computed
        return (
            {name: np.asarray(value) for name, value in values.items()},
            {name: np.asarray(mask) for name, mask in live.items()},
        )


def _observed_twin(sites: Mapping[str, Site], name: str) -> Site | None:
    """The other of the two sites that `numpyro.sample` makes of an `obs_mask`."""
    if not name.endswith("_unobserved"):
        return None
    return sites.get(name.removesuffix("_unobserved") + "_observed")


def check_arguments(args: Args, kwargs: Kwargs) -> None:
    """Refuse arrays that JAX would refuse without saying which."""
    named = {**dict(enumerate(args)), **kwargs}
    for path, leaf in jax.tree_util.tree_leaves_with_path(list(named.items())):
        name = [*named][path[0].idx]
        what = f"Argument {name!r} of the model"
        if isinstance(leaf, np.ma.MaskedArray):
            raise NotRecognised(
                f"{what} is a masked array of NumPy. Hand its `.data` and "
                "`~np.ma.getmaskarray(x)` to the model, which says by "
                "`numpyro.handlers.mask` which cells are observed."
            )
        if isinstance(leaf, np.ndarray | np.generic) and leaf.dtype == np.longdouble:
            if np.dtype(np.longdouble) != np.dtype(np.float64):
                raise NotRecognised(
                    f"{what} holds values of type {leaf.dtype}, which JAX does not "
                    "have; give `x.astype(np.float64)`."
                )


def check_data(
    pair: AbstractConjugatePair,
    shape: SiteShape,
    hyper: Mapping[str, np.ndarray],
    given: Mapping[str, np.ndarray],
    x: np.ndarray,
    live: np.ndarray | None,
) -> None:
    """
    Check observed values.

    :param pair: what they are of.
    :param shape: their site.
    :param hyper: hyperparameters of each feature.
    :param given: parameters given by row, ``[rows, *feature_shape]``.
    :param x: the values, ``[rows, *feature_shape, *event_shape]``.
    :param live: which of them are not masked; None for all.
    :raises NotRecognised: naming the column and the value.
    """
    if live is not None:
        # Each value with the parameters of its own row.
        x = _fill(x, live)
        given = {name: _fill(value, live) for name, value in given.items()}
    for index in np.ndindex(shape.feature_shape):
        at = (slice(None), *index)
        if live is not None and not live[at].any():
            continue
        own = {name: values[index] for name, values in hyper.items()}
        own |= {name: values[at] for name, values in given.items()}
        error = pair.data_error(np.ascontiguousarray(x[at]), own)
        if error is not None:
            raise NotRecognised(column_name(shape, index) + " " + error + ".")


# What to do where assignments of several partitions are not partition sites.
_SEVERAL = (
    "Categorical assignments can only be the one partition of a model. For several, "
    "give each a partition prior, such as `FiniteDirichletMixture` for a known number "
    "of components."
)


def _assigned(partitions: Sequence[Partition]) -> tuple[str, ...]:
    """Names of the sites of labels, of rows and of features."""
    names = [n for p in partitions for n in (p.name, p.features)]
    return tuple(n for n in names if n is not None)


def _split(
    sites: Mapping[str, Site], site: Site, behind: Sequence[str]
) -> tuple[str, str | None]:
    """Of the partition sites `behind` an observed site, the one of its rows and the one
    of its features."""
    if len(behind) == 1:
        return behind[0], None
    # NB: there may be as many rows as features, so that sizes say nothing.
    with_views = [name for name in behind if len(sites[name].shape) == 2]
    others = [name for name in behind if len(sites[name].shape) == 1]
    if len(behind) == 2 and len(with_views) == len(others) == 1:
        return with_views[0], others[0]
    shapes = ", ".join(f"'{name}' of shape {sites[name].shape}" for name in behind)
    problem = f"Observed site '{site.name}' depends on {len(behind)} partition sites"
    raise NotRecognised(
        f"{problem}: {shapes}. It can depend on one that partitions its rows and on "
        "one that partitions its features into views; then exactly one of the two has "
        "two axes, views and rows, such as a site in a plate of views, and the other "
        "one axis, the features."
    )


def _membership(
    block: AbstractBlock,
    partitions: Sequence[Partition],
    follows: Mapping[str, Partition],
    seats: Mapping[str, Seats],
) -> Membership:
    """What the features of `block`, in its order, are indexed by."""
    found: tuple[list[int], ...] = ([], [], [])
    for shape in block.sites:
        own = seats[shape.name]
        place = partitions.index(follows[shape.name])
        found[0].extend([place] * shape.num_features)
        found[1].extend(int(i) for i in own.element.flat)
        found[2].extend(int(i) for i in own.view.flat)
    return Membership(*map(tuple, found))


def _varies_by_row(site: Site, name: str) -> bool:
    """Whether parameter `name` has an entry for every row."""
    shape = site.parameters.get(name, ())
    event_dim = site.fn.arg_constraints[name].event_dim
    batch = shape[: len(shape) - event_dim]
    full = len(batch) == 1 + len(site.feature_shape)
    return full and batch[0] == site.shape[0] > 1


def _fill(x: np.ndarray, live: np.ndarray) -> np.ndarray:
    """Masked cells replaced by the first value of their column that is not masked."""
    first = live.argmax(0)
    event = x.ndim - live.ndim
    index = first[None].reshape(1, *first.shape, *(1,) * event)
    return np.where(
        live.reshape(live.shape + (1,) * event), x, np.take_along_axis(x, index, 0)
    )


def _difference(
    pair: AbstractConjugatePair, types: Mapping[str, type[dist.Distribution]]
) -> str:
    """How cluster sites of these types differ from what `pair` needs."""
    here = list(types.items())
    missing = []
    for role, fn in pair.prior.items():
        match = next((site for site in here if issubclass(site[1], fn)), None)
        if match is None:
            missing.append(f"{role} ~ {fn.__name__}")
        else:
            here.remove(match)
    parts = []
    if missing:
        parts.append("needs " + " and ".join(missing))
    if here:
        names = " and ".join(f"'{name}' ~ {fn.__name__}" for name, fn in here)
        parts.append(f"has no place for {names}")
    return ", ".join(parts)
