# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""NumPyro's contract, as `MCMC` and what users do with it hold the kernel to it.

Nothing here is a test of the law that the chain samples. Draws are compared exactly, so
there are no false alarms unless a comment states a rate.
"""

import copy
from functools import partial
import hashlib
import os
import pickle
import re
import subprocess
import sys
import warnings

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import CAPACITY, blobs, log_joint, mixture

from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import MCMC, Predictive

from numpyro_subanneal import (
    LinearSchedule,
    NotRecognised,
    Posterior,
    PriorGibbs,
    SequentialGibbs,
    SubsampleAnnealedGibbs,
    SubsampleAnnealedGibbsState,
    rows,
    testing,
)
from numpyro_subanneal.compiling import quick_options
from numpyro_subanneal.inference_data import to_arviz

# Nearly all of the time is that of compiling.
pytestmark = pytest.mark.quickly_compiled

NUM_WARMUP, NUM_SAMPLES = 4, 6
X = blobs()
N = len(X)
SITES = {"z", "var", "loc"}
FIELDS = {
    "log_joint",
    "num_clusters",
    "num_views",
    "subsample_size",
    "capacity_reached",
    "num_splits",
    "num_merges",
}


def row_moves(model=mixture):
    """A kernel without splits and merges, whose programs are compiled sooner."""
    return SubsampleAnnealedGibbs(model, split_merge=None)


def run(*args, key=None, model=mixture, kernel=None, run_kwargs=None, **kwargs):
    """A finished `MCMC`; positional arguments are the model's."""
    kernel = row_moves(model) if kernel is None else kernel
    options = {
        "num_warmup": NUM_WARMUP,
        "num_samples": NUM_SAMPLES,
        "progress_bar": False,
        **kwargs,
    }
    mcmc = MCMC(kernel, **options)
    key = random.key(0) if key is None else key
    with warnings.catch_warnings():
        # NumPyro's: what it donates to a loop cannot be used under `jax.vmap`.
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        mcmc.run(key, *args, **(run_kwargs or {}))
    return mcmc


def start(kernel, *args, key=None, num_warmup=NUM_WARMUP, init_params=None, **kwargs):
    key = random.key(0) if key is None else key
    return kernel.init(key, num_warmup, init_params, args, kwargs)


def assert_same(a, b):
    """Bitwise equal trees."""

    def check(path, x, y):
        if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
            x, y = random.key_data(x), random.key_data(y)
        np.testing.assert_array_equal(x, y, err_msg=jax.tree_util.keystr(path))

    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree_util.tree_map_with_path(check, a, b)


def assert_differ(a, b):
    assert any(not np.array_equal(a[name], b[name]) for name in a)


def assert_log_joint(z, x, fields, rtol=1e-5):
    expected = [log_joint(np.asarray(each), np.float64(x)) for each in z]
    np.testing.assert_allclose(fields, expected, rtol=rtol)


def go_on(state, kernel=None, num_warmup=NUM_WARMUP, key=None, **kwargs):
    """An `MCMC` that went on from `state`. (One program for all tests.)"""
    mcmc = MCMC(
        row_moves() if kernel is None else kernel,
        num_warmup=num_warmup,
        num_samples=NUM_SAMPLES,
        progress_bar=False,
        **kwargs,
    )
    mcmc.post_warmup_state = state
    mcmc.run(random.key(1) if key is None else key, X, extra_fields=("i",))
    return mcmc


@pytest.fixture(scope="module")
def finished():
    """One chain."""
    return run(X)


@pytest.fixture(scope="module")
def chains():
    """Two chains in sequence."""
    return run(X, num_chains=2, chain_method="sequential")


@pytest.fixture(scope="module")
def warm():
    """An `MCMC` of which only the warm-up has run, collected."""
    mcmc = MCMC(
        row_moves(),
        num_warmup=NUM_WARMUP,
        num_samples=NUM_SAMPLES,
        progress_bar=False,
    )
    mcmc.warmup(random.key(0), X, collect_warmup=True, extra_fields=("i", "order"))
    return mcmc


# --- What is drawn ---


def test_draws_are_the_latent_sites_in_declared_shapes_and_dtypes(finished):
    with handlers.block():
        trace = handlers.trace(handlers.seed(mixture, 0)).get_trace(X)
    samples = finished.get_samples()
    assert set(samples) == SITES | {"sd"}
    for name, value in samples.items():
        declared = trace[name]["value"]
        assert value.shape == (NUM_SAMPLES, *declared.shape), name
        assert value.dtype == declared.dtype, name
    assert set(finished.get_extra_fields()) == FIELDS
    for name, value in finished.get_extra_fields().items():
        assert value.shape == (NUM_SAMPLES,), name


def test_deterministic_sites_follow_the_draws(finished, chains):
    for mcmc in (finished, chains):
        samples = mcmc.get_samples(group_by_chain=True)
        np.testing.assert_allclose(samples["sd"], np.sqrt(samples["var"]), rtol=1e-6)


def test_draws_after_the_warmup_hold_every_row(chains):
    samples, fields = chains.get_samples(), chains.get_extra_fields()
    assert samples["z"].min() >= 0
    assert samples["z"].max() < CAPACITY
    np.testing.assert_array_equal(fields["subsample_size"], N)
    occupied = [len(np.unique(z)) for z in samples["z"]]
    np.testing.assert_array_equal(fields["num_clusters"], occupied)


def test_labels_number_the_clusters_by_first_appearance(chains):
    z = np.asarray(chains.get_samples()["z"])
    np.testing.assert_array_equal(z, testing.canonical_labels(z))


def test_cluster_parameters_go_with_the_labels(chains):
    # Parameters of another cluster would put a row some 15 standard deviations off. A
    # right draw has a cell with a log density below -30 less than once in 10^10 runs.
    samples = chains.get_samples()
    for z, loc, var in zip(samples["z"], samples["loc"], samples["var"], strict=True):
        log_prob = dist.Normal(loc[z], np.sqrt(var[z])).log_prob(X)
        assert log_prob.min() > -30


def test_log_joint_is_that_of_the_partition_and_its_rows(chains):
    z = chains.get_samples()["z"]
    assert_log_joint(z, X, chains.get_extra_fields()["log_joint"])


def test_no_field_is_nan(chains):
    drawn = {**chains.get_samples(), **chains.get_extra_fields()}
    for name, value in drawn.items():
        assert np.isfinite(value).all(), name


def test_last_state_is_the_last_draw(finished):
    state = finished.last_state
    assert isinstance(state, SubsampleAnnealedGibbsState)
    assert int(state.i) == NUM_WARMUP + NUM_SAMPLES
    last = {name: finished.get_samples()[name][-1] for name in SITES}
    assert_same(state.z, last)
    np.testing.assert_array_equal(np.sort(state.order), np.arange(N))


# --- The state as a pytree ---


def avals(tree):
    return jax.tree.map(
        lambda x: (x.shape, x.dtype, bool(getattr(x, "weak_type", False))),
        jax.eval_shape(lambda t: t, tree),
    )


@pytest.mark.parametrize(
    "x64, num_warmup, make_key",
    [
        (False, NUM_WARMUP, random.key),
        (False, 0, random.PRNGKey),
        (True, NUM_WARMUP, random.PRNGKey),
        (True, 0, random.key),
    ],
)
def test_a_step_keeps_structure_shapes_and_dtypes(x64, num_warmup, make_key):
    with jax.enable_x64(x64):
        kernel = SubsampleAnnealedGibbs(mixture)
        before = start(kernel, X, key=make_key(0), num_warmup=num_warmup)
        after = jax.eval_shape(lambda s: kernel.sample(s, (X,), {}), before)
        assert jax.tree.structure(before) == jax.tree.structure(after)
        assert avals(before) == avals(after)
        real = jnp.float64 if x64 else jnp.float32
        assert before.z["loc"].dtype == before.log_joint.dtype == real
        assert before.z["z"].dtype == before.order.dtype == jnp.int32


def test_state_can_be_given_another_key():
    state = start(SubsampleAnnealedGibbs(mixture), X)
    assert state._replace(rng_key=random.key(1)).rng_key == random.key(1)


def test_sample_before_init_says_so():
    kernel = SubsampleAnnealedGibbs(mixture)
    state = start(SubsampleAnnealedGibbs(mixture), X)
    with pytest.raises(RuntimeError, match="`init` must be called"):
        kernel.sample(state, (X,), {})


# --- Chains and keys ---


@pytest.fixture(
    scope="module", params=["sequential", "parallel", "vectorized", jax.vmap]
)
def any_chains(request):
    # With all moves, but for chains in sequence, each of which is one chain: those are
    # run with all moves below, of few rows.
    assert jax.local_device_count() >= 2, "see conftest.py"
    if request.param == "sequential":
        return request.getfixturevalue("chains")
    kernel = SubsampleAnnealedGibbs(mixture)
    return run(X, kernel=kernel, num_chains=2, chain_method=request.param)


def test_every_chain_method_gives_valid_chains(any_chains):
    samples = any_chains.get_samples(group_by_chain=True)
    fields = any_chains.get_extra_fields(group_by_chain=True)
    assert samples["z"].shape == (2, NUM_SAMPLES, N)
    assert samples["loc"].shape == (2, NUM_SAMPLES, CAPACITY, X.shape[1])
    np.testing.assert_allclose(samples["sd"], np.sqrt(samples["var"]), rtol=1e-6)
    np.testing.assert_array_equal(fields["subsample_size"], N)
    for chain in range(2):
        assert_log_joint(samples["z"][chain], X, fields["log_joint"][chain])
    np.testing.assert_array_equal(
        any_chains.last_state.i, [NUM_WARMUP + NUM_SAMPLES] * 2
    )


def test_chains_differ(any_chains):
    samples = any_chains.get_samples(group_by_chain=True)
    assert_differ(*({n: v[chain] for n, v in samples.items()} for chain in range(2)))


def test_same_key_gives_the_same_draws_in_a_fresh_kernel(finished):
    again = run(X)
    assert_same(finished._states, again._states)
    assert_differ(finished.get_samples(), run(X, key=random.key(1)).get_samples())


def test_a_batch_of_keys_is_what_a_key_splits_into(chains):
    keys = random.split(random.key(0), 2)
    batch = run(X, key=keys, num_chains=2, chain_method="sequential")
    assert_same(chains._states, batch._states)


def test_each_chain_is_the_chain_of_its_key(chains):
    alone = run(X, key=random.split(random.key(0), 2)[1])
    second = {n: v[1] for n, v in chains.get_samples(group_by_chain=True).items()}
    assert_same(second, alone.get_samples())


def test_one_kernel_serves_vectorized_chains_and_one_chain_in_turn(finished):
    kernel = row_moves()
    first = go_on(finished.last_state, kernel)
    start(kernel, X, key=random.split(random.key(0), 2))  # what "vectorized" calls
    second = go_on(finished.last_state, kernel)
    assert_same(first.get_samples(), second.get_samples())


def test_no_key_is_used_twice():
    with jax.debug_key_reuse(True):
        mcmc = run(X, kernel=SubsampleAnnealedGibbs(mixture))
    assert mcmc.get_samples()["z"].min() >= 0


@pytest.mark.parametrize("rng_key", [0, np.int32(1), np.zeros((0, 2), np.uint32)])
def test_what_is_no_key_is_refused(rng_key):
    with pytest.raises(ValueError, match="`rng_key` must be a key, such as"):
        SubsampleAnnealedGibbs(mixture).init(rng_key, 1, None, (X,), {})


@pytest.mark.parametrize(
    "method, make",
    [
        ("sequential", row_moves),
        ("parallel", row_moves),
        ("vectorized", SubsampleAnnealedGibbs),
    ],
)
def test_no_tracer_leaks(method, make):
    with jax.checking_leaks():
        run(X, kernel=make(mixture), num_chains=2, chain_method=method)


# --- Running again, and going on ---


def test_collected_warmup_shows_the_anneal(warm):
    z = np.asarray(warm.get_samples()["z"])
    fields = warm.get_extra_fields()
    sizes = LinearSchedule().steps(N, NUM_WARMUP).added.cumsum()
    np.testing.assert_array_equal(fields["subsample_size"], sizes)
    np.testing.assert_array_equal((z >= 0).sum(1), sizes)
    assert sizes[0] < N == sizes[-1]
    for labels, order, size in zip(z, fields["order"], sizes, strict=True):
        np.testing.assert_array_equal(
            np.flatnonzero(labels >= 0), np.sort(order[:size])
        )
    np.testing.assert_array_equal(z, testing.canonical_labels(z))
    np.testing.assert_array_equal(fields["num_clusters"], z.max(1) + 1)
    np.testing.assert_array_equal(fields["i"], np.arange(1, NUM_WARMUP + 1))
    assert_log_joint(z, X, fields["log_joint"])


def test_run_after_warmup_never_anneals_again(warm):
    mcmc = copy.deepcopy(warm)
    for run_number in (1, 2):
        mcmc.run(random.key(run_number), X, extra_fields=("i",))
        fields = mcmc.get_extra_fields()
        np.testing.assert_array_equal(fields["subsample_size"], N)
        done = NUM_WARMUP + (run_number - 1) * NUM_SAMPLES
        np.testing.assert_array_equal(fields["i"], done + np.arange(1, NUM_SAMPLES + 1))
        assert_log_joint(mcmc.get_samples()["z"], X, fields["log_joint"])
        mcmc.post_warmup_state = mcmc.last_state


@pytest.mark.parametrize("num_warmup", [0, 1000])
def test_a_state_goes_on_in_an_mcmc_of_another_warmup(warm, num_warmup):
    fields = go_on(warm.post_warmup_state, num_warmup=num_warmup).get_extra_fields()
    np.testing.assert_array_equal(fields["subsample_size"], N)
    assert int(fields["i"][-1]) == NUM_WARMUP + NUM_SAMPLES


def test_a_state_from_the_middle_of_the_anneal_ends_it(warm):
    # One of four warm-up steps is made, three are left when sampling starts.
    kernel = row_moves()
    state = jax.jit(lambda s: kernel.sample(s, (X,), {}))(start(kernel, X))
    collected = {name: warm.get_samples()[name][0] for name in SITES}
    np.testing.assert_array_equal(state.z["z"], collected["z"])
    for name in SITES:  # by another program, so to rounding
        np.testing.assert_allclose(state.z[name], collected[name], rtol=1e-5)
    mcmc = go_on(state, num_warmup=0, key=state.rng_key)
    sizes = np.asarray(mcmc.get_extra_fields()["subsample_size"])
    warm_sizes = warm.get_extra_fields()["subsample_size"]
    np.testing.assert_array_equal(sizes[: NUM_WARMUP - 1], warm_sizes[1:])
    np.testing.assert_array_equal(sizes[NUM_WARMUP - 1 :], N)


@pytest.mark.parametrize("chain_method", ["sequential", "vectorized"])
def test_a_row_that_goes_back_is_read_once_with_the_same_result(
    chain_method, chains, monkeypatch
):
    # As rows of many features are, while the chain anneals and after.
    monkeypatch.setattr(rows, "_MANY", 0)
    found = run(X, num_chains=2, chain_method=chain_method).get_samples()
    expected = chains.get_samples()
    np.testing.assert_array_equal(found["z"], expected["z"])
    np.testing.assert_allclose(found["loc"], expected["loc"], rtol=1e-4)


def test_running_twice_with_the_same_key_repeats_the_draws(finished):
    mcmc = copy.deepcopy(finished)
    mcmc.run(random.key(0), X)
    assert_same(finished._states, mcmc._states)


def test_without_warmup_every_draw_holds_every_row():
    kernel = row_moves()
    state = start(kernel, X, num_warmup=0)
    assert int(state.subsample_size) == N
    assert state.z["z"].min() >= 0
    assert_log_joint([state.z["z"]], X, [state.log_joint])
    mcmc = run(X, num_warmup=0)
    np.testing.assert_array_equal(mcmc.get_extra_fields()["subsample_size"], N)
    assert_log_joint(mcmc.get_samples()["z"], X, mcmc.get_extra_fields()["log_joint"])


@pytest.mark.parametrize("schedule", [PriorGibbs(), SequentialGibbs()])
def test_every_schedule_ends_with_all_rows(schedule):
    kernel = SubsampleAnnealedGibbs(mixture, schedule, split_merge=None)
    state = start(kernel, X)
    assert int(state.subsample_size) == (N if schedule.starts_full else 0)
    state = jax.jit(lambda s: kernel.sample(s, (X,), {}))(state)
    assert int(state.subsample_size) == N
    assert_log_joint([state.z["z"]], X, [state.log_joint])


@pytest.fixture(scope="module")
def unusual():
    """An old key, thinning, and fields added and excluded."""
    fields = ("~z.z", "~z.sd", "i", "order", "z.z")
    return run(
        X, key=random.PRNGKey(0), thinning=2, run_kwargs={"extra_fields": fields}
    )


def test_extra_fields_add_and_exclude(unusual):
    assert set(unusual.get_samples()) == {"var", "loc"}
    extra = unusual.get_extra_fields()
    assert set(extra) == FIELDS | {"i", "order", "z.z"}
    assert extra["order"].shape == extra["z.z"].shape == (NUM_SAMPLES // 2, N)


def test_thinning_keeps_the_last_of_every_two_draws(unusual):
    steps = NUM_WARMUP + np.arange(2, NUM_SAMPLES + 1, 2)
    np.testing.assert_array_equal(unusual.get_extra_fields()["i"], steps)


def test_old_keys_give_the_draws_of_typed_keys(finished, unusual):
    for name in ("loc", "var"):
        every = finished.get_samples()[name][1::2]
        np.testing.assert_array_equal(every, unusual.get_samples()[name])


# --- Arguments ---


def test_a_second_run_uses_new_data_and_traces_nothing_again(monkeypatch):
    # (NumPyro compiles at every run without a progress bar, whatever the kernel. What
    # a run of other data does without `jit_model_args` is tested below.)
    traced = []
    run_step = rows.run_step

    def counting(*args, **kwargs):
        traced.append(args)
        return run_step(*args, **kwargs)

    monkeypatch.setattr(rows, "run_step", counting)
    mcmc = run(X, jit_model_args=True)
    assert_log_joint(mcmc.get_samples()["z"], X, mcmc.get_extra_fields()["log_joint"])
    first = len(traced)
    assert first > 0
    new = blobs(seed=1) + 100
    mcmc.run(random.key(0), new)
    z, fields = mcmc.get_samples()["z"], mcmc.get_extra_fields()
    assert_log_joint(z, new, fields["log_joint"])
    assert mcmc.get_samples()["loc"][0, 0, 0] > 50
    assert len(traced) == first


def or_none(x, other):
    assert other is None
    mixture(x)


def rows_of(columns, other=None):
    assert other is None
    mixture(jnp.stack([columns["a"], columns["b"]], 1))


def test_keyword_arguments_only(finished):
    mcmc = run(run_kwargs={"x": X, "num_clusters": CAPACITY})
    assert_same(finished.get_samples(), mcmc.get_samples())


@pytest.mark.parametrize(
    "any_chains", ["sequential", "parallel", "vectorized"], indirect=True
)
def test_none_is_an_argument_like_others(any_chains):
    # With the same moves: what is the same program is compiled once.
    method = any_chains.chain_method
    moves = row_moves if method == "sequential" else SubsampleAnnealedGibbs
    with_none = run(X, None, kernel=moves(or_none), num_chains=2, chain_method=method)
    assert_same(any_chains.get_samples(), with_none.get_samples())


def test_dict_of_columns_and_none_as_arguments_of_the_program():
    columns = {"a": X[:, 0], "b": X[:, 1]}
    mcmc = run(
        columns,
        None,
        model=rows_of,
        num_chains=2,
        chain_method="vectorized",
        jit_model_args=True,
    )
    samples = mcmc.get_samples(group_by_chain=True)
    assert samples["z"].shape == (2, NUM_SAMPLES, N)
    fields = mcmc.get_extra_fields(group_by_chain=True)
    assert_log_joint(samples["z"][1], X, fields["log_joint"][1])


def test_new_data_after_a_warmup_are_used_and_checked(warm):
    mcmc = copy.deepcopy(warm)
    new = blobs(seed=1)
    mcmc.run(random.key(1), new)
    fields = mcmc.get_extra_fields()
    assert_log_joint(mcmc.get_samples()["z"], new, fields["log_joint"])
    new[3, 1] = np.nan
    with pytest.raises(NotRecognised, match="Column 1.*'x'.*nan.*row 3"):
        mcmc.run(random.key(1), new.copy())
    # (Here NumPyro would first replay the model, for its deterministic site.)
    with pytest.raises(ValueError, match="12 rows.*11"):
        warm.sampler.sample(warm.last_state, (X[:11],), {})


# --- Initial partitions ---


class Recording(SubsampleAnnealedGibbs):
    """Keeps the initial states."""

    def init(self, *args, **kwargs):
        state = super().init(*args, **kwargs)
        self.states = [*getattr(self, "states", []), state]
        return state


GAPPED = np.array([3, 3, 1, 3, 1, 1, 3, 3, 3, 1, 1, 1])


@pytest.mark.parametrize("dtype", [np.int64, np.uint8])
def test_a_chain_starts_from_the_given_partition(dtype):
    kernel = Recording(mixture, split_merge=None)
    run(
        X,
        kernel=kernel,
        num_warmup=0,
        run_kwargs={"init_params": {"z": GAPPED.astype(dtype)}},
    )
    (state,) = kernel.states
    np.testing.assert_array_equal(state.z["z"], testing.canonical_labels(GAPPED))
    assert state.z["z"].dtype == jnp.int32
    assert int(state.subsample_size) == N
    assert int(state.num_clusters) == 2
    assert int(state.capacity_reached) == 0
    assert_log_joint([state.z["z"]], X, [state.log_joint])


def test_every_chain_starts_from_its_own_partition():
    z = np.stack([GAPPED, np.arange(N) % 3])
    kernel = Recording(mixture, split_merge=None)
    run(
        X,
        kernel=kernel,
        num_warmup=0,
        num_chains=2,
        chain_method="sequential",
        run_kwargs={"init_params": {"z": z}},
    )
    keys = random.split(random.key(0), 2)
    vectorized = start(kernel, X, key=keys, num_warmup=0, init_params={"z": z})
    in_turn = np.stack([s.z["z"] for s in kernel.states[:2]])
    np.testing.assert_array_equal(in_turn, testing.canonical_labels(z))
    assert_same(vectorized.z["z"], jnp.asarray(in_turn))


def test_an_initial_partition_may_leave_rows_out_of_the_anneal():
    z = np.where(np.arange(N) < 5, GAPPED, -1)
    kernel = row_moves()
    state = start(kernel, X, init_params={"z": z})
    assert int(state.subsample_size) == 5
    np.testing.assert_array_equal(state.z["z"], testing.canonical_labels(z))
    assert_log_joint([state.z["z"]], X, [state.log_joint])
    step = jax.jit(lambda s: kernel.sample(s, (X,), {}))
    sizes = []
    for _ in range(NUM_WARMUP + 1):
        state = step(state)
        sizes.append(int(state.subsample_size))
    assert sizes == sorted(sizes) and max(sizes) == sizes[NUM_WARMUP - 1] == N


def test_all_rows_alone_can_be_given_if_there_is_room():
    kernel = SubsampleAnnealedGibbs(mixture)
    z = np.arange(N)
    state = start(kernel, X, N, num_warmup=0, init_params={"z": z})
    np.testing.assert_array_equal(state.z["z"], z)
    with pytest.raises(ValueError, match=rf"'z'.*label {CAPACITY};.*capacity"):
        start(kernel, X, num_warmup=0, init_params={"z": z})


def with_label(label):
    return np.where(np.arange(N) == 7, label, 0)


@pytest.mark.parametrize(
    "init_params, num_warmup, words",
    [
        ({"z": with_label(CAPACITY)}, 4, ["'z'", "label 4", "-1..3"]),
        ({"z": with_label(-2)}, 4, ["'z'", "label -2", "-1..3"]),
        ({"z": with_label(2**32 + 1)}, 4, ["'z'", "label 4294967297"]),
        ({"z": with_label(-1)}, 0, ["'z'", "label -1", "0..3"]),
        ({"z": GAPPED[:-1]}, 0, ["'z'", "(11,)", "12"]),
        ({"z": np.stack([GAPPED] * 3)}, 0, ["'z'", "(3, 12)"]),
        ({"z": jnp.int32(1)}, 0, ["'z'", "()"]),
        ({"z": GAPPED.astype(np.float32)}, 0, ["'z'", "float32", "integer"]),
        ({"z": GAPPED > 1}, 0, ["'z'", "bool", "integer"]),
        ({"z": GAPPED.tolist()}, 0, ["'z'", "array"]),
        ({"y": GAPPED}, 0, ["'z'", "init_params"]),
        ({"z": GAPPED, "mu": np.zeros(3)}, 0, ["'mu'", "latent", "'z'"]),
        ({"loc": np.zeros(CAPACITY)}, 0, ["'loc'", "integrated out", "'z'"]),
        ({}, 0, ["'z'", "init_params"]),
        (GAPPED, 0, ["'z'", "init_params"]),
    ],
    ids=lambda value: str(value)[:20] if isinstance(value, list) else "",
)
def test_a_wrong_initial_partition_is_refused(init_params, num_warmup, words):
    kernel = SubsampleAnnealedGibbs(mixture)
    with pytest.raises(ValueError) as error:
        start(kernel, X, num_warmup=num_warmup, init_params=init_params)
    for word in words:
        assert word in str(error.value)


def test_a_wrong_initial_partition_of_two_chains_is_refused():
    kernel = SubsampleAnnealedGibbs(mixture)
    keys = random.split(random.key(0), 2)
    for z in (GAPPED, np.stack([GAPPED] * 3)):
        with pytest.raises(ValueError, match="'z'.*shape"):
            start(kernel, X, key=keys, num_warmup=0, init_params={"z": z})
    with pytest.raises(ValueError, match="label 9"):
        z = np.stack([GAPPED, with_label(9)])
        start(kernel, X, key=keys, num_warmup=0, init_params={"z": z})


# --- Pickling ---


def through_pickle(x):
    return pickle.loads(pickle.dumps(x))


@pytest.mark.parametrize("duplicate", [through_pickle, copy.deepcopy])
def test_kernel_and_unrun_mcmc_pickle(finished, duplicate):
    kernel = duplicate(SubsampleAnnealedGibbs(mixture, LinearSchedule(4)))
    assert kernel.model is mixture
    assert kernel.schedule == LinearSchedule(4)
    mcmc = MCMC(
        row_moves(),
        num_warmup=NUM_WARMUP,
        num_samples=NUM_SAMPLES,
        progress_bar=False,
    )
    mcmc = duplicate(mcmc)
    mcmc.run(random.key(0), X)
    assert_same(finished._states, mcmc._states)


@pytest.mark.parametrize("duplicate", [through_pickle, copy.deepcopy])
def test_finished_mcmc_pickles_and_runs_on(chains, duplicate):
    mcmc = duplicate(chains)
    assert_same(chains._states, mcmc._states)
    assert_same(chains.last_state, mcmc.last_state)
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(random.key(1), X, extra_fields=("i",))
    np.testing.assert_array_equal(mcmc.get_extra_fields()["subsample_size"], N)


def test_kernel_used_before_pickles(finished):
    kernel = pickle.loads(pickle.dumps(finished.sampler))
    assert_same(finished._states, run(X, kernel=kernel)._states)


# --- Progress bar ---


def test_diagnostics_show_phase_rows_clusters_and_capacity(warm, finished):
    kernel = SubsampleAnnealedGibbs(mixture)
    state = start(kernel, X)
    text = kernel.get_diagnostics_str(state)
    assert "annealing" in text and f"0/{N} rows" in text and "0 clusters" in text
    for mcmc in (warm, finished):
        state = mcmc.last_state._replace(capacity_reached=jnp.int32(0))
        text = kernel.get_diagnostics_str(state)
        assert "sampling" in text and f"{N}/{N} rows" in text
        assert f"{int(state.num_clusters)} clusters" in text
    assert "capacity" not in text


def test_the_capacity_is_shown_and_warned_of_once(finished):
    kernel = SubsampleAnnealedGibbs(mixture)
    start(kernel, X)
    state = finished.last_state._replace(capacity_reached=jnp.int32(3))
    with pytest.warns(UserWarning, match=f"{CAPACITY} clusters.*larger") as caught:
        texts = [kernel.get_diagnostics_str(state) for _ in range(3)]
    assert len(caught) == 1
    for text in texts:
        assert "capacity reached in 3 moves" in text


@pytest.fixture(scope="module")
def too_small():
    """Five rows far apart and two clusters, without a progress bar."""
    return run(100 * jnp.arange(5.0)[:, None], 2)


@pytest.mark.filterwarnings("ignore:\\s*ArviZ is undergoing:FutureWarning")
@pytest.mark.parametrize("read", [Posterior.from_mcmc, to_arviz])
def test_the_capacity_is_warned_of_where_draws_are_read(too_small, read, monkeypatch):
    mcmc = too_small
    monkeypatch.setattr(mcmc.sampler, "_warned", False)  # as when its run has ended
    assert int(mcmc.last_state.capacity_reached) > 0
    with pytest.warns(UserWarning, match="All 2 clusters.*larger"):
        read(mcmc)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        Posterior.from_mcmc(mcmc)


@pytest.mark.parametrize("jit_model_args", [False, True])
def test_a_second_run_does_not_compile_the_moves_again(
    caplog, monkeypatch, jit_model_args
):
    # With NumPyro's default, a progress bar; without one NumPyro makes them anew.
    for name in ("CI", "PYTEST_XDIST_WORKER"):  # there NumPyro shows none
        monkeypatch.delenv(name, raising=False)

    def compiled():
        found = [r for r in caplog.records if "Compiling jit(_body_fn)" in r.message]
        caplog.clear()
        return len(found)

    kernel = row_moves()
    mcmc = MCMC(kernel, num_warmup=2, num_samples=3, jit_model_args=jit_model_args)
    with jax.log_compiles():
        mcmc.run(random.key(0), X)
        assert compiled() == 1
        # As arguments, other data of the same shape too.
        mcmc.run(random.key(1), X + 1 if jit_model_args else X)
        assert compiled() == 0


def test_progress_bar_shows_them_and_does_not_change_the_draws(
    finished, monkeypatch, capsys
):
    for name in ("CI", "PYTEST_XDIST_WORKER"):  # there NumPyro shows none
        monkeypatch.delenv(name, raising=False)
    mcmc = run(X, progress_bar=True)
    shown = capsys.readouterr().err
    assert "warmup" in shown and "annealing" in shown
    assert re.search(rf"sampling, {N}/{N} rows, \d clusters", shown)
    assert_same(finished.get_samples()["z"], mcmc.get_samples()["z"])


# --- What users do next ---


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_arviz_converts_with_defaults(any_chains):
    az = pytest.importorskip("arviz")
    idata = az.from_numpyro(any_chains)
    assert set(idata.posterior.data_vars) == SITES | {"sd"}
    assert idata.posterior["z"].shape == (2, NUM_SAMPLES, N)
    assert idata.posterior["loc"].shape == (2, NUM_SAMPLES, CAPACITY, X.shape[1])
    assert FIELDS <= set(idata.sample_stats.data_vars)
    assert idata.sample_stats["log_joint"].shape == (2, NUM_SAMPLES)
    np.testing.assert_array_equal(idata.observed_data["x"], X)


# NumPyro's own divisions, where a label never changes.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_summary_prints_the_latent_sites(chains, capsys):
    chains.print_summary()
    shown = capsys.readouterr().out
    assert "loc[0,0]" in shown and "z[0]" in shown and "sd[" not in shown
    chains.print_summary(exclude_deterministic=False)
    assert "sd[0,0]" in capsys.readouterr().out


def test_predictive_draws_from_prior_and_posterior_of_the_same_model(finished):
    prior = Predictive(mixture, num_samples=3)(random.key(0), X, observed=False)
    assert prior["z"].shape == (3, N) and prior["x"].shape == (3, *X.shape)
    samples = finished.get_samples()
    posterior = Predictive(mixture, samples)(random.key(0), X, observed=False)
    assert posterior["x"].shape == (NUM_SAMPLES, *X.shape)
    # 48 means of six draws around -5 or 5 with a standard deviation near 0.6: one with
    # the wrong sign less than once in 10^10 runs.
    np.testing.assert_array_equal(np.sign(posterior["x"].mean(0)), np.sign(X))


def test_model_and_schedule_are_checked():
    assert SubsampleAnnealedGibbs(mixture).model is mixture
    with pytest.raises(ValueError, match="`model` must be a callable"):
        SubsampleAnnealedGibbs("mixture")
    with pytest.raises(ValueError, match="`schedule` must be an instance"):
        SubsampleAnnealedGibbs(mixture, LinearSchedule)


# --- Sizes ---


# A capacity of 17 is compiled at two widths.
@pytest.mark.parametrize(
    "num_rows, num_features, capacity", [(1, 1, 4), (2, 2, 17), (5, 2, 1)]
)
def test_few_rows_and_any_capacity(num_rows, num_features, capacity):
    x = X[:num_rows, :num_features]
    mcmc = run(x, capacity, kernel=SubsampleAnnealedGibbs(mixture))
    z, fields = mcmc.get_samples()["z"], mcmc.get_extra_fields()
    assert z.shape == (NUM_SAMPLES, num_rows)
    assert mcmc.get_samples()["loc"].shape == (NUM_SAMPLES, capacity, num_features)
    assert z.min() >= 0 and z.max() < capacity
    assert_log_joint(z, x, fields["log_joint"])
    for name, value in mcmc.get_samples().items():
        assert np.isfinite(value).all(), name
    reached = fields["capacity_reached"]
    if capacity > num_rows:
        np.testing.assert_array_equal(reached, 0)
    else:
        # One cluster: in no move of a sweep could a row have opened another, and no
        # proposal have split it.
        assert (np.diff(reached) >= num_rows).all()


# --- A fresh process ---


FRESH = """
import hashlib, sys
import jax
import numpyro_subanneal
print("live", len(jax.live_arrays()))
import numpy as np
from test_kernel import X, run
samples = run(X).get_samples()
for name in sorted(samples):
    value = np.ascontiguousarray(samples[name])
    print("hash", name, hashlib.sha256(value).hexdigest())
"""


@pytest.fixture(scope="module")
def fresh_process():
    here = os.path.dirname(__file__)
    path = os.pathsep.join([os.path.dirname(here), here])
    # As the marker does here.
    quickly = [f"--{name}={value}" for name, value in quick_options().items()]
    flags = " ".join([os.environ["XLA_FLAGS"], *quickly])
    done = subprocess.run(
        [sys.executable, "-c", FRESH],
        env={**os.environ, "PYTHONPATH": path, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def test_nothing_is_computed_at_import(fresh_process):
    assert ["live", "0"] in fresh_process


def test_draws_are_bitwise_the_same_in_a_fresh_process(finished, fresh_process):
    hashes = {line[1]: line[2] for line in fresh_process if line[0] == "hash"}
    for name, value in finished.get_samples().items():
        value = np.ascontiguousarray(value)
        assert hashes[name] == hashlib.sha256(value).hexdigest(), name


def test_data_that_the_model_closes_over_are_in_a_program_once():
    x = np.random.default_rng(0).normal(size=(10_007, 2)).astype(np.float32)
    kernel = SubsampleAnnealedGibbs(partial(mixture, x))
    state = start(kernel)
    step = jax.jit(lambda state: kernel.sample(state, (), {}))
    program = step.lower(state).compile().as_text()
    found = re.findall(r"f32\[10007,2\]\S* constant\(", program)
    assert len(found) == 1
    (program,) = kernel._init_programs.values()
    arrays = jax.tree.leaves(program.args)
    assert [a.shape for a in arrays] == [x.shape]
