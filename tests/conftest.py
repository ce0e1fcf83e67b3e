# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""What must be set before JAX is imported, for the tests and for their subprocesses."""

import gc
import os

import pytest


def pytest_configure(config):
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # Two devices, for chains in parallel; code that uses one is not touched by it.
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags:
        flags = f"{flags} --xla_force_host_platform_device_count=2"
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
