# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""What to ask of a fit: densities, new rows, missing cells, structure."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial
import inspect
from typing import Any, NamedTuple

import jax
from jax import lax, random
import jax.numpy as jnp
from jax.scipy.special import logsumexp
import numpy as np

import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.distributions.discrete import (
    BernoulliLogits,
    BernoulliProbs,
    CategoricalLogits,
    CategoricalProbs,
)
from numpyro.infer import MCMC

from numpyro_subanneal import partitions, predictive, reading
from numpyro_subanneal.compiling import hoist
from numpyro_subanneal.conjugate.base import Observed, SiteShape
from numpyro_subanneal.kernel import SubsampleAnnealedGibbs
from numpyro_subanneal.plan import check_arguments, check_data, recognise
from numpyro_subanneal.predictive import (
    Data,
    Trained,
    draw_cells,
    draw_clusters,
    look_at,
    look_at_own,
    observed,
)
from numpyro_subanneal.rows import Component
from numpyro_subanneal.skeleton import (
    Args,
    Kwargs,
    Model,
    NotRecognised,
    read_skeleton,
)
from numpyro_subanneal.typing import Array
from numpyro_subanneal.variates import check_key

# Rows looked at together. Each takes (features x clusters) floats.
_BATCH = 256

# Likelihoods whose values are names.
_NOMINAL = (BernoulliLogits, BernoulliProbs, CategoricalLogits, CategoricalProbs)


class Imputation(NamedTuple):
    """
    The masked cells of an observed site.

    - **index** - where they are: row and position in the row, ``[cells, axes]``.
    - **draws** - a draw of each from every draw of the posterior, ``[draws, cells,
      *event_shape]``.
    - **point** - the mean of the draws; of a site of categories or of zeros and ones
      the most frequent value, and of one of angles their mean direction: ``[cells,
      *event_shape]``.
    - **uncertainty** - the standard deviation of the draws, or the share of them that
      differ from `point`; of angles the circular standard deviation (Mardia and Jupp,
      2000, Eq. 2.3.11), in radians: ``[cells, *event_shape]``.
    """

    index: np.ndarray
    draws: np.ndarray
    point: np.ndarray
    uncertainty: np.ndarray


class MutualInformation(NamedTuple):
    """
    - **value** - of every pair of columns, in nats, at least zero: ``[features,
      features]``; NaN on the diagonal.
    - **error** - its Monte Carlo standard error, as if draws were independent.
    """

    value: np.ndarray
    error: np.ndarray


class CrossValidation(NamedTuple):
    """
    - **score** - of each split, the mean over held out rows of the log predictive
      density, in nats a row: ``[splits]``.
    - **log_density** - of each row held out, of each split.
    - **held_out** - which rows they are.
    """

    score: np.ndarray
    log_density: list[np.ndarray]
    held_out: list[np.ndarray]


class Posterior:
    """
    A model, draws of its posterior and the arguments that it was trained with.

    Methods that are asked about new rows take them as the model takes its table: its
    arguments, with a table of new rows in the place of the training table. Cells that
    are masked there are not known. Cluster parameters are integrated out, and a cluster
    more than are occupied stands for a new one.

    Some methods are asked about `columns`, and take what is `given`: a name of an
    observed site or a list of them, or a dictionary of the names with an index of the
    row's positions, such as ``{"x": [0, 2]}``. :attr:`columns` names all of them. (A
    model with arguments of these names can be bound to them by
    :func:`functools.partial`.)

    :param model: the NumPyro model.
    :param samples: draws of all latent sites, grouped by chain or not, as
        :meth:`~numpyro.infer.mcmc.MCMC.get_samples` gives them; without those of the
        warm-up.
    :param args: positional arguments that the model was trained with.
    :param kwargs: keyword arguments.
    :raises NotRecognised: if the model cannot be read.
    :raises ValueError: naming a site of `samples` that is missing or does not fit.

    **Example**

    .. doctest::

        >>> from functools import partial
        >>> import numpy as np
        >>> from jax import random
        >>> from numpyro.infer import MCMC
        >>> from numpyro_subanneal import Posterior, SubsampleAnnealedGibbs
        >>> from numpyro_subanneal.models import dpmm

        >>> rng = np.random.default_rng(0)
        >>> x = rng.normal(size=(60, 2)) + np.repeat([[-4], [4]], 30, axis=0)
        >>> model = partial(dpmm.real, num_clusters=16)
        >>> mcmc = MCMC(SubsampleAnnealedGibbs(model), num_warmup=20,
        ...             num_samples=50, progress_bar=False)
        >>> mcmc.run(random.key(0), x)
        >>> posterior = Posterior.from_mcmc(mcmc)
        >>> new = np.array([[4.0, 4.0], [4.0, -4.0], [4.0, np.nan]])
        >>> near, far, half = posterior.log_predictive(new)
        >>> bool(near > far + 5)
        True
    """

    def __init__(
        self,
        model: Model,
        samples: Mapping[str, Array],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ):
        kwargs = {} if kwargs is None else dict(kwargs)
        self._setup(model, samples, args, kwargs, recognise(model, args, kwargs))

    @classmethod
    def from_mcmc(cls, mcmc: MCMC) -> "Posterior":
        """
        Of the draws that `mcmc` holds, without those of the warm-up.

        :param MCMC mcmc: after its `run`.
        """
        if not isinstance(mcmc, MCMC):
            raise ValueError(
                f"`mcmc` must be a numpyro.infer.MCMC, after its run; got {mcmc!r}. Of "
                "other draws `Posterior(model, samples, args, kwargs)` is made."
            )
        kernel, state = mcmc.sampler, mcmc.last_state
        ours = isinstance(kernel, SubsampleAnnealedGibbs)
        # NB: after a `warmup` that collects nothing there are arrays of zeros.
        if state is None or (ours and np.max(state.i) <= state.added.shape[-1]):
            raise ValueError(
                "`mcmc` has no draws of the posterior; call its `run` first."
            )
        # NB: NumPyro has no public name for them; ArviZ reads them there too.
        args, kwargs = mcmc._args, mcmc._kwargs
        samples = mcmc.get_samples(group_by_chain=True)
        # A kernel may have been used for another table since.
        if not (ours and kernel._has_read(args, kwargs)):
            return cls(kernel.model, samples, args, kwargs)
        posterior = cls.__new__(cls)
        posterior._setup(kernel.model, samples, args, dict(kwargs), kernel._plan)
        kernel._warn_of_capacity(state)
        return posterior

    @classmethod
    def from_arviz(
        cls, model: Model, data: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> "Posterior":
        """
        Of the draws in the group `posterior` of what ArviZ holds, or has written to a
        file.

        :param model: the NumPyro model.
        :param data: an `InferenceData` or a `DataTree`, or the path of a netCDF file.
            Rows must be in the order of the model's table.
        :param args: positional arguments that the model was trained with.
        :param kwargs: keyword arguments.
        :raises NotRecognised: if the model cannot be read.
        :raises ValueError: naming what is missing or does not fit.
        """
        # (`inference_data` imports this module.)
        from numpyro_subanneal.inference_data import posterior_samples

        return cls(model, posterior_samples(data), args, kwargs)

    def _setup(self, model, samples, args, kwargs, plan):
        self._model = model
        self._args, self._kwargs = tuple(args), kwargs
        self._rebuild, self._arrays = reading.with_array_arguments(args, kwargs)
        # Blocks fit for masks that training had none of, and for one feature at a time.
        self._plan = replace(
            plan,
            blocks=tuple(
                replace(
                    b, sites=tuple(replace(s, masked=True) for s in b.sites)
                ).apart()
                for b in plan.blocks
            ),
        )
        self._draws, self.num_chains = self._read_samples(samples)
        if self._plan.partition.labelled:
            self._num_clusters = self._plan.capacity
        else:
            largest = max(int(self._draws[p.name].max()) for p in plan.partitions)
            self._num_clusters = largest + 2
        self._data = self._read_rows(self._args, self._kwargs, training=True)
        self._programs: dict[str, Callable] = {}

    def _read_samples(self, samples):
        plan = self._plan
        with numpyro.validation_enabled(False), handlers.block():
            sites = read_skeleton(self._model, self._args, self._kwargs).sites
        wanted = {**plan.assigned}
        for site in plan.hyper:
            wanted[site.name] = None
        missing = [name for name in wanted if name not in samples]
        if missing:
            raise ValueError(
                f"The samples have no site '{missing[0]}'; they have "
                f"{sorted(samples)}. Give all latent sites of the model."
            )
        name = plan.partition.name
        shape = plan.partition.shape
        lead = np.ndim(samples[name]) - len(shape)
        if lead not in (1, 2) or np.shape(samples[name])[lead:] != shape:
            raise ValueError(
                f"The samples of partition site '{name}' have shape "
                f"{np.shape(samples[name])}; they must have shape (draws, "
                f"{', '.join(map(str, shape))}), or chains and draws first."
            )
        head = np.shape(samples[name])[:lead]
        draws = {}
        for site in wanted:
            value = np.asarray(samples[site])
            if value.shape[:lead] != head:
                raise ValueError(
                    f"The samples of site '{site}' have shape {value.shape}, but those "
                    f"of '{name}' have {head} draws."
                )
            shape = plan.assigned.get(site, sites[site].shape)
            if value.shape[lead:] != shape:
                raise ValueError(
                    f"The samples of site '{site}' have shape {value.shape}; the model "
                    f"with its training arguments has {shape} a draw. Give the samples "
                    "and the arguments of the same run."
                )
            if site in plan.assigned and value.dtype.kind not in "iu":
                raise ValueError(
                    f"The samples of site '{site}' are of type {value.dtype}; labels "
                    "are integers."
                )
            draws[site] = value.reshape(-1, *value.shape[lead:])
        if draws[name].shape[0] == 0:
            raise ValueError("There are no draws.")
        for p in plan.partitions:
            out = draws[p.name] < 0
            if plan.viewed:
                # Views without features have no clusters.
                out = out & (draws[p.name] >= 0).any(-1, keepdims=True)
            if out.any():
                draw, row = np.argwhere(out)[0][[0, -1]]
                raise ValueError(
                    f"In draw {draw} row {row} is out of the subsample (-1): this is a "
                    "draw of the warm-up, and not of the posterior. Leave those out."
                )
            self._check_labels(p.name, draws[p.name], plan.capacity, p.labelled)
            if p.features is not None:
                self._check_labels(p.features, draws[p.features], p.num_views, True)
        return draws, head[0] if lead == 2 else 1

    def _check_labels(self, name, labels, size, limited):
        out = labels >= size
        if limited and out.any():
            raise ValueError(
                f"The samples of site '{name}' have the label {labels[out][0]}, but "
                f"the model has {size}, numbered from 0. Give the samples and the "
                "arguments of the same run."
            )

    # --- what there is -------------------------------------------------------------

    @property
    def num_draws(self) -> int:
        """Number of draws, all chains together."""
        return len(self._draws[self._plan.partition.name])

    @property
    def num_rows(self) -> int:
        """Number of rows of the training table."""
        return self._plan.num_rows

    @cached_property
    def _sites(self) -> tuple[SiteShape, ...]:
        return tuple(s for b in self._plan.blocks for s in b.sites)

    @property
    def columns(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The columns: observed site and position in its row; in the order in which
        :meth:`dependence` and :meth:`mutual_information` have them."""
        return tuple(
            (site.name, index)
            for site in self._sites
            for index in np.ndindex(site.feature_shape)
        )

    @property
    def num_clusters(self) -> np.ndarray:
        """Number of occupied clusters in every draw, of all views together:
        ``[draws]``."""
        count = np.zeros(self.num_draws, int)
        for p in self._plan.partitions:
            z = np.sort(self._draws[p.name], -1)
            new = np.diff(z, axis=-1, prepend=-1) > 0
            count += (new & (z >= 0)).reshape(len(count), -1).sum(1)
        return count

    @property
    def num_views(self) -> np.ndarray:
        """Number of views that have columns in every draw: ``[draws]``."""
        if not self._plan.viewed:
            return np.ones(self.num_draws, int)
        return np.array([len(np.unique(v)) for v in self._views()])

    def _views(self) -> np.ndarray:
        """The view of every column, of all sites of views laid end to end: ``[draws,
        features]``."""
        layout = self._plan.layout
        if layout is None:
            return np.zeros((self.num_draws, len(self.columns)), np.int32)

        def one(draw):
            _, labels = reading.from_draw(self._plan, draw)
            return jnp.concatenate(layout.index(labels))

        names = list(self._plan.assigned)
        draws = {name: jnp.asarray(self._draws[name]) for name in names}
        return np.asarray(jax.vmap(one)(draws))

    def _select(self, columns, default: bool) -> np.ndarray:
        """Which columns are meant, ``[features]``."""
        masks = {s.name: np.zeros(s.feature_shape, bool) for s in self._sites}
        if columns is None:
            return np.full(len(self.columns), default)
        if not isinstance(columns, str | Mapping | list | tuple):
            raise ValueError(
                "Columns are the name of an observed site, a list of names or a "
                f"dictionary of names and indices, such as {{'x': [0, 2]}}; got "
                f"{columns!r}."
            )
        if isinstance(columns, str):
            columns = [columns]
        if not isinstance(columns, Mapping):
            columns = {name: ... for name in columns}
        for name, index in columns.items():
            if not isinstance(name, str):
                raise ValueError(
                    "Columns are named by their observed site, such as "
                    f"{{{[*masks][0]!r}: [0]}}; got {name!r}."
                )
            if name not in masks:
                raise ValueError(
                    f"There is no observed site '{name}'; there are {list(masks)}. "
                    f"Where a column of a DataFrame is, `Table.sites({name!r})` says."
                )
            try:
                masks[name][... if index is True else index] = True
            except IndexError as error:
                raise ValueError(
                    f"{index!r} is not an index of the columns of observed site "
                    f"'{name}', which have shape {masks[name].shape}"
                    + ("." if masks[name].shape else f": write '{name}' alone.")
                ) from error
        return np.concatenate([masks[s.name].ravel() for s in self._sites])

    def _by_site(self, values: np.ndarray) -> dict[str, np.ndarray]:
        """Values of the columns, last axis, by site."""
        found, start = {}, 0
        for site in self._sites:
            own = values[..., start : start + site.num_features]
            shape = (*values.shape[:-1], *site.feature_shape)
            found[site.name] = own.reshape(shape)
            start += site.num_features
        return found

    # --- reading of rows -------------------------------------------------------------

    def _read_rows(self, args: Args, kwargs: Kwargs, training: bool = False) -> Data:
        """What is observed of the rows that the model is called with."""
        plan = self._plan
        if not training:
            self._check_arguments(args, kwargs)
        with numpyro.validation_enabled(False), handlers.block():
            try:
                sites = read_skeleton(self._model, args, kwargs).sites
            except (TypeError, ValueError, IndexError) as error:
                raise ValueError(
                    f"The model cannot be called with these arguments ({error}). Give "
                    "those of the training, with a table of new rows, at least one, of "
                    f"the same columns: {self._describe()}."
                ) from error
            found = []
            for p in plan.partitions:
                if p.name not in sites:
                    raise ValueError(
                        f"With these arguments the model has no partition site "
                        f"'{p.name}'."
                    )
                found.append(replace(p, num_rows=sites[p.name].shape[-1]))
            latent = {name for name, site in sites.items() if not site.observed}
            if training:
                self._latent = latent
            else:
                self._check_latent(latent)
            for own in self._sites:
                new = sites.get(own.name)
                if new is None or not new.observed:
                    raise ValueError(
                        f"With these arguments site '{own.name}' is not observed. Give "
                        "a table of the same columns; mask the cells that are unknown."
                    )
                if new.shape is None:
                    raise ValueError(
                        f"Rows of observed site '{own.name}' are not an array. Give a "
                        "NumPy or JAX array (of a data frame, its `.to_numpy()`)."
                    )
                if new.dtype.kind not in "biuf":
                    raise ValueError(
                        f"Rows of observed site '{own.name}' hold values of type "
                        f"{new.dtype}; they must be numeric."
                    )
                shapes = new.feature_shape, new.event_shape
                if shapes != (own.feature_shape, own.event_shape):
                    raise ValueError(
                        f"Rows of observed site '{own.name}' have shape "
                        f"{new.shape[1:]}; those of the training table have "
                        f"{own.feature_shape + own.event_shape}."
                    )
                for _, name in own.roles:
                    clusters = sites[name].shape[:1] if name in sites else ()
                    if clusters not in ((), (plan.capacity,)):
                        raise ValueError(
                            f"With these arguments site '{name}' has {clusters[0]} "
                            f"clusters, where it had {plan.capacity} in the training. "
                            "Give sizes, such as `num_clusters`, as they were there."
                        )
            new_plan = replace(plan, partitions=tuple(found))
            values = {s.name: jnp.asarray(self._draws[s.name][0]) for s in plan.hyper}
            components = reading.read(
                new_plan, self._model, args, kwargs, values
            ).components
            trace = reading.trace_at(new_plan, self._model, args, kwargs, values)
            if not training:
                self._check(components, trace)
        return tuple(tuple(c.data) for c in components)

    def _check_arguments(self, args: Args, kwargs: Kwargs) -> None:
        """That numbers that are no sizes are those of the training: of these the model
        is read, and others would be ignored."""
        check_arguments(args, kwargs)
        try:
            signature = inspect.signature(self._model)
            old, new = (
                _by_name(signature, *given)
                for given in ((self._args, self._kwargs), (args, kwargs))
            )
        except (TypeError, ValueError):
            return  # The call itself says it better.
        for name, value in new.items():
            if isinstance(value, np.ndarray) and value.dtype.kind in "OSU":
                raise ValueError(
                    f"Argument `{name}` of the model is an array of type "
                    f"{value.dtype}. Encode it as in the training, for instance by "
                    "`Table.encode`."
                )
            before = old.get(name)
            if not (_is_real(before) or (before is None and _is_real(value))):
                continue
            # NB: in single precision, which one of them may have been made in.
            known = all(_is_real(x) or isinstance(x, int) for x in (before, value))
            if not known or np.float32(before) != np.float32(value):
                raise ValueError(
                    f"Argument `{name}` of the model is {value}, but was {before} in "
                    "the training, when the draws were made; give it as it was. (What "
                    "differs by row is an array with a value for each.)"
                )

    def _check_latent(self, latent: set[str]) -> None:
        """That the model samples what it sampled in the training."""
        # What stands for masked cells may come and go; of what is not observed now more
        # is said later.
        names = [site.name for site in self._sites]
        others = {*names, *(f"{name}_unobserved" for name in names)}
        gone, come = self._latent - latent - others, latent - self._latent - others
        if gone or come:
            names, does = (gone, "does not sample") if gone else (come, "samples")
            was = "" if gone else " not"
            raise ValueError(
                f"With these arguments the model {does} '{min(names)}', which was{was} "
                "sampled in the training. Give what is not a table of rows as it was "
                "there."
            )

    def _describe(self) -> str:
        return ", ".join(
            f"'{s.name}' of shape {('rows', *s.feature_shape, *s.event_shape)}".replace(
                "'rows'", "rows"
            )
            for s in self._sites
        )

    def _check(self, components, trace):
        for c in components:
            for site, x in zip(c.block.sites, c.data, strict=True):
                # (Some limits, such as a number of trials, are parameters.)
                hyper = reading.site_hyperparameters(
                    c.block.pair, site, trace, self._plan.capacity
                )
                rows = x.value.shape[0]
                given = {
                    name: np.broadcast_to(g, (rows, *g.shape[1:]))
                    for name, g in zip(c.block.pair.given_by_row, x.given, strict=True)
                }
                _check_rows(
                    c.block.pair,
                    site,
                    {name: np.asarray(h) for name, h in hyper.items()},
                    given,
                    np.asarray(x.value),
                    np.asarray(x.mask),
                )

    def _num_new(self, data: Data) -> int:
        return data[0][0].value.shape[0]

    # --- programs --------------------------------------------------------------------

    def _trainer(self, arrays, data, draws) -> Callable[[dict], Trained]:
        """A function of one draw, for the body of a loop over `draws`."""
        plan = self._plan
        args, kwargs = self._rebuild(arrays)

        def law(draw):
            values = {site.name: draw[site.name] for site in plan.hyper}
            found = reading.read(plan, self._model, args, kwargs, values)
            trace = reading.trace_at(plan, self._model, args, kwargs, values)
            given = {}
            for block in plan.blocks:
                for site in block.sites:
                    known = reading.given_parameters(
                        block.pair, site, trace[site.name]["fn"]
                    )
                    names = block.pair.given
                    given[site.name] = {name: known[name][0] for name in names}
            return found.prior, [c.hyper for c in found.components], given

        # What the model computes of its data alone is computed once.
        law = hoist(law, jax.tree.map(lambda x: x[0], draws))

        def train(draw):
            prior, hyper, given = law(draw)
            components = [
                Component(*parts)
                for parts in zip(plan.blocks, hyper, data, strict=True)
            ]
            z, labels = reading.from_draw(plan, draw)
            return predictive.train(
                prior, components, given, z, labels, self._num_clusters, plan.layout
            )

        return train

    def _run(self, name: str, question: Callable, *more: Any) -> Any:
        """
        ``question(train, draws, data, *more)``, as a program.

        :param name: of the question, under which its program is kept.
        """
        if name not in self._programs:

            def program(arrays, data, draws, *more):
                train = self._trainer(arrays, data, draws)
                return question(train, draws, data, *more)

            self._programs[name] = jax.jit(program)
        draws = {name: jnp.asarray(value) for name, value in self._draws.items()}
        with numpyro.validation_enabled(False), handlers.block():
            found = self._programs[name](self._arrays, self._data, draws, *more)
        return jax.device_get(found)

    def _each_draw(self, name: str, ask: Callable, *more: Any) -> Any:
        """``ask(trained, number, *more)`` for every draw, one after another."""

        def question(train, draws, data, *more):
            def one(numbered):
                number, draw = numbered
                return ask(train(draw), number, *more)

            return lax.map(one, (jnp.arange(self.num_draws), draws))

        return self._run(name, question, *more)

    # --- densities -------------------------------------------------------------------

    def log_density(
        self, *args: Any, columns: Any = None, given: Any = None, **kwargs: Any
    ) -> np.ndarray:
        """
        Log predictive density of new rows under each draw, in nats: of all their cells
        that are not masked together, or of those in some columns.

        :param args: the model's arguments, with a table of new rows.
        :param columns: of which columns; all by default.
        :param given: columns whose cells are conditioned on; none by default.
        :param kwargs: the model's keyword arguments.
        :return: ``[draws, rows]``.
        """
        data = self._read_rows(args, kwargs)
        wanted = self._select(columns, True)
        known = self._select(given, False)

        def ask(trained, i, data, wanted, known):
            def one(n):
                return look_at(trained, data, n).log_density(wanted, known)

            return self._over_rows(one, self._num_new(data))

        return self._each_draw("log_density", ask, data, wanted, known)

    def log_predictive(
        self, *args: Any, columns: Any = None, given: Any = None, **kwargs: Any
    ) -> np.ndarray:
        """
        Log predictive density of new rows, in nats: of the mixture over all draws of
        :meth:`log_density`. With columns given, each draw counts as much as it makes
        these probable.

        :return: ``[rows]``.
        """
        if given is None:
            return log_mean_exp(self.log_density(*args, columns=columns, **kwargs))
        both = self._select(columns, True) | self._select(given, False)
        whole = self.log_density(*args, columns=self._by_site(both), **kwargs)
        known = self.log_density(*args, columns=given, **kwargs)
        return log_mean_exp(whole) - log_mean_exp(known)

    def log_column_densities(
        self, *args: Any, given: Any = None, **kwargs: Any
    ) -> dict[str, np.ndarray]:
        """
        Log predictive density of every cell of new rows alone, in nats.

        :param given: columns whose cells are conditioned on (of a cell among them, the
            others); none by default.
        :return: by observed site, ``[draws, rows, *feature_shape]``; NaN for a cell
            that is masked.
        """
        data = self._read_rows(args, kwargs)
        known = self._select(given, False)

        def ask(trained, i, data, known):
            def one(n):
                each = look_at(trained, data, n).log_density_of_each(known)
                return jnp.where(observed(trained.blocks, data, n), each, jnp.nan)

            return self._over_rows(one, self._num_new(data))

        return self._by_site(self._each_draw("columns", ask, data, known))

    def log_likelihood(self) -> np.ndarray:
        """
        Log predictive density of every row of the table under each draw, with the row
        itself taken out, in nats: what leave-one-out cross-validation by importance
        sampling needs, as in :func:`arviz.loo`. (The weight of a draw for the posterior
        without a row is one over this density.)

        :return: ``[draws, rows]``.
        """

        def ask(trained, i, data):
            every = jnp.ones(len(self.columns), bool)

            def one(n):
                return look_at_own(trained, data, n).log_density(every, ~every)

            return self._over_rows(one, self.num_rows)

        return self._each_draw("log_likelihood", ask, self._data)

    def _over_rows(self, fn, num_rows):
        rows = jnp.arange(num_rows, dtype=jnp.int32)
        return lax.map(fn, rows, batch_size=min(_BATCH, num_rows))

    # --- new rows ---------------------------------------------------------------------

    def membership(self, *args: Any, given: Any = None, **kwargs: Any) -> np.ndarray:
        """
        Probability of every cluster, for new rows, under each draw.

        :param given: columns whose cells are known; all by default.
        :return: ``[draws, rows, K]``, or with views ``[draws, rows, views, K]``, of the
            labels in the draws; the last entry is that of a new cluster, unless the
            prior is of labelled components. NaN in views without columns.
        """
        data = self._read_rows(args, kwargs)
        known = self._select(given, True)
        labelled = self._plan.partition.labelled

        def ask(trained, i, data, known):
            is_new = predictive.new_slot(trained.counts)

            def one(n):
                p = jnp.exp(look_at(trained, data, n).log_membership(known))
                if labelled:
                    return p
                new = jnp.where(is_new, p, 0).sum(-1)
                old = jnp.where(trained.counts > 0, p, 0)
                vacant = (trained.counts == 0).all(-1, keepdims=True)
                return jnp.where(vacant, jnp.nan, old.at[:, -1].set(new))

            return self._over_rows(one, self._num_new(data))

        found = self._each_draw("membership", ask, data, known)
        return found if self._plan.viewed else found[:, :, 0]

    def sample_rows(
        self, rng_key: Array, *args: Any, given: Any = None, **kwargs: Any
    ) -> dict[str, np.ndarray]:
        """
        New rows, one from each draw, given the cells that are known. Each has cluster
        parameters of its own, so that rows are independent given a draw.

        :param rng_key: key.
        :param args: the model's arguments, with a table of as many rows as are wanted;
            cells that are masked are drawn.
        :param given: columns whose cells are known, where they are not masked; all by
            default. The cells of the others are drawn as well.
        :return: by observed site, ``[draws, rows, *feature_shape, *event_shape]``; the
            cells that are known are as they were.
        """
        check_key(rng_key)
        data = self._read_rows(args, kwargs)
        known = self._select(given, True)

        def ask(trained, i, rng_key, data, known):
            key = random.fold_in(rng_key, i)

            def one(n):
                key_cluster, key_cells = random.split(random.fold_in(key, n))
                row = look_at(trained, data, n)
                k = draw_clusters(key_cluster, row.log_membership(known))
                drawn = draw_cells(key_cells, trained, data, n, k)
                return self._keep(drawn, data, n, known)

            return self._over_rows(one, self._num_new(data))

        return self._each_draw("sample_rows", ask, rng_key, data, known)

    def _keep(self, drawn, data, n, known):
        """Cells as drawn, but where they are known."""
        cells = iter(x for own in data for x in own)
        start = 0
        found = {}
        for site, x in zip(self._sites, cells, strict=True):
            own = known[start : start + site.num_features]
            start += site.num_features
            live = own.reshape(site.feature_shape) & x.mask[n]
            live = live.reshape(live.shape + (1,) * len(site.event_shape))
            value = drawn[site.name]
            found[site.name] = jnp.where(live, x.value[n].astype(value.dtype), value)
        return found

    # --- missing cells ---------------------------------------------------------------

    def impute(self, rng_key: Array) -> dict[str, Imputation]:
        """
        The masked cells of the training table: draws from their posterior, in which
        what is observed in the same row has its part; each row by itself.

        :param rng_key: key.
        :return: by observed site that has masked cells.
        """
        check_key(rng_key)
        masks = {
            site.name: np.asarray(x.mask)
            for site, x in zip(
                self._sites, (x for own in self._data for x in own), strict=True
            )
        }
        rows = np.zeros(self.num_rows, bool)
        for mask in masks.values():
            rows |= ~mask.reshape(self.num_rows, -1).all(1)
        if not rows.any():
            return {}
        (rows,) = np.nonzero(rows)
        place = np.zeros(self.num_rows, int)
        place[rows] = np.arange(len(rows))
        index = {
            name: np.argwhere(~mask) for name, mask in masks.items() if not mask.all()
        }

        def ask(trained, i, rng_key, data):
            key = random.fold_in(rng_key, i)

            def one(n):
                k = jnp.maximum(trained.z[n], 0)
                return draw_cells(random.fold_in(key, n), trained, data, n, k)

            batch = min(_BATCH, len(rows))
            drawn = lax.map(one, jnp.asarray(rows, jnp.int32), batch_size=batch)
            return {
                name: drawn[name][(place[at[:, 0]], *at[:, 1:].T)]
                for name, at in index.items()
            }

        drawn = self._each_draw("impute", ask, rng_key, self._data)
        likelihood = {
            site.name: block.pair.likelihood[0]
            for block in self._plan.blocks
            for site in block.sites
        }
        return {
            name: _summary(index[name], drawn[name], likelihood[name]) for name in index
        }

    def surprisal(self) -> np.ndarray:
        """
        How surprising each row of the table is given all others: minus the log
        predictive density of its cells that are not masked, in nats. Draws are weighted
        so that they are of the posterior without the row.

        :return: ``[rows]``.
        """
        return log_mean_exp(-self.log_likelihood())

    def cell_surprisal(self) -> dict[str, np.ndarray]:
        """
        How surprising each cell of the table is given all others, those of its row
        among them: minus the log predictive density, in nats. Draws are weighted so
        that they are of the posterior without the cell.

        :return: by observed site, ``[rows, *feature_shape]``; NaN for a cell that is
            masked.
        """

        def question(train, draws, data):
            def add(total, draw):
                trained = train(draw)

                def one(n):
                    row = look_at_own(trained, data, n)
                    live = observed(trained.blocks, data, n)
                    each = row.log_density_of_each(jnp.ones_like(live))
                    return jnp.where(live, -each, jnp.nan)

                return jnp.logaddexp(total, self._over_rows(one, self.num_rows)), None

            shape = self.num_rows, len(self.columns)
            total, _ = lax.scan(add, jnp.full(shape, -jnp.inf), draws)
            return total - jnp.log(self.num_draws)

        return self._by_site(self._run("cells", question))

    # --- structure --------------------------------------------------------------------

    def dependence(self) -> np.ndarray:
        """
        Probability that two columns are in the same view: ``[features, features]``,
        in the order of :attr:`columns`; ones in a mixture without views.
        """
        return partitions.similarity(self._views())

    def mutual_information(
        self, rng_key: Array, num_samples: int = 1000
    ) -> MutualInformation:
        """
        Mutual information of every two columns: of a new row's two cells under each
        draw, estimated from samples of new rows, and averaged over draws.

        :param rng_key: key.
        :param int num_samples: number of rows sampled from each draw.
        :return: estimates and their errors, in the order of :attr:`columns`.
        """
        check_key(rng_key)

        def ask(trained, i, rng_key, data):
            size = len(self.columns)
            key = random.fold_in(rng_key, i)
            nothing = jnp.zeros(size, bool)

            def draw(n):
                key_cluster, key_cells = random.split(random.fold_in(key, n))
                weights = predictive.log_weights(trained, trained.counts)
                k = draw_clusters(key_cluster, weights)
                # NB: parameters given by row are those of the rows of the table.
                row = n % self.num_rows
                return draw_cells(key_cells, trained, data, row, k)

            drawn = self._over_rows(draw, num_samples)
            rows = jnp.arange(num_samples) % self.num_rows
            sampled = tuple(
                tuple(
                    Observed(
                        drawn[site.name],
                        None,
                        tuple(g[rows] if g.shape[0] > 1 else g for g in x.given),
                    )
                    for site, x in zip(block.sites, own, strict=True)
                )
                for block, own in zip(trained.blocks, data, strict=True)
            )

            def information(n):
                row = look_at(trained, sampled, n)
                each = row.log_density_of_each(nothing)
                weights = row.weights[row.view]

                def with_other(a):
                    scores = weights + row.scores + row.scores[a]
                    joint = logsumexp(scores, -1)
                    alike = row.view == row.view[a]
                    return jnp.where(alike, joint - each - each[a], 0)

                return lax.map(with_other, jnp.arange(size))

            def add(total, n):
                return total + information(n), None

            total = jnp.zeros((size, size))
            total, _ = lax.scan(add, total, jnp.arange(num_samples, dtype=jnp.int32))
            return total / num_samples

        if not isinstance(num_samples, int | np.integer) or num_samples < 1:
            raise ValueError(
                f"`num_samples` must be a positive integer, got {num_samples!r}."
            )
        name = f"mutual_information {num_samples}"
        each = self._each_draw(name, ask, rng_key, self._data)
        value = np.maximum(each.mean(0, dtype=np.float64), 0)
        spread = each.std(0, ddof=1) if len(each) > 1 else np.full_like(value, np.nan)
        error = spread / np.sqrt(len(each))
        np.fill_diagonal(value, np.nan)
        np.fill_diagonal(error, np.nan)
        return MutualInformation(value, error)

    def similarity(
        self, columns: Any = None, rows: Array | None = None, others: Any = None
    ) -> np.ndarray:
        """
        Probability that two rows are in one cluster; with views, of the view of a
        column, averaged over columns.

        :param columns: which columns; all by default.
        :param rows: which rows, all by default, against which `others`, the same by
            default: see :func:`~numpyro_subanneal.partitions.similarity`.
        :return: ``[rows, others]``.
        """
        return partitions.similarity(self.partition(columns), rows, others)

    def point_partition(
        self, columns: Any = None, loss: partitions.Loss = "vi", **options: Any
    ) -> partitions.PointPartition:
        """
        The partition of the rows of least expected loss; with views, of those of the
        views of some columns.

        :param columns: which columns; all by default.
        :param loss: see :func:`~numpyro_subanneal.partitions.point_partition`, as for
            `options`.
        """
        return partitions.point_partition(self.partition(columns), loss, **options)

    def partition(self, columns: Any = None) -> np.ndarray:
        """
        Labels of the rows' clusters in every draw; with views, those of the view of
        each of some columns.

        :param columns: which columns; all by default.
        :return: ``[draws, rows]``; with views ``[draws x columns, rows]``.
        :raises ValueError: if no column is chosen.
        """
        (chosen,) = np.nonzero(self._select(columns, True))
        if not len(chosen):
            raise ValueError(f"Of no columns there is no partition; got {columns!r}.")
        if not self._plan.viewed:
            return self._draws[self._plan.partition.name]
        view = self._views()[:, chosen]
        z = np.concatenate(
            [
                self._draws[p.name].reshape(self.num_draws, -1, self.num_rows)
                for p in self._plan.partitions
            ],
            1,
        )
        found = np.take_along_axis(z, view[:, :, None], axis=1)
        return found.reshape(-1, self.num_rows)


def _check_rows(pair, site, hyper, given, value, live):
    def check(at):
        own = {name: g[at] for name, g in given.items()}
        check_data(pair, site, hyper, own, value[at], live[at])

    try:
        check(slice(None))
    except NotRecognised as whole:
        # What is asked of a table to learn from, such as that its values can be told
        # apart, is not asked of new rows: each must do by itself.
        for n in range(len(value)):
            try:
                check(slice(n, n + 1))
            except NotRecognised:
                raise ValueError(str(whole)) from None


def log_mean_exp(values: np.ndarray) -> np.ndarray:
    """Logarithm of the mean over the first axis of the exponential."""
    most = np.max(values, 0)
    shift = np.where(np.isfinite(most), most, 0)
    mean = np.mean(np.exp(values - shift), axis=0, dtype=np.float64)
    with np.errstate(divide="ignore"):
        return np.log(mean) + shift


def _summary(index, draws, likelihood) -> Imputation:
    if likelihood in _NOMINAL:
        counts = np.stack([(draws == v).sum(0) for v in range(int(draws.max()) + 1)])
        share = counts.max(0) / len(draws)
        return Imputation(index, draws, counts.argmax(0), 1 - share)
    if likelihood is dist.VonMises:
        # (The mean of angles next to -pi and pi is on the other side.)
        mean = np.exp(1j * draws.astype(np.float64)).mean(0)
        length = np.minimum(np.abs(mean), 1)
        with np.errstate(divide="ignore"):
            spread = np.sqrt(-2 * np.log(length))
        return Imputation(index, draws, np.angle(mean), spread)
    mean, spread = (f(draws, axis=0, dtype=np.float64) for f in (np.mean, np.std))
    return Imputation(index, draws, mean, spread)


def cross_validate(
    kernel: SubsampleAnnealedGibbs,
    *args: Any,
    rng_key: Array,
    num_warmup: int,
    num_samples: int,
    num_splits: int | None = None,
    held_out: float | None = None,
    num_folds: int | None = None,
    num_chains: int = 1,
    take: Callable | None = None,
    **kwargs: Any,
) -> CrossValidation:
    """
    Train on a random part of the rows and score the rest, so many times (Obermeyer et
    al. 2014, section 4: 7/8 and 1/8).

    :param kernel: for the whole table; it is set up anew for every part.
    :param args: the model's arguments.
    :param rng_key: key, of the chains and of the splits.
    :param int num_warmup: see :class:`~numpyro.infer.MCMC`, as are `num_samples` and
        `num_chains`.
    :param int num_splits: how often, by default once.
    :param float held_out: share of the rows to hold out, by default 1/8.
    :param int num_folds: instead of these two, to hold out each of so many random parts
        of the rows in turn.
    :param take: ``take(args, kwargs, rows)`` gives the arguments for some rows
        ``[rows]`` of the table, a pair. By default rows are taken out of every array
        whose first axis is as long as there are rows.
    :param kwargs: the model's keyword arguments.

    Each split is compiled anew, and JAX's caches are cleared after it.

    :raises ValueError: if a split leaves no row on one side, or the arguments do not
        say which rows to take out.
    """
    if not isinstance(kernel, SubsampleAnnealedGibbs):
        raise TypeError(
            "`kernel` must be a SubsampleAnnealedGibbs, such as "
            f"`SubsampleAnnealedGibbs(model)`, got {type(kernel).__name__}."
        )
    check_key(rng_key)
    if take is not None and not callable(take):
        raise TypeError(
            f"`take` must be a function `take(args, kwargs, rows)`, got {take!r}."
        )
    if not isinstance(num_chains, int | np.integer) or num_chains < 1:
        raise ValueError(f"`num_chains` must be a positive integer, got {num_chains}.")
    plan = recognise(kernel.model, args, kwargs)
    num_rows = plan.num_rows
    held_out_rows = _held_out(rng_key, num_rows, num_splits, held_out, num_folds)
    if take is None:
        take = partial(_take_rows, num_rows)
    scores, densities, rows = [], [], []
    for i, out in enumerate(held_out_rows):
        _, key_run = random.split(random.fold_in(rng_key, i))
        rest = np.setdiff1d(np.arange(num_rows), out)
        own_args, own_kwargs = take(args, kwargs, rest)
        _check_taken(kernel.model, own_args, own_kwargs, plan.partition.name, len(rest))
        mcmc = MCMC(
            kernel,
            num_warmup=num_warmup,
            num_samples=num_samples,
            num_chains=num_chains,
            chain_method="sequential",
            progress_bar=False,
        )
        mcmc.run(key_run, *own_args, **own_kwargs)
        new_args, new_kwargs = take(args, kwargs, out)
        found = Posterior.from_mcmc(mcmc).log_predictive(*new_args, **new_kwargs)
        scores.append(found.mean())
        densities.append(found)
        rows.append(out)
        # Programs of one split are of no use to the next, and a process has memory maps
        # for some ten of the largest alone; JAX keeps them all.
        jax.clear_caches()
    return CrossValidation(np.array(scores), densities, rows)


def _held_out(rng_key, num_rows, num_splits, held_out, num_folds) -> list[np.ndarray]:
    """The rows to hold out, of every split."""
    if num_folds is not None and (num_splits, held_out) != (None, None):
        raise ValueError(
            f"`num_folds` = {num_folds} takes the place of `num_splits` and "
            "`held_out`; give one or the others."
        )
    num_splits = 1 if num_splits is None else num_splits
    held_out = 1 / 8 if held_out is None else held_out
    for name, value, least, most in (
        ("num_splits", num_splits, 1, np.inf),
        ("num_folds", 2 if num_folds is None else num_folds, 2, num_rows),
    ):
        if not isinstance(value, int | np.integer) or not least <= value <= most:
            limit = "a positive integer" if least == 1 else f"from 2 to {num_rows} rows"
            raise ValueError(f"`{name}` must be {limit}, got {value!r}.")
    keys = [random.split(random.fold_in(rng_key, i))[0] for i in range(num_splits)]
    if num_folds is not None:
        order = np.asarray(random.permutation(keys[0], num_rows))
        return [np.sort(part) for part in np.array_split(order, num_folds)]
    size = round(num_rows * held_out) if np.isfinite(held_out) else -1
    if not 0 < size < num_rows:
        raise ValueError(
            f"`held_out` = {held_out!r} of {num_rows} rows leaves "
            f"{size} and {num_rows - size}; give a share such as 1 / 8, of which at "
            "least one row is held out and one is left."
        )
    orders = [np.asarray(random.permutation(key, num_rows)) for key in keys]
    return [np.sort(order[:size]) for order in orders]


def _check_taken(model, args, kwargs, name, size):
    with numpyro.validation_enabled(False), handlers.block():
        found = read_skeleton(model, args, kwargs).sites[name].shape[-1]
    if found != size:
        raise ValueError(
            f"The model has {found} rows in partition site '{name}' with the arguments "
            f"for {size} of them. The table must be an argument, and not bound to the "
            "model; and sizes of it too, or `take` must give those that go with the "
            "rows."
        )


def _take_rows(num_rows, args, kwargs, rows):
    def take(x):
        is_table = isinstance(x, np.ndarray | jax.Array) and np.ndim(x) > 0
        return x[rows] if is_table and x.shape[0] == num_rows else x

    return jax.tree.map(take, (tuple(args), dict(kwargs)))


def _by_name(signature: inspect.Signature, args: Args, kwargs: Kwargs) -> dict:
    """Arguments of a call by name, defaults included."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    named = dict(bound.arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind == inspect.Parameter.VAR_KEYWORD:
            named |= named.pop(name)
        elif parameter.kind == inspect.Parameter.VAR_POSITIONAL:
            named |= {f"{name}[{i}]": x for i, x in enumerate(named.pop(name))}
    return named


def _is_real(x: Any) -> bool:
    """Whether `x` is a single number that is no integer, which might be a size."""
    if isinstance(x, float):
        return True
    is_array = isinstance(x, np.ndarray | np.generic | jax.Array)
    return is_array and x.ndim == 0 and jnp.issubdtype(x.dtype, jnp.floating)
