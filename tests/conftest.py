# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""What must be set before JAX is imported, for the tests and for their subprocesses."""

from contextlib import contextmanager
import gc
import os

import pytest

# Files that take longest, longest first: one that begins late would run on while the
# other processes have nothing left to do.
SLOWEST = (
    "test_hyper",
    "test_examples",
    "test_laws",
    "test_readme",
    "test_pairs",
    "test_crosscat",
    "test_kernel",
    "test_models_crosscat",
    "test_splitmerge",
    "test_geweke",
    "test_enumeration",
    "test_posterior",
    "test_finite_partitions",
    "test_masks",
    "test_figure4",
    "test_geweke_crosscat",
    "test_models",
    "test_grid",
    "test_components",
    "test_distributions",
    "test_paper",
    "test_plan_views",
    "test_conjugate",
    "test_weights",
    "test_numerics",
    "test_geweke_hyper",
    "test_plan",
    "test_columns",
    "test_grids",
)


def pytest_configure(config):
    config.addinivalue_line(
        "markers",
        "quickly_compiled(yes=True, level=0): programs are compiled sooner and run"
        " slower, less so at level 1; not where digits, time or memory are tested",
    )
    # In the order of `pytest_collection_modifyitems`, not by the number of tests.
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # Two devices, for chains in parallel; code that uses one is not touched by it.
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags:
        flags = f"{flags} --xla_force_host_platform_device_count=2"
    if "xla_cpu_parallel_codegen_split_count" not in flags:
        # There is a process for each core; pieces of a program would only be overhead.
        flags = f"{flags} --xla_cpu_parallel_codegen_split_count=1"
    os.environ["XLA_FLAGS"] = flags.strip()
    # NumPyro compiles a program again at every `MCMC.run`. Compiled programs are kept
    # by their content, so that each is compiled once, also across runs of the suite
    # (`pytest --cache-clear` drops them).
    if getattr(config, "cache", None) is not None:
        # One folder a worker: they would read each other's half-written programs.
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        path = config.cache.mkdir(f"jax-{worker}")
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(path)
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


@pytest.fixture(autouse=True, scope="module")
def drop_compiled_programs():
    """A process has a limited number of memory maps, and each program takes some."""
    import jax  # not before `pytest_configure`

    yield
    jax.clear_caches()
    gc.collect()


def pytest_collection_finish():
    # What is imported stays: not to be gone through at each of the many collections
    # that tracing sets off, which are a twentieth of all time.
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)


def pytest_collection_modifyitems(items):
    rank = {name: i for i, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))


@contextmanager
def compile_options(node):
    """Those of the marker ``quickly_compiled``, of a test or of its module."""
    import jax
    from jax._src import compiler

    from numpyro_subanneal.compiling import quick_options

    marker = node.get_closest_marker("quickly_compiled")
    quickly = marker is not None and marker.args != (False,)
    # JAX has no public setting of these for all programs. Without this function, tests
    # are as slow as without the marker.
    before = getattr(compiler, "get_compile_options", None)
    default = getattr(before, "default", before)  # what the module's are made from
    options = quick_options()
    if quickly and "xla_backend_optimization_level" in options:
        level = marker.kwargs.get("level", 0)
        options = {**options, "xla_backend_optimization_level": level}

    def quick(*args, env_options_overrides=None, **kwargs):
        more = {**options, **(env_options_overrides or {})}
        return default(*args, env_options_overrides=more, **kwargs)

    quick.default = default
    with pytest.MonkeyPatch.context() as patch:
        if before is not None:
            wanted = quick if quickly else default
            patch.setattr(compiler, "get_compile_options", wanted)
        # The device is that of every test; that it is named is part of the key under
        # which JAX keeps programs, so that no other test gets one compiled quickly.
        with jax.default_device(jax.devices()[0] if quickly else None):
            yield


@pytest.fixture(autouse=True, scope="module")
def compile_options_of_the_module(request):
    with compile_options(request.node):
        yield


@pytest.fixture(autouse=True)
def compile_options_of_the_test(request):
    with compile_options(request.node):
        yield
