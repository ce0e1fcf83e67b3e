# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""The NumPyro kernel: an adapter between `MCMC`, a plan and the moves."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
import warnings

import jax
from jax import random
import jax.numpy as jnp
import numpy as np

from numpyro import handlers
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import identity, is_prng_key

from numpyro_subanneal import plan as planning
from numpyro_subanneal import reading, rows
from numpyro_subanneal.schedule import AbstractSchedule, LinearSchedule
from numpyro_subanneal.subsample import Subsample
from numpyro_subanneal.typing import Array


class SubsampleAnnealedGibbsState(NamedTuple):
    """
    - **z** - the draw: every latent site of the model, in its declared shape. The
      partition's labels number the clusters by the first row of each; rows out of the
      subsample are -1. Cluster parameters are drawn given the assignments; those of
      empty clusters from their prior.
    - **i** - iteration; below the number of warm-up steps the chain anneals.
    - **log_joint** - log probability of the partition and of the rows in the subsample,
      cluster parameters integrated out, in nats.
    - **num_clusters** - number of occupied clusters.
    - **subsample_size** - number of rows in the subsample.
    - **capacity_reached** - number of moves so far in which a row could not have opened
      a cluster, because all the model's clusters were occupied.
    - **order** - a permutation of the rows; the first `subsample_size` are in.
    - **added**, **churned** - the schedule, ``[num_warmup]``: rows to add and to churn
      in each warm-up step. Carried so that a state goes on where it was, whatever
      `MCMC` it is given to.
    - **rng_key** - random number generator key.
    """

    z: dict[str, Array]
    i: Array
    log_joint: Array
    num_clusters: Array
    subsample_size: Array
    capacity_reached: Array
    order: Array
    added: Array
    churned: Array
    rng_key: Array


class SubsampleAnnealedGibbs(MCMCKernel):
    """
    Subsample-annealed collapsed Gibbs sampling of mixture models.

    The model is an ordinary NumPyro model: a partition site
    (:class:`~numpyro_subanneal.distributions.ChineseRestaurantProcess` or
    :class:`~numpyro_subanneal.distributions.PitmanYorProcess`), cluster parameters in a
    plate whose size is the capacity, and observed sites whose likelihoods index them by
    the partition. The kernel recognises the conjugate pairs, integrates the cluster
    parameters out, and samples the partition; the parameters are drawn afterwards, in
    the same step.

    During the warm-up Gibbs sampling runs on a churning subsample that grows to all
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
        self, model: Callable[..., Any], schedule: AbstractSchedule | None = None
    ):
        if not callable(model):
            raise ValueError(
                f"`model` must be a callable NumPyro model, got {model!r}."
            )
        if schedule is None:
            schedule = LinearSchedule()
        if not isinstance(schedule, AbstractSchedule):
            raise ValueError(
                "`schedule` must be an instance of a schedule class, such as "
                f"`LinearSchedule()`, got {schedule!r}."
            )
        self._model = model
        self._schedule = schedule
        # What `init` finds out; the closures among it are not pickled.
        self._plan: reading.Plan | None = None
        self._read_for: tuple | None = None
        self._arrays: list | None = None
        self._init_fn: Callable | None = None
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
            "subsample_size",
            "capacity_reached",
        )

    def get_diagnostics_str(self, state: SubsampleAnnealedGibbsState) -> str:
        num_rows = state.order.shape[-1]
        annealing = int(state.i) < state.added.shape[-1]
        text = (
            f"{'annealing' if annealing else 'sampling'}, "
            f"{int(state.subsample_size)}/{num_rows} rows, "
            f"{int(state.num_clusters)} clusters"
        )
        reached = int(state.capacity_reached)
        if reached:
            text += f", capacity reached in {reached} moves"
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"All {self._plan.capacity} clusters of the model are occupied, so "
                    "that rows cannot open another: the draws are of partitions with "
                    "at most so many clusters. Give the plate of the clusters a larger "
                    "size. The extra field `capacity_reached` counts such moves.",
                    stacklevel=2,
                )
        return text

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

    # --- init ----------------------------------------------------------------------

    def init(self, rng_key, num_warmup, init_params, model_args, model_kwargs):
        model_kwargs = {} if model_kwargs is None else model_kwargs
        self._recognise(model_args, model_kwargs)
        steps = self._schedule.checked_steps(self._plan.num_rows, num_warmup)
        batch_shape = () if is_prng_key(rng_key) else rng_key.shape[:1]
        z = self._check_init_params(init_params, num_warmup, batch_shape)
        init_fn = self._init_fn
        if not is_prng_key(rng_key):
            init_fn = jax.vmap(init_fn, in_axes=(0, 0, None, None))
        self._sample_fn = self._sample_one
        self._warned = False
        return init_fn(rng_key, z, steps, self._arrays)

    def _recognise(self, args, kwargs) -> None:
        # Chains run in sequence call `init` each, with the same arguments.
        leaves, treedef = jax.tree.flatten((args, kwargs))
        if self._read_for is not None:
            known_leaves, known_treedef = self._read_for
            if (
                treedef == known_treedef
                and len(leaves) == len(known_leaves)
                and all(a is b for a, b in zip(leaves, known_leaves, strict=True))
            ):
                return
        self._plan = planning.recognise(self._model, args, kwargs)
        self._read_for = leaves, treedef
        rebuild, self._arrays = reading.with_array_arguments(args, kwargs)
        self._init_fn = jax.jit(partial(self._init_one, rebuild))

    def _check_init_params(self, init_params, num_warmup, batch_shape):
        """The initial assignments, if given."""
        if init_params is None:
            return None
        plan = self._plan
        partition = plan.partition.name
        if not isinstance(init_params, dict) or partition not in init_params:
            raise ValueError(
                "`init_params` must be a dict with the assignments of partition site "
                f"'{partition}'."
            )
        unknown = set(init_params) - set(plan.sampled)
        if unknown:
            raise ValueError(
                f"`init_params` has values for {sorted(unknown)}, which are not latent "
                "sites of the model."
            )
        z = init_params[partition]
        name = f"Initial assignments of partition site '{partition}'"
        if not isinstance(z, np.ndarray | np.generic | jax.Array):
            raise ValueError(f"{name} must be an array, got {type(z).__name__}.")
        if jnp.shape(z) != (*batch_shape, plan.num_rows):
            raise ValueError(
                f"{name} have shape {jnp.shape(z)}; they must have shape "
                f"{(*batch_shape, plan.num_rows)}, a label for each row"
                f"{' of each chain' if batch_shape else ''}."
            )
        if not jnp.issubdtype(z.dtype, jnp.integer):
            raise ValueError(f"{name} have dtype {z.dtype}; they must be integers.")
        if not isinstance(z, jax.core.Tracer):
            least = 0 if num_warmup == 0 else -1
            labels = np.asarray(z)
            bad = (labels < least) | (labels >= plan.capacity)
            if bad.any():
                raise ValueError(
                    f"{name} hold the label {labels[bad][0]}; labels are "
                    f"{least}..{plan.capacity - 1} (the capacity is {plan.capacity}"
                    + (", and -1 is a row that is not in yet)." if least else ").")
                )
        return jnp.asarray(z, jnp.int32)

    def _init_one(self, rebuild, rng_key, z, steps, arrays):
        plan = self._plan
        rng_key, key_partition = random.split(rng_key)
        prior, components, theta = reading.read(plan, self._model, *rebuild(arrays))
        zero = jnp.zeros((), jnp.int32)
        state = SubsampleAnnealedGibbsState(
            z={plan.partition.name: jnp.full(plan.num_rows, -1, jnp.int32), **theta},
            i=zero,
            log_joint=jnp.zeros((), jnp.result_type(float)),
            num_clusters=zero,
            subsample_size=zero,
            capacity_reached=zero,
            order=jnp.arange(plan.num_rows, dtype=jnp.int32),
            added=jnp.asarray(steps.added),
            churned=jnp.asarray(steps.churned),
            rng_key=rng_key,
        )
        if z is None:
            if len(steps.added) > 0 and not self._schedule.starts_full:
                return state
            z = prior.sample(key_partition).astype(jnp.int32)
        # A draw from the prior may have more clusters than can be represented.
        refused = jnp.sum(z >= plan.capacity, dtype=jnp.int32)
        z = jnp.where(z < 0, -1, z % plan.capacity)
        clusters = rows.collect(components, z, plan.capacity)
        if not plan.partition.labelled:
            clusters = rows.relabel(clusters)
        return state._replace(
            z={**state.z, plan.partition.name: clusters.z},
            log_joint=rows.log_joint(prior, components, clusters),
            num_clusters=jnp.sum(clusters.counts > 0, dtype=jnp.int32),
            subsample_size=jnp.sum(z >= 0, dtype=jnp.int32),
            capacity_reached=refused,
            order=jnp.argsort(z < 0, stable=True).astype(jnp.int32),
        )

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
        num_blocks = len(plan.blocks)
        rng_key, key_moves, key_weights, key_imputed, *keys = random.split(
            state.rng_key, 4 + num_blocks
        )
        prior, components, _ = reading.read(plan, self._model, args, kwargs)
        for num_rows in {x.value.shape[0] for c in components for x in c.data}:
            if state.order.shape != (num_rows,):
                raise ValueError(
                    f"The state is of a table of {state.order.shape[0]} rows, but the "
                    f"data have {num_rows}. A chain goes on with a table of the same "
                    "size only; start anew."
                )
        added, churned = self._moves(state, plan.num_rows)
        clusters, subsample, refused = rows.run_step(
            key_moves,
            prior,
            components,
            state.z[plan.partition.name],
            plan.capacity,
            Subsample(state.order, state.subsample_size),
            added,
            churned,
        )
        z = {}
        if not plan.partition.labelled:
            clusters = rows.relabel(clusters)
        elif plan.partition.weights is not None:
            z[plan.partition.weights] = prior.draw(key_weights, clusters.counts)
        z[plan.partition.name] = clusters.z
        for c, stats, key in zip(components, clusters.stats, keys, strict=True):
            z |= c.block.draw(key, c.hyper, stats)
        if plan.imputed:
            z |= reading.impute(key_imputed, plan, self._model, args, kwargs, z)
        return SubsampleAnnealedGibbsState(
            z=z,
            i=state.i + 1,
            log_joint=rows.log_joint(prior, components, clusters),
            num_clusters=jnp.sum(clusters.counts > 0, dtype=jnp.int32),
            subsample_size=subsample.size,
            capacity_reached=state.capacity_reached + refused,
            order=subsample.order,
            added=state.added,
            churned=state.churned,
            rng_key=rng_key,
        )

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
        for name in ("_read_for", "_arrays", "_init_fn", "_sample_fn"):
            state[name] = None
        return state
