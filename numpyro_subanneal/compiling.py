# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""How programs are made: some quickly, and loops without what never changes."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun
import jax.numpy as jnp
import numpy as np


def compile_for(fn: Callable, *args: Any, quickly: bool = False) -> Callable:
    """
    `fn`, compiled for arguments like `args`. Calls are executed there and then, also
    while JAX traces the caller: `MCMC` traces `init` when it runs chains in parallel.

    :param bool quickly: whether to save time on the program rather than in it.
    """
    options = quick_options() if quickly else None
    return jax.jit(fn).lower(*args).compile(compiler_options=options)


def without_data(fn: Callable, *examples: Any) -> tuple[Callable, list[Any]]:
    """
    `fn` as a function of the large arrays that it closes over too, such as the data of
    a model. A program that has them as constants keeps copies of them.

    :param examples: arguments, for shapes and types.
    :return: a function of a list of arrays and of the arguments of `fn`; and the list.
    """
    program, shape = jax.make_jaxpr(fn, return_shape=True)(*examples)
    treedef = jax.tree.structure(shape)
    large = [np.size(x) > _LARGE for x in program.consts]
    data = [x for x, is_large in zip(program.consts, large, strict=True) if is_large]

    def of_data(data, *args):
        rest = iter(data)
        consts = [
            next(rest) if is_large else x
            for x, is_large in zip(program.consts, large, strict=True)
        ]
        run = jaxpr_as_fun(ClosedJaxpr(program.jaxpr, consts))
        return jax.tree.unflatten(treedef, run(*jax.tree.leaves(args)))

    return of_data, data


# Number of elements from which an array is no constant of a program.
_LARGE = 10_000


@lru_cache
def quick_options(level: int = 0) -> dict[str, Any]:
    """
    Options with which XLA takes less than half of the time to compile.

    :param int level: of optimization; at level 1 the program is slower by half or so,
        at level 0 several times.
    """
    options: dict[str, Any] = {}
    for name, value in (
        ("xla_backend_optimization_level", level),
        ("xla_cpu_use_fusion_emitters", False),
        # A seventh of the time; most of what can leave the loops has done so before.
        ("xla_disable_hlo_passes", "while-loop-invariant-code-motion"),
    ):
        # Not every version knows them.
        more = {**options, name: value}
        try:
            jax.jit(lambda: jnp.zeros(()), compiler_options=more).lower().compile()
        except jax.errors.JaxRuntimeError:
            continue
        options = more
    return options


def hoist(fn: Callable, *examples: Any) -> Callable:
    """
    `fn` with all that does not depend on its arguments computed here and now.

    For the body of a loop: JAX puts there whatever is computed while the body is
    traced, though it come out the same at every iteration, and XLA leaves it there.
    With a user's model that can be anything, such as quantiles of the data.

    :param fn: a function without side effects, of arrays; other leaves of its arguments
        and of what it returns must be the same at every call.
    :param examples: arguments, for shapes and types.
    """
    leaves, treedef = jax.tree.flatten(examples)
    is_array = [_is_array(leaf) for leaf in leaves]
    returned = []

    def flat(*arrays):
        rest = iter(arrays)
        merged = [
            next(rest) if a else leaf for leaf, a in zip(leaves, is_array, strict=True)
        ]
        out, out_tree = jax.tree.flatten(fn(*jax.tree.unflatten(treedef, merged)))
        returned[:] = [out_tree, [None if _is_array(leaf) else leaf for leaf in out]]
        return [leaf for leaf in out if _is_array(leaf)]

    arrays = [leaf for leaf, a in zip(leaves, is_array, strict=True) if a]
    program = jax.make_jaxpr(flat)(*arrays)
    out_tree, out_static = returned
    jaxpr = program.jaxpr
    known = set(jaxpr.constvars)
    now, later = [], []
    for eqn in jaxpr.eqns:
        ready = all(isinstance(v, Literal) or v in known for v in eqn.invars)
        if ready and not eqn.effects:
            known.update(eqn.outvars)
            now.append(eqn)
        else:
            later.append(eqn)
    used = [v for eqn in later for v in eqn.invars] + list(jaxpr.outvars)
    used = dict.fromkeys(v for v in used if not isinstance(v, Literal) and v in known)
    first = jaxpr.replace(invars=[], outvars=[*used], eqns=now, effects=frozenset())
    computed = jaxpr_as_fun(ClosedJaxpr(first, program.consts))()
    rest = ClosedJaxpr(jaxpr.replace(constvars=[*used], eqns=later), computed)

    def rest_of_it(*args):
        found, given = jax.tree.flatten(args)
        if given != treedef:
            raise TypeError(f"Arguments have the structure {given}, not {treedef}.")
        arrays = [leaf for leaf, a in zip(found, is_array, strict=True) if a]
        out = iter(jaxpr_as_fun(rest)(*arrays))
        merged = [next(out) if leaf is None else leaf for leaf in out_static]
        return jax.tree.unflatten(out_tree, merged)

    return rest_of_it


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float)
