# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""The NumPyro kernel: an adapter between `MCMC`, a plan and the moves."""

from collections.abc import Callable, Sequence
import copy
from functools import partial
from typing import Any, NamedTuple
import warnings

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np

from numpyro import handlers
from numpyro.infer.gibbs import GIBBS_SITES_KWARG
from numpyro.infer.mcmc import MCMCKernel
from numpyro.infer.util import unconstrain_fn
from numpyro.util import identity, is_prng_key

from numpyro_subanneal import hyper as hyper_moves
from numpyro_subanneal import plan as planning
from numpyro_subanneal import reading, rows, variates
from numpyro_subanneal.columns import FeatureMoves, FeatureRecord, move_features
from numpyro_subanneal.compiling import compile_for, quick_options, without_data
from numpyro_subanneal.schedule import AbstractSchedule, LinearSchedule
from numpyro_subanneal.splitmerge import (
    Record,
    SplitMerge,
    split_and_merge,
    split_and_merge_in_views,
)
from numpyro_subanneal.subsample import Subsample, over_chains
from numpyro_subanneal.typing import Array
from numpyro_subanneal.variates import check_key
from numpyro_subanneal.views import first_appearance


class SubsampleAnnealedGibbsState(NamedTuple):
    """
    - **z** - the draw: every latent site of the model, in its declared shape. The
      partition's labels number the clusters by the first row of each; rows out of the
      subsample are -1. Cluster parameters are drawn given the assignments; those of
      empty clusters from their prior.
    - **i** - iteration; below the number of warm-up steps the chain anneals.
    - **log_joint** - log probability of the hyperparameters, of the partition and of
      the rows in the subsample, cluster parameters integrated out, in nats.
    - **num_clusters** - number of occupied clusters; where features are in views, that
      of each, ``[views]``, in the order of the draw, zero of those without features.
    - **num_views** - number of views that have features; 1 where there are none.
    - **subsample_size** - number of rows in the subsample.
    - **capacity_reached** - number of moves so far in which a row could not have opened
      a cluster, or a cluster have been split, because all the model's clusters were
      occupied.
    - **order** - a permutation of the rows; the first `subsample_size` are in.
    - **added**, **churned** - the schedule, ``[num_warmup]``: rows to add and to churn
      in each warm-up step. Carried so that a state goes on where it was, whatever
      `MCMC` it is given to.
    - **since** - rows that have moved since the last turn, when hyperparameters were
      updated and clusters split and merged.
    - **split_merge** - what has become of proposals to split and merge clusters; its
      counts are also :attr:`num_splits` and the like.
    - **feature_moves** - what has become of moves of features between views.
    - **hyper_state** - state of the kernel that samples continuous hyperparameters, if
      one was given, else None.
    - **rng_key** - random number generator key.
    """

    z: dict[str, Array]
    i: Array
    log_joint: Array
    num_clusters: Array
    num_views: Array
    subsample_size: Array
    capacity_reached: Array
    order: Array
    added: Array
    churned: Array
    since: Array
    split_merge: Record
    feature_moves: FeatureRecord
    hyper_state: Any
    rng_key: Array

    @property
    def num_splits(self) -> Array:
        """Number of proposals to split a cluster that were accepted so far."""
        return self.split_merge.splits

    @property
    def num_merges(self) -> Array:
        """Number of proposals to merge two clusters that were accepted so far."""
        return self.split_merge.merges

    @property
    def num_split_proposals(self) -> Array:
        """Number of proposals to split a cluster so far."""
        return self.split_merge.split_proposals

    @property
    def num_merge_proposals(self) -> Array:
        """Number of proposals to merge two clusters so far."""
        return self.split_merge.merge_proposals


_SPLIT_MERGE = SplitMerge()
_FEATURE_MOVES = FeatureMoves()

# What a kernel finds out in `init` that is of that kernel and process alone.
_NOT_COPIED = ("_read_for", "_hyper", "_init_fn", "_init_programs", "_sample_fn")


def _identity(args, kwargs):
    """What arguments are told apart by: leaves, structure, names of other kernels'
    sites."""
    data = {k: v for k, v in kwargs.items() if k != GIBBS_SITES_KWARG}
    leaves, treedef = jax.tree.flatten((args, data))
    return leaves, treedef, tuple(kwargs.get(GIBBS_SITES_KWARG, ()))


def _nobody(shape):
    """
    Assignments of rows none of which is in.

    Behind a barrier: XLA computes what follows from a constant while it compiles, and
    that slowly, for half a minute at 10^6 rows.
    """
    return lax.optimization_barrier(jnp.full(shape, -1, jnp.int32))


class SubsampleAnnealedGibbs(MCMCKernel):
    """
    Subsample-annealed collapsed Gibbs sampling of mixture models.

    The model is an ordinary NumPyro model: a partition site
    (:class:`~numpyro_subanneal.distributions.ChineseRestaurantProcess`,
    :class:`~numpyro_subanneal.distributions.PitmanYorProcess` or another law of
    :mod:`~numpyro_subanneal.distributions`, or a `Categorical` in a plate of rows, its
    weights a Dirichlet's, those of a broken stick or known), cluster parameters in a
    plate whose size is the capacity, and observed sites whose likelihoods index them by
    the partition. The kernel recognises the conjugate pairs, integrates the cluster
    parameters out, and samples the partition; the parameters are drawn afterwards, in
    the same step.

    Every other latent site is a hyperparameter. They are sampled given the assignments,
    cluster parameters integrated out, whenever as many rows have moved as the current
    subsample holds, so once a sweep in the end: those of finite support
    (:class:`~numpyro_subanneal.grid.Grid`, `Categorical`, ...) by enumeration, the
    others by slice sampling of each, or by the kernel `hyper_kernel`. Just before,
    a few proposals are made to split a cluster in two or to merge two
    (:class:`~numpyro_subanneal.splitmerge.SplitMerge`): moves of single rows seldom get
    there.

    In cross-categorization features are partitioned too, into views, each of which
    has a partition of the rows (:mod:`~numpyro_subanneal.models.crosscat`). Then all of
    this happens in every view, and features move between them
    (:class:`~numpyro_subanneal.columns.FeatureMoves`). Of the model's views, those that
    have no feature in a draw come last; their partitions read -1.

    During the warm-up Gibbs moves run on a churning subsample that grows to all
    rows, as its `schedule` says; every later step is one exact sweep, N random-scan
    moves over all N rows. Warm-up draws are not posterior draws. With
    ``num_warmup=0`` the chain starts from a draw of the partition's prior, or from
    ``init_params``.

    .. note:: Pass ``jit_model_args=True`` to `MCMC` when the data are large (say 100
        MB): they are then an argument of the compiled program, not a constant in it.

    .. note:: A sweep is a long sequence of small updates, which gains little from an
        accelerator. Chains are what to run in parallel.

    :param model: Python callable containing Pyro :mod:`~numpyro.primitives`.
    :param AbstractSchedule schedule: how the subsample grows during the warm-up;
        defaults to :class:`~numpyro_subanneal.schedule.LinearSchedule`, which churns
        `num_warmup` rows for each row that it adds.
    :param hyper_kernel: makes a kernel for all continuous hyperparameters together, out
        of a NumPyro model: for example :class:`~numpyro.infer.hmc.NUTS`, with options
        ``partial(NUTS, dense_mass=True)``. It adapts during the warm-up only.
    :param joint: groups of names of hyperparameters of finite support and the same
        shape that are enumerated together, in every combination of their values, such
        as ``[("concentration", "discount")]``.
    :param int num_hyper_updates: how often the hyperparameters are updated at each
        turnover of the subsample, or, while it has fewer than 256 rows, each time that
        so many have moved, or all of a smaller table; the paper's is 1 a turnover.
    :param SplitMerge split_merge: how many splits and merges are proposed at each
        turnover, and how; None for none.
    :param FeatureMoves feature_moves: how often features move between views at each
        turnover.
    :raises NotRecognised: by :meth:`init`, before anything is compiled, if the model or
        the data cannot be sampled; :func:`~numpyro_subanneal.plan.explain` shows how a
        model is read.

    **References:**

    1. *Scaling Nonparametric Bayesian Inference via Subsample-Annealing*, F. Obermeyer,
       J. Glidden, E. Jonas (2014)
    2. *Markov Chain Sampling Methods for Dirichlet Process Mixture Models*, R. M. Neal
       (2000), algorithm 3

    **Example**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from jax import random
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_subanneal import ChineseRestaurantProcess
        >>> from numpyro_subanneal import SubsampleAnnealedGibbs

        >>> def model(x, num_clusters=8):
        ...     z = numpyro.sample("z", ChineseRestaurantProcess(1.0, size=len(x)))
        ...     with numpyro.plate("clusters", num_clusters):
        ...         var = numpyro.sample("var", dist.InverseGamma(2.0, 1.0))
        ...         loc = numpyro.sample("loc", dist.Normal(0.0, jnp.sqrt(var / 0.1)))
        ...     with numpyro.plate("rows", len(x)):
        ...         numpyro.sample("x", dist.Normal(loc[z], jnp.sqrt(var[z])), obs=x)

        >>> x = jnp.array([-5.1, -4.9, -5.0, 5.2, 5.0, 4.8])
        >>> mcmc = MCMC(SubsampleAnnealedGibbs(model), num_warmup=5, num_samples=10,
        ...             progress_bar=False)
        >>> mcmc.run(random.key(0), x)
        >>> mcmc.get_samples()["z"].shape
        (10, 6)
    """

    def __init__(
        self,
        model: Callable[..., Any],
        schedule: AbstractSchedule | None = None,
        *,
        hyper_kernel: Callable[[Callable], MCMCKernel] | None = None,
        joint: Sequence[Sequence[str]] = (),
        num_hyper_updates: int = 1,
        split_merge: SplitMerge | None = _SPLIT_MERGE,
        feature_moves: FeatureMoves = _FEATURE_MOVES,
    ):
        if not callable(model):
            raise ValueError(
                "`model` must be a callable NumPyro model, got an object of type "
                f"{type(model).__name__}."
            )
        if schedule is None:
            schedule = LinearSchedule()
        if not isinstance(schedule, AbstractSchedule):
            raise ValueError(
                "`schedule` must be an instance of a schedule class, such as "
                f"`LinearSchedule()`, got {schedule!r}."
            )
        if hyper_kernel is not None and not callable(hyper_kernel):
            raise ValueError(
                "`hyper_kernel` must be a kernel class, such as `NUTS`, or a function "
                f"that makes a kernel out of a model, got {hyper_kernel!r}."
            )
        if isinstance(joint, str) or any(isinstance(group, str) for group in joint):
            raise ValueError(
                "`joint` must be a list of groups of names, such as "
                f"`[('concentration', 'discount')]`, got {joint!r}."
            )
        if (
            isinstance(num_hyper_updates, bool)
            or not isinstance(num_hyper_updates, int | np.integer)
            or num_hyper_updates < 1
        ):
            raise ValueError(
                "`num_hyper_updates` must be a positive integer, got "
                f"{num_hyper_updates!r}."
            )
        if not isinstance(split_merge, SplitMerge | None):
            raise ValueError(
                "`split_merge` must be a `SplitMerge`, such as `SplitMerge()`, or None "
                f"for no such proposals, got {split_merge!r}."
            )
        if not isinstance(feature_moves, FeatureMoves):
            raise ValueError(
                "`feature_moves` must be a `FeatureMoves`, such as `FeatureMoves()`, "
                f"got {feature_moves!r}."
            )
        self._model = model
        self._schedule = schedule
        self._hyper_kernel = hyper_kernel
        self._joint = tuple(tuple(group) for group in joint)
        self._num_hyper_updates = int(num_hyper_updates)
        self._split_merge = split_merge
        self._feature_moves = feature_moves
        # What `init` finds out; the closures among it are not pickled.
        self._plan: reading.Plan | None = None
        self._read_for: tuple | None = None
        self._hyper: MCMCKernel | None = None
        self._num_hyper_warmup = 0
        self._init_fn: Callable | None = None
        self._init_programs: dict[tuple, Callable] | None = None
        self._sample_fn: Callable | None = None
        self._warned = False

    @property
    def model(self) -> Callable[..., Any]:
        """The NumPyro model."""
        return self._model

    @property
    def schedule(self) -> AbstractSchedule:
        """The schedule of the warm-up."""
        return self._schedule

    @property
    def sample_field(self) -> str:
        return "z"

    @property
    def default_fields(self) -> tuple[str, ...]:
        return (
            "z",
            "log_joint",
            "num_clusters",
            "num_views",
            "subsample_size",
            "capacity_reached",
            "num_splits",
            "num_merges",
        )

    def get_diagnostics_str(self, state: SubsampleAnnealedGibbsState) -> str:
        num_rows = state.order.shape[-1]
        annealing = int(state.i) < state.added.shape[-1]
        text = (
            f"{'annealing' if annealing else 'sampling'}, "
            f"{int(state.subsample_size)}/{num_rows} rows, "
            f"{int(state.num_clusters.sum())} clusters"
        )
        if self._plan is not None and self._plan.viewed:
            text += f" in {int(state.num_views)} views"
        if self._split_merge is not None:
            text += f", {int(state.num_splits)} splits, {int(state.num_merges)} merges"
        reached = int(state.capacity_reached)
        if reached:
            text += f", capacity reached in {reached} moves"
            self._warn_of_capacity(state)
        return text

    def _warn_of_capacity(self, state: SubsampleAnnealedGibbsState) -> None:
        """
        Warns, once a run, if the capacity was reached in any chain: from the progress
        bar, or without one from what reads the draws, since NumPyro calls no kernel
        when a run has ended.
        """
        if self._warned or self._plan is None or not np.any(state.capacity_reached):
            return
        self._warned = True
        warnings.warn(
            f"All {self._plan.capacity} clusters of the model were occupied in some "
            "moves, whose rows could not open another. Give the plate of the clusters "
            "a larger size: where the extra field `capacity_reached`, which counts "
            "such moves, still grows after the warm-up, the draws are of partitions "
            "with at most so many clusters.",
            stacklevel=3,
        )

    def postprocess_fn(self, model_args, model_kwargs):
        # Runs at every iteration, so only a model with deterministic sites is replayed;
        # once compiled, its likelihood is dead code.
        if self._plan is None or not self._plan.deterministic:
            return identity
        names = self._plan.deterministic

        def add_deterministic(values):
            substituted = handlers.substitute(
                handlers.seed(self._model, random.key(0)), data=values
            )
            with handlers.block():
                trace = handlers.trace(substituted).get_trace(
                    *model_args, **(model_kwargs or {})
                )
            return {**values, **{name: trace[name]["value"] for name in names}}

        return add_deterministic

    # --- as a block of a composite kernel ---------------------------------------------

    def wrap_model(self, wrapper):
        kernel = copy.copy(self)
        kernel._model = wrapper(self._model)
        kernel._plan = None
        for name in _NOT_COPIED:
            setattr(kernel, name, None)
        return kernel

    def refresh(self, state, model_args, model_kwargs):
        # Statistics are made anew at every step; nothing of the old values is kept.
        return state

    def get_constrain_fn(self, model_args, model_kwargs):
        return identity

    # --- init ----------------------------------------------------------------------

    def init(self, rng_key, num_warmup, init_params, model_args, model_kwargs):
        check_key(rng_key, several=True)
        model_kwargs = {} if model_kwargs is None else model_kwargs
        self._recognise(model_args, model_kwargs)
        self._check_joint()
        steps = self._schedule.checked_steps(self._plan.num_rows, num_warmup)
        batch_shape = () if is_prng_key(rng_key) else rng_key.shape[:1]
        composite = GIBBS_SITES_KWARG in model_kwargs
        given = self._check_init_params(
            init_params, num_warmup, batch_shape, composite, model_args, model_kwargs
        )
        rebuild, arrays = reading.with_array_arguments(model_args, model_kwargs)
        if self._init_fn is None:
            self._hyper = self._make_hyper_kernel()
            self._init_fn = partial(self._init_one, rebuild, composite)
            self._init_programs = {}
        # It should be adapted to all rows, but have done so when the warm-up ends.
        first_size = self._plan.num_rows if self._schedule.starts_full else 0
        turns = steps.num_turns(first_size, self._schedule.least_between_turns)
        updates = turns * self._num_hyper_updates
        self._num_hyper_warmup = int(0.95 * updates)
        self._sample_fn = self._sample_one
        self._warned = False
        return self._init_program(rng_key, given, steps, arrays)

    def _init_program(self, rng_key, *args):
        batched = not is_prng_key(rng_key)
        leaves, treedef = jax.tree.flatten((rng_key, *args))
        # NB: what is computed inside a trace is traced, whatever it is computed of.
        traced = any(isinstance(x, jax.core.Tracer) for x in (*leaves, jnp.zeros(())))
        which = batched, traced, treedef, tuple(map(jax.typeof, leaves))
        if which not in self._init_programs:
            fn = self._init_fn
            if batched:
                fn = jax.vmap(fn, in_axes=(0, 0, None, None))
            if traced:
                self._init_programs[which] = jax.jit(fn)
            else:
                # It runs once a chain. Options are for programs of their own alone.
                fn, data = without_data(fn, rng_key, *args)
                program = jax.jit(fn, compiler_options=quick_options(level=1))
                self._init_programs[which] = partial(program, data)
        return self._init_programs[which](rng_key, *args)

    def _recognise(self, args, kwargs) -> None:
        # Chains run in sequence call `init` each, with the same arguments. What other
        # kernels of a composite sample does not matter.
        if not self._has_read(args, kwargs):
            self._plan = planning.recognise(self._model, args, kwargs)
            self._read_for = _identity(args, kwargs)
            self._init_fn = None

    def _has_read(self, args, kwargs) -> bool:
        """Whether the plan is that of these arguments."""
        if self._read_for is None:
            return False
        known_leaves, *known = self._read_for
        leaves, *found = _identity(args, kwargs)
        return (
            found == known
            and len(leaves) == len(known_leaves)
            and all(a is b for a, b in zip(leaves, known_leaves, strict=True))
        )

    def _check_joint(self) -> None:
        sites = {site.name: site for site in self._plan.hyper}
        for group in self._joint:
            for name in group:
                if name not in sites or not sites[name].finite:
                    raise ValueError(
                        f"`joint` names '{name}', which is not a hyperparameter of "
                        "finite support; those are "
                        f"{[n for n, site in sites.items() if site.finite]}."
                    )
        named = [name for group in self._joint for name in group]
        twice = sorted({name for name in named if named.count(name) > 1})
        if twice:
            raise ValueError(f"`joint` names {twice} more than once.")

    def _make_hyper_kernel(self) -> MCMCKernel | None:
        if self._hyper_kernel is None:
            return None
        if all(site.finite for site in self._plan.hyper):
            raise ValueError(
                "`hyper_kernel` was given, but the model has no continuous "
                "hyperparameters."
            )
        kernel = self._hyper_kernel(
            hyper_moves.collapsed_model(self._plan, self._model)
        )
        if not isinstance(kernel, MCMCKernel):
            raise ValueError(
                "`hyper_kernel` must make a kernel out of a model, such as `NUTS` "
                f"does; it made {kernel!r}."
            )
        if type(kernel).refresh is MCMCKernel.refresh:
            raise ValueError(
                f"{type(kernel).__name__} does not implement `refresh`, so that it "
                "cannot sample hyperparameters while the assignments move."
            )
        return kernel

    def _check_init_params(
        self, init_params, num_warmup, batch_shape, composite, model_args, model_kwargs
    ):
        """The initial values of the sites that are given."""
        if init_params is None:
            return {}
        plan = self._plan
        hyper = {site.name for site in plan.hyper}
        sites = " or ".join(f"'{name}'" for name in plan.assigned)
        wanted = f"the assignments of partition site {sites}"
        if hyper:
            wanted += f" or values of {sorted(hyper)}"
        if not isinstance(init_params, dict):
            raise ValueError(f"`init_params` must be a dict with {wanted}.")
        unknown = set(init_params) - set(plan.sampled)
        if unknown:
            raise ValueError(
                f"`init_params` has values for {sorted(unknown)}, which are not latent "
                f"sites of the model; it may have {wanted}."
            )
        # (A whole draw of all latent sites is fine.)
        if not {*plan.assigned, *hyper} & set(init_params):
            raise ValueError(
                f"`init_params` has values of {sorted(init_params)} alone, which are "
                f"integrated out; it must have {wanted}."
            )
        given = {
            name: jnp.asarray(value)
            for name, value in init_params.items()
            if name in hyper
        }
        if given and not any(isinstance(v, jax.core.Tracer) for v in given.values()):
            self._check_values(given, batch_shape, model_args, model_kwargs)
        for name, shape in plan.assigned.items():
            if name in init_params:
                given[name] = self._check_labels(
                    name, init_params[name], batch_shape, shape, num_warmup, composite
                )
        if plan.viewed:
            self._check_views(given, num_warmup, composite)
        return given

    def _check_views(self, given, num_warmup, composite):
        """That assignments which are given are whole: of the same rows in all views
        that have features."""
        plan = self._plan
        rows_given = [p.name for p in plan.partitions if p.name in given]
        missing = [name for name in plan.assigned if name not in given]
        if rows_given and missing:
            raise ValueError(
                f"`init_params` has assignments of partition site '{rows_given[0]}', "
                f"but not of {missing}: which rows are in is said of all views at once."
            )
        traced = any(isinstance(v, jax.core.Tracer) for v in given.values())
        if not rows_given or composite or traced:
            return
        is_in = []
        for i, p in enumerate(plan.partitions):
            inside = np.asarray(given[p.name]) >= 0
            inside = inside.reshape(-1, p.num_views or 1, p.num_rows)
            if p.features is None:
                known = {
                    v
                    for m in plan.memberships
                    for site, v in zip(m.partition, m.view, strict=True)
                    if site == i
                }
                is_in.append(inside[:, sorted(known)])
                continue
            views = np.asarray(given[p.features]).reshape(len(inside), -1)
            for chain, view in zip(inside, views, strict=True):
                is_in.append(chain[None, np.unique(view)])
        for inside in is_in:
            bad = inside.any(1) & ~inside.all(1)
            if num_warmup == 0:
                bad |= ~inside.all(1)
            if bad.any():
                row = int(np.argwhere(bad)[0, 1])
                raise ValueError(
                    f"Initial assignments have -1 for row {row} in a view that has "
                    "features"
                    + (
                        ": without a warm-up all rows are in."
                        if num_warmup == 0
                        else ", but not in all of these."
                    )
                )

    def _check_labels(self, site, z, batch_shape, shape, num_warmup, composite):
        plan = self._plan
        of_rows = site in {p.name for p in plan.partitions}
        name = f"Initial assignments of partition site '{site}'"
        if not isinstance(z, np.ndarray | np.generic | jax.Array):
            raise ValueError(f"{name} must be an array, got {type(z).__name__}.")
        if jnp.shape(z) != (*batch_shape, *shape):
            what = "row" if of_rows else "feature"
            raise ValueError(
                f"{name} have shape {jnp.shape(z)}; they must have shape "
                f"{(*batch_shape, *shape)}, a label for each {what}"
                f"{' in each view' if len(shape) > 1 else ''}"
                f"{' of each chain' if batch_shape else ''}."
            )
        if not jnp.issubdtype(z.dtype, jnp.integer):
            raise ValueError(f"{name} have dtype {z.dtype}; they must be integers.")
        # In a composite they are a draw of the prior, if they were not given.
        if not composite and not isinstance(z, jax.core.Tracer):
            most = plan.capacity
            if not of_rows:
                most = next(p.num_views for p in plan.partitions if p.features == site)
            least = -1 if of_rows and (num_warmup > 0 or len(shape) > 1) else 0
            labels = np.asarray(z)
            bad = (labels < least) | (labels >= most)
            if bad.any():
                raise ValueError(
                    f"{name} hold the label {labels[bad][0]}; labels are "
                    f"{least}..{most - 1} (the capacity is {most}"
                    + (", and -1 is a row that is not in yet)." if least else ").")
                )
        return jnp.asarray(z, jnp.int32)

    def _check_values(self, given, batch_shape, model_args, model_kwargs):
        """That values of hyperparameters have the site's shape and are in its support,
        given the others."""
        plan = self._plan
        rebuild, arrays = reading.with_array_arguments(model_args, model_kwargs)

        def check(arrays, given):
            args, kwargs = rebuild(arrays)
            values = reading.first_values(
                random.key(0), plan, self._model, args, kwargs
            )
            trace = reading.trace_at(plan, self._model, args, kwargs, values | given)
            return {name: trace[name]["fn"].support(given[name]) for name in given}

        args, kwargs = rebuild(arrays)
        shapes = jax.eval_shape(
            lambda: reading.first_values(random.key(0), plan, self._model, args, kwargs)
        )
        for name, value in given.items():
            shape = batch_shape + shapes[name].shape
            if value.shape != shape and (batch_shape or value.ndim > 0):
                raise ValueError(
                    f"The initial value of hyperparameter '{name}' has shape "
                    f"{value.shape}; it must have shape {shape}."
                )
        full = {
            name: jnp.broadcast_to(value, batch_shape + shapes[name].shape).astype(
                shapes[name].dtype
            )
            for name, value in given.items()
        }
        for _ in batch_shape:
            check = jax.vmap(check, in_axes=(None, 0))
        found = compile_for(check, arrays, full, quickly=True)(arrays, full)
        for name, inside in found.items():
            inside = np.asarray(inside)
            if not inside.all():
                value = np.asarray(full[name])
                if inside.shape == value.shape:
                    value = value[~inside][0]
                raise ValueError(
                    f"The initial value of hyperparameter '{name}' holds {value}, "
                    "which is not in the support of its prior."
                )

    def _init_one(self, rebuild, composite, rng_key, given, steps, arrays):
        plan = self._plan
        args, kwargs = rebuild(arrays)
        rng_key, key_partition, key_values, key_hyper, key_order = variates.split(
            rng_key, 5
        )
        values = reading.first_values(key_values, plan, self._model, args, kwargs)
        for name, value in values.items():
            if name in given:
                values[name] = jnp.broadcast_to(given[name], value.shape).astype(
                    value.dtype
                )
        read = reading.read(plan, self._model, args, kwargs, values)
        prior, components = read.prior, read.components
        anneals = len(steps.added) > 0 and not self._schedule.starts_full
        zero = jnp.zeros((), jnp.int32)
        labels, z, misfits = self._first_labels(
            key_partition, read, given, composite or not anneals
        )
        # A composite gives a draw of the prior for values that it was not given.
        seated = _nobody(z.shape) if composite and anneals else z
        clusters = rows.collect(components, seated, plan.capacity, plan.layout, labels)
        starts_empty = anneals and (
            composite or not any(p.name in given for p in plan.partitions)
        )
        if not plan.partition.labelled and not starts_empty:
            clusters = rows.relabel(clusters, plan.layout, components)
        is_in = seated >= 0 if not plan.viewed else (seated >= 0).any(1)
        size = jnp.sum(is_in, dtype=jnp.int32)
        hyper_state = None
        if self._hyper is not None:
            continuous = {s.name for s in plan.hyper if not s.finite}
            model_args = self._hyper_args(args, kwargs, components, clusters, values)
            start = {name: values[name] for name in continuous}
            hyper_state = self._hyper.init(
                key_hyper,
                self._num_hyper_warmup,
                unconstrain_fn(self._hyper.model, model_args, {}, start),
                model_args,
                {},
            )
        return SubsampleAnnealedGibbsState(
            z={
                **read.theta,
                **values,
                **self._assignments(
                    clusters._replace(z=z) if composite and anneals else clusters
                ),
            },
            i=zero,
            log_joint=self._log_joint(
                prior, components, clusters, args, kwargs, values
            ),
            num_clusters=jnp.sum(clusters.counts > 0, -1, dtype=jnp.int32),
            num_views=self._num_views(clusters),
            subsample_size=size,
            capacity_reached=misfits,
            # Splits are proposed in this order, which is that of the table in nothing.
            order=jnp.argsort(
                2.0 * ~is_in + variates.open_uniform(key_order, is_in.shape)
            ).astype(jnp.int32),
            added=jnp.asarray(steps.added),
            churned=jnp.asarray(steps.churned),
            since=zero,
            split_merge=Record.start(),
            feature_moves=FeatureRecord.start(),
            hyper_state=hyper_state,
            rng_key=rng_key,
        )

    def _first_labels(self, rng_key, read, given, is_drawn):
        """
        Labels of the elements of each site of views, assignments, and in how many
        cells a draw of these has not fitted into the capacity.
        """
        plan = self._plan
        layout = plan.layout

        def fold(z):
            # A draw from the prior may have more clusters than can be represented.
            return jnp.where(z < 0, -1, z % plan.capacity)

        if layout is None:
            z = given.get(plan.partition.name)
            if z is None and is_drawn:
                z = read.prior.sample(rng_key).astype(jnp.int32)
            if z is None:
                z = _nobody((plan.num_rows,))
            return (), fold(z), jnp.sum(fold(z) != z, dtype=jnp.int32)
        labels, columns = [], []
        misfits = jnp.zeros((), jnp.int32)
        for i, (p, size) in enumerate(zip(plan.partitions, layout.sizes, strict=True)):
            key_z, key_view = variates.split(variates.fold_in(rng_key, i))
            view = jnp.zeros(p.num_elements, jnp.int32)
            if p.features in given:
                view = given[p.features]
            elif p.features is not None and is_drawn:
                view = read.feature_priors[i].sample(key_view).astype(jnp.int32)
            misfits += jnp.sum(view >= size, dtype=jnp.int32)
            labels.append(view % size)
            z = _nobody((size, plan.num_rows))
            if p.name in given:
                z = given[p.name].reshape(z.shape)
            elif is_drawn:
                z = jax.vmap(lambda prior, key: prior.sample(key))(
                    read.prior.priors[i], variates.split(key_z, size)
                ).astype(jnp.int32)
            columns.append(z.T)
        z = jnp.concatenate(columns, 1)
        occupied = layout.num_features(tuple(labels)) > 0
        misfits += jnp.sum((fold(z) != z) & occupied, dtype=jnp.int32)
        return tuple(labels), fold(z), misfits

    def _assignments(self, clusters):
        """The sites of labels, as in the draw; rows of a vacant view are in none of its
        clusters."""
        plan = self._plan
        layout = plan.layout
        if layout is None:
            return {plan.partition.name: clusters.z}
        occupied = layout.num_features(clusters.labels) > 0
        z = jnp.where(occupied, clusters.z, -1).T
        draw = {}
        for i, p in enumerate(plan.partitions):
            start = layout.offsets[i]
            draw[p.name] = z[start : start + layout.sizes[i]].reshape(p.shape)
            if p.features is not None:
                draw[p.features] = clusters.labels[i]
        return draw

    def _num_views(self, clusters):
        layout = self._plan.layout
        if layout is None:
            return jnp.ones((), jnp.int32)
        return jnp.sum(layout.num_features(clusters.labels) > 0, dtype=jnp.int32)

    # --- sample --------------------------------------------------------------------

    def sample(self, state, model_args, model_kwargs):
        if self._sample_fn is None:
            raise RuntimeError("`init` must be called before `sample`.")
        model_kwargs = {} if model_kwargs is None else model_kwargs
        leaves = jax.tree.leaves((model_args, model_kwargs))
        if not any(isinstance(x, jax.core.Tracer) for x in leaves):
            # Data that `init` did not see, if the chain goes on from a given state.
            self._recognise(model_args, model_kwargs)
        sample_fn = self._sample_fn
        if not is_prng_key(state.rng_key):
            sample_fn = jax.vmap(sample_fn, in_axes=(0, None, None))
        return sample_fn(state, model_args, model_kwargs)

    def _sample_one(self, state, args, kwargs):
        plan = self._plan
        composite = GIBBS_SITES_KWARG in kwargs
        num_blocks = len(plan.blocks)
        rng_key, key_moves, key_rest, key_weights, key_imputed, *keys, key_vacant = (
            variates.split(state.rng_key, 6 + num_blocks)
        )
        hyper = {site.name: state.z[site.name] for site in plan.hyper}

        def read(values, like):
            found = reading.read(plan, self._model, args, kwargs, values[0], like)
            self._check_rows(state, found.components)
            return found

        def law(values, like):
            found = read(values, like)
            return found.prior, found.components

        z, labels = reading.from_draw(plan, state.z)
        hyper_state = state.hyper_state
        per_view = any(site.per_view is not None for site in plan.hyper)
        if self._hyper is not None and per_view:
            # Such a kernel, once adapted, does not treat all views alike. To start each
            # step at labels that mean something would not be exact.
            rng_key, key_views = variates.split(rng_key)
            start = rows.Clusters(z, jnp.zeros((z.shape[1], 1), jnp.int32), (), labels)
            start, hyper, hyper_state = self._relabel_views(
                start, hyper, hyper_state, key_views
            )
            z, labels = start.z, start.labels
        if composite:
            # There every row has a label, for the others to see.
            place = (
                jnp.zeros_like(state.order)
                .at[state.order]
                .set(jnp.arange(plan.num_rows, dtype=jnp.int32), unique_indices=True)
            )
            is_in = place < state.subsample_size
            z = jnp.where(is_in[:, None] if plan.viewed else is_in, z, -1)
        added, churned = self._moves(state, plan.num_rows)
        warm = state.i < state.added.shape[0]
        step = rows.run_step(
            key_moves,
            law,
            (hyper, hyper_state),
            z,
            plan.capacity,
            Subsample(state.order, state.subsample_size),
            added,
            churned,
            turn=self._turn(state, args, kwargs) if hyper else None,
            # After the warm-up, at the end of every sweep.
            since=jnp.where(warm, state.since, 0),
            jump=self._jump(read, args, kwargs, warm),
            record=(state.split_merge, state.feature_moves),
            layout=plan.layout,
            labels=labels,
            chooser=self._schedule if self._schedule.chooses_rows else None,
            at_least=self._schedule.least_between_turns,
        )
        hyper, hyper_state = step.values
        prior, components = step.prior, step.components
        log_joint = self._log_joint(
            prior, components, step.clusters, args, kwargs, hyper
        )
        clusters = step.clusters
        if composite:
            clusters = self._assign_rest(key_rest, prior, components, step)
        if not plan.partition.labelled:
            clusters = rows.relabel(clusters, plan.layout, components)
        if plan.viewed:
            hyper = self._redraw(key_vacant, args, kwargs, hyper, clusters)
        if plan.viewed and not composite:
            # (Other kernels' values are not ours to move along with the views.)
            clusters, hyper, hyper_state = self._relabel_views(
                clusters, hyper, hyper_state
            )
        split_merge, feature_moves = step.record
        draw = dict(hyper)
        if plan.partition.weights is not None:
            draw[plan.partition.weights] = prior.draw(key_weights, clusters.counts)
        draw |= self._assignments(clusters)
        for c, stats, key in zip(components, clusters.stats, keys, strict=True):
            draw |= c.block.draw(key, c.hyper, stats)
        if plan.imputed:
            draw |= reading.impute(key_imputed, plan, self._model, args, kwargs, draw)
        return SubsampleAnnealedGibbsState(
            z=draw,
            i=state.i + 1,
            log_joint=log_joint,
            num_clusters=jnp.sum(clusters.counts > 0, -1, dtype=jnp.int32),
            num_views=self._num_views(clusters),
            subsample_size=step.subsample.size,
            capacity_reached=state.capacity_reached
            + step.refused
            + (split_merge.refused - state.split_merge.refused),
            order=step.subsample.order,
            added=state.added,
            churned=state.churned,
            since=step.since,
            split_merge=split_merge,
            feature_moves=feature_moves,
            hyper_state=hyper_state,
            rng_key=rng_key,
        )

    @staticmethod
    def _check_rows(state, components) -> None:
        for num_rows in {x.value.shape[0] for c in components for x in c.data}:
            if state.order.shape != (num_rows,):
                raise ValueError(
                    f"The state is of a table of {state.order.shape[0]} rows, but the "
                    f"data have {num_rows}. A chain goes on with a table of the same "
                    "size only; start anew."
                )

    def _jump(self, read, args, kwargs, warm):
        """Moves of many rows at once, and of features between views."""
        plan, options = self._plan, self._split_merge
        layout = plan.layout
        if layout is None:
            if options is None:
                return None

            def in_one(rng_key, values, prior, components, clusters, subsample, record,
                       due):  # fmt: skip
                split_merge, feature_moves = record
                clusters, split_merge = split_and_merge(
                    options, rng_key, prior, components, clusters, subsample,
                    split_merge, due, warm,
                )  # fmt: skip
                return values, clusters, (split_merge, feature_moves)

            return in_one
        movable = any(layout.num_elements)
        if not movable and options is None:
            return None

        def once(i, carry, rng_key, components, subsample):
            values, clusters, (split_merge, feature_moves) = carry
            # NB: JAX takes a key for used again in a loop of at most one iteration.
            own = variates.fold_in(rng_key, i)
            key_vacant, key_features, key_split = variates.split(own, 3)
            hyper = self._redraw(key_vacant, args, kwargs, values[0], clusters)
            values = (hyper, *values[1:])
            found = read(values, components)
            if movable:
                clusters, feature_moves = move_features(
                    self._feature_moves, key_features, found.prior,
                    found.feature_priors, components, clusters, subsample, layout,
                    feature_moves,
                )  # fmt: skip
            if options is not None:
                clusters, split_merge = split_and_merge_in_views(
                    options, key_split, found.prior, components, clusters, subsample,
                    split_merge, layout, warm,
                )  # fmt: skip
            return values, clusters, (split_merge, feature_moves)

        def in_views(
            rng_key, values, prior, components, clusters, subsample, record, due
        ):
            del prior
            due = due & (subsample.size > 0)

            def if_due(i, carry):
                new = once(i, carry, rng_key, components, subsample)
                return jax.tree.map(lambda a, b: jnp.where(due, a, b), new, carry)

            # Not a branch of `lax.cond`, which would copy the assignments.
            times = over_chains(due.astype(jnp.int32))
            return lax.fori_loop(0, times, if_due, (values, clusters, record))

        return in_views

    def _redraw(self, rng_key, args, kwargs, hyper, clusters):
        """Hyperparameters of vacant views, drawn from their prior."""
        plan = self._plan
        layout = plan.layout
        if self._hyper is not None:
            return hyper  # They are its own.
        vacant = layout.num_features(clusters.labels) == 0
        by_site = {
            p.name: vacant[start : start + size]
            for p, start, size in zip(
                plan.partitions, layout.offsets, layout.sizes, strict=True
            )
        }
        return reading.redraw(rng_key, plan, self._model, args, kwargs, hyper, by_site)

    def _relabel_views(self, clusters, hyper, hyper_state, rng_key=None):
        """
        Views numbered by the first feature of each, those without last; or in random
        order, if there is a key.
        """
        plan = self._plan
        layout = plan.layout
        z, counts, stats, labels = clusters
        labels, hyper = list(labels), dict(hyper)
        orders = []
        for i, (p, size) in enumerate(zip(plan.partitions, layout.sizes, strict=True)):
            order = every = jnp.arange(size, dtype=jnp.int32)
            if p.features is not None:
                order = first_appearance(labels[i], size)
                if rng_key is not None:
                    key = variates.fold_in(rng_key, i)
                    order = random.permutation(key, every)
                place = jnp.zeros(size, jnp.int32).at[order].set(every)
                labels[i] = place[labels[i]]
            orders.append(order + layout.offsets[i])
            names = [site.name for site in plan.hyper if site.per_view == p.name]
            for name in names:
                hyper[name] = hyper[name][order]
            if self._hyper is not None:
                field = self._hyper.sample_field
                own = dict(getattr(hyper_state, field))
                own |= {name: own[name][order] for name in names if name in own}
                hyper_state = hyper_state._replace(**{field: own})
        order = jnp.concatenate(orders)
        clusters = rows.Clusters(z[:, order], counts[order], stats, tuple(labels))
        return clusters, hyper, hyper_state

    def _turn(self, state, args, kwargs):
        """Moves of the hyperparameters given the clusters."""
        plan = self._plan
        continuous = [site.name for site in plan.hyper if not site.finite]

        def update(rng_key, values, components, clusters):
            target = hyper_moves.Target(
                plan, self._model, args, kwargs, components, clusters
            )
            hyper, hyper_state = values
            skip = () if self._hyper is None else continuous
            hyper = hyper_moves.update(rng_key, target, hyper, self._joint, skip)
            if self._hyper is not None:
                model_args = self._hyper_args(args, kwargs, components, clusters, hyper)
                # It does not adapt after the warm-up.
                own = hyper_state.i
                warm = state.i < state.added.shape[0]
                last = jnp.maximum(own, self._num_hyper_warmup)
                hyper_state = hyper_state._replace(i=jnp.where(warm, own, last))
                hyper_state = self._hyper.refresh(hyper_state, model_args, {})
                hyper_state = self._hyper.sample(hyper_state, model_args, {})
                constrain = self._hyper.get_constrain_fn(model_args, {})
                found = constrain(getattr(hyper_state, self._hyper.sample_field))
                hyper |= {
                    name: found[name].astype(hyper[name].dtype) for name in continuous
                }
            return hyper, hyper_state

        def turn(rng_key, values, components, clusters):
            def once(i, values):
                key = variates.fold_in(rng_key, i)
                return update(key, values, components, clusters)

            if self._num_hyper_updates == 1:
                return once(0, values)
            return lax.fori_loop(0, self._num_hyper_updates, once, values)

        return turn

    def _hyper_args(self, args, kwargs, components, clusters, values):
        finite = {s.name: values[s.name] for s in self._plan.hyper if s.finite}
        return args, kwargs, components, clusters, finite

    def _log_joint(self, prior, components, clusters, args, kwargs, hyper):
        plan = self._plan
        total = rows.log_joint(prior, components, clusters, plan.layout)
        if not hyper and not plan.viewed:
            return total
        trace = reading.trace_at(plan, self._model, args, kwargs, hyper)
        total += hyper_moves.log_prior(plan, trace, clusters)
        return total

    def _assign_rest(self, rng_key, prior, components, step):
        """The clusters with the rows that are out assigned too, one by one."""
        capacity = self._plan.capacity
        out = self._plan.num_rows - step.subsample.size

        def assign():
            more = rows.run_step(
                rng_key,
                lambda values, like: (prior, components),
                (),
                step.clusters.z,
                capacity,
                step.subsample,
                out,
                jnp.zeros_like(out),
                layout=self._plan.layout,
                labels=step.clusters.labels,
            )
            return more.clusters

        return lax.cond(out > 0, assign, lambda: step.clusters)

    @staticmethod
    def _moves(state, num_rows):
        """Rows to add and to churn in the step at hand."""
        num_warmup = state.added.shape[0]
        out = num_rows - state.subsample_size
        if num_warmup == 0:
            return out, jnp.full_like(out, num_rows)
        step = jnp.minimum(state.i, num_warmup - 1)
        warm = state.i < num_warmup
        # A chain may have been given rows at the start; it never takes in more than
        # there are.
        added = jnp.where(warm, jnp.minimum(state.added[step], out), out)
        churned = jnp.where(warm, state.churned[step], num_rows)
        return added, churned

    def __getstate__(self):
        state = self.__dict__.copy()
        return state | dict.fromkeys(_NOT_COPIED)
