# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""Which sites a model has, and what depends on what: an abstract trace.

Nothing of the table's size is computed here; there are only shapes and types.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
from jax import random
import jax.numpy as jnp
import numpy as np

import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer.util import helpful_support_errors
from numpyro.ops.provenance import eval_provenance

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
class Site:
    """
    A sample site.

    - **name** - its name.
    - **observed** - whether it has a value given.
    - **fn** - type of its distribution, inside `expand`, `to_event` and `mask`.
    - **shape**, **dtype** - of its value; None if that is not an array.
    - **fn_shape** - shape of its distribution.
    - **event_dim** - number of event axes of `fn`.
    - **parameters** - shapes of the parameters of `fn`.
    - **discrete**, **finite** - whether its values are discrete, and whether they can
      be enumerated.
    - **made_event** - whether axes of its batch were made an event by `to_event`.
    - **masked**, **scaled** - whether its log density is masked or scaled.
    - **plates** - those that it is in, each with the axis of its value.
    - **upstream** - latent sites that its distribution depends on directly.
    - **mask_upstream** - those that its mask depends on.
    """

    name: str
    observed: bool
    fn: type[dist.Distribution]
    shape: tuple[int, ...] | None
    dtype: np.dtype | None
    fn_shape: tuple[int, ...]
    event_dim: int
    parameters: Mapping[str, tuple[int, ...]]
    discrete: bool
    finite: bool
    made_event: bool
    masked: bool
    scaled: bool
    plates: Mapping[str, int]
    upstream: tuple[str, ...] = ()
    mask_upstream: tuple[str, ...] = ()

    @property
    def feature_shape(self) -> tuple[int, ...]:
        """Shape of the value without its first axis and its event."""
        return self.shape[1 : len(self.shape) - self.event_dim]

    @property
    def event_shape(self) -> tuple[int, ...]:
        return self.shape[len(self.shape) - self.event_dim :]


@dataclass(frozen=True)
class Skeleton:
    """
    - **sites** - sample sites by name, in the order of the model.
    - **deterministic** - names of the deterministic sites.
    """

    sites: dict[str, Site]
    deterministic: tuple[str, ...]


def peel(fn: dist.Distribution) -> dist.Distribution:
    """The distribution inside `expand`, `to_event` and `mask`."""
    while isinstance(
        fn,
        dist.ExpandedDistribution | dist.Independent | dist.MaskedDistribution,
    ):
        fn = fn.base_dist
    return fn


def masks(fn: dist.Distribution) -> list[tuple[Any, int]]:
    """
    Masks around the distribution inside `fn`, each with the number of axes that
    `to_event` has taken from its batch inside it; a mask of True is none.
    """
    found = []
    depth = 0  # Axes taken by `to_event` so far, from the outside in.
    while isinstance(
        fn,
        dist.ExpandedDistribution | dist.Independent | dist.MaskedDistribution,
    ):
        if isinstance(fn, dist.Independent):
            depth += fn.reinterpreted_batch_ndims
        elif isinstance(fn, dist.MaskedDistribution) and fn._mask is not True:
            found.append((fn._mask, depth))
        fn = fn.base_dist
    return [(mask, depth - outside) for mask, outside in found]


def cell_mask(fn: dist.Distribution, shape: tuple[int, ...]) -> Array:
    """Which cells of a site count, of `shape` ``[rows, *feature_shape]``."""
    live = jnp.ones(shape, bool)
    for mask, inside in masks(fn):
        mask = jnp.asarray(mask, bool)
        live = live & mask.reshape(mask.shape + (1,) * inside)
    return live


def run_trace(
    model: Model,
    args: Args,
    kwargs: Kwargs,
    substitute_fn: Callable,
    rng_key: Array | None = None,
) -> dict:
    """Trace `model`, its sites' values chosen by `substitute_fn`, else drawn."""
    # NB: no key is made for a site that has a value, and to compile one takes as long
    # as a good part of the model.
    substituted = handlers.substitute(model, substitute_fn=substitute_fn)
    seeded = handlers.seed(substituted, random.key(0) if rng_key is None else rng_key)
    tracer = handlers.trace(seeded)
    try:
        return tracer.get_trace(*args, **kwargs)
    except Exception as error:
        # What JAX says of shapes that do not go together names no site.
        seen = [
            f"'{name}' {getattr(site['value'], 'shape', '')}".rstrip()
            for name, site in tracer.trace.items()
            if site["type"] == "sample"
        ]
        where = f"after its sites {', '.join(seen)}" if seen else "before any site"
        error.add_note(f"The model raised this {where}.")
        # NumPy cannot be indexed by the rows of a subsample, which are drawn.
        _refuse_subsamples(tracer.trace, error)
        raise


def _refuse_subsamples(
    trace: Mapping[str, Any], cause: Exception | None = None
) -> None:
    for name, site in trace.items():
        if site["type"] != "plate":
            continue
        size, subsample_size = site["args"]
        if subsample_size is not None and subsample_size != size:
            raise NotRecognised(
                f"Plate '{name}' takes a subsample (`subsample_size`). Subsample "
                "annealing keeps its own subsample; give the plate its full size."
            ) from cause


def at_unconstrained(
    site: Mapping[str, Any], draw: Callable[[tuple[int, ...]], Array]
) -> Array | None:
    """
    The value of a continuous latent site at coordinates on the unconstrained scale,
    which `draw` makes of their shape; None of any other site.
    """
    if site["type"] != "sample" or site["is_observed"]:
        return None
    fn = site["fn"]
    if fn.support.is_discrete:
        return None
    with helpful_support_errors(site):
        transform = dist.biject_to(fn.support)
    shape = site["kwargs"].get("sample_shape", ())
    return transform(draw(shape + transform.inverse_shape(fn.shape())))


def feasible(site: Mapping[str, Any]) -> Array | None:
    """Some value in the support of a continuous latent site, without random numbers."""
    return at_unconstrained(site, jnp.zeros)


def read_skeleton(model: Model, args: Args, kwargs: Kwargs) -> Skeleton:
    """
    Read the sites of `model`.

    :raises NotRecognised: where NumPyro itself could not evaluate the model and would
        not say at which site.
    """
    found = []

    def read():
        sites, deterministic = {}, []
        named = set()

        def pick(site):
            if site["type"] == "sample":
                named.add(site["name"])
            return feasible(site)

        trace = run_trace(model, args, kwargs, pick)
        _refuse_subsamples(trace)
        for name, site in trace.items():
            # NumPyro forgets a sample site when a later site of another type has its
            # name.
            if site["type"] != "sample" and name in named:
                raise NotRecognised(
                    f"Sample site '{name}' and a {site['type']} site have the same "
                    "name. Rename one of them."
                )
            if site["type"] == "plate":
                size, _ = site["args"]
                if isinstance(size, float):
                    raise NotRecognised(
                        f"Plate '{name}' has size {size}; it must be an integer."
                    )
            elif site["type"] == "deterministic":
                deterministic.append(name)
            elif site["type"] == "sample":
                sites[name] = _site(name, site)
        found.append((sites, deterministic))

    try:
        jax.eval_shape(read)
    except AssertionError as error:
        plate = _empty_plate(error)
        if plate is None:
            raise
        raise NotRecognised(
            f"Plate '{plate}' of the model has size 0. The plate of the clusters must "
            "hold at least one (its size is the capacity), and so must those of rows "
            "and of views."
        ) from error
    except ValueError as error:
        site = _partly_masked(error)
        if site is None:
            raise
        raise NotRecognised(partial_mask_message(site)) from error
    sites, deterministic = found[0]
    return _with_dependencies(model, args, kwargs, sites, deterministic)


def partial_mask_message(name: str) -> str:
    return (
        f"Observed site '{name}' is multivariate and masked by coordinate. A row of a "
        "multivariate likelihood is masked as a whole, by a mask of one value a row; "
        "partly observed rows have no conjugate marginal. Leave them out, or model "
        "the coordinates as independent features."
    )


def _site(name: str, site: dict) -> Site:
    base = peel(site["fn"])
    value = site["value"]
    if isinstance(value, bool | int | float):
        value = np.asarray(value)
    is_array = isinstance(value, np.ndarray | np.generic | jax.Array)
    return Site(
        name=name,
        observed=site["is_observed"],
        fn=type(base),
        shape=value.shape if is_array else None,
        dtype=value.dtype if is_array else None,
        fn_shape=tuple(site["fn"].shape()),
        event_dim=base.event_dim,
        # Lazy attributes are not looked at: some cost a matrix inverse a row.
        parameters={
            key: jnp.shape(base.__dict__[key])
            for key in base.arg_constraints
            if base.__dict__.get(key) is not None
        },
        discrete=bool(base.support is not None and base.support.is_discrete),
        finite=bool(base.has_enumerate_support) and base.event_dim == 0,
        made_event=site["fn"].event_dim > base.event_dim,
        masked=bool(masks(site["fn"])),
        scaled=site["scale"] is not None,
        # NB: a plate's `dim` counts from the end of the batch.
        plates={
            frame.name: len(site["fn"].batch_shape) + frame.dim
            for frame in site["cond_indep_stack"]
        },
    )


def _with_dependencies(model, args, kwargs, sites, deterministic):
    def parameters(**values):
        def pick(site):
            return values.get(site["name"]) if site["type"] == "sample" else None

        trace = run_trace(model, args, kwargs, pick)
        return (
            {name: jax.tree.leaves(peel(trace[name]["fn"])) for name in sites},
            {name: [m for m, _ in masks(trace[name]["fn"])] for name in sites},
        )

    latent = {
        name: jax.ShapeDtypeStruct(site.shape, site.dtype)
        for name, site in sites.items()
        if not site.observed
    }
    found = eval_provenance(parameters, **latent)

    def sources(leaves, name=None):
        return tuple(u for u in latent if u != name and any(u in x for x in leaves))

    fns, site_masks = found
    sites = {
        name: Site(
            **{
                **vars(site),
                "upstream": sources(fns[name], name),
                "mask_upstream": sources(site_masks[name]),
            }
        )
        for name, site in sites.items()
    }
    return Skeleton(sites, tuple(deterministic))


def _empty_plate(error: AssertionError) -> str | None:
    # NumPyro asserts that a plate has a positive size before it sends any message that
    # a handler could see, and does not say which plate.
    for frame in _frames(error):
        if frame.f_code is numpyro.plate.__init__.__code__:
            if frame.f_locals.get("size") == 0:
                return frame.f_locals["name"]
    return None


def _partly_masked(error: ValueError) -> str | None:
    """The site whose mask has the shape of whole events, at which NumPyro's broadcast
    of a mask and a batch has failed."""
    name = None
    for frame in _frames(error):
        if frame.f_code is numpyro.sample.__code__:
            name = frame.f_locals.get("name")
        if frame.f_code is dist.MaskedDistribution.__init__.__code__:
            base, mask = frame.f_locals["base_dist"], frame.f_locals["mask"]
            if base.event_shape and jnp.ndim(mask) > len(base.batch_shape):
                return name
    return None


def _frames(error: BaseException):
    tb = error.__traceback__
    while tb is not None:
        yield tb.tb_frame
        tb = tb.tb_next
