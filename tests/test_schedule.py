# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""
The law of each schedule, and what the kernel makes of it.

Everything here is exact; which rows are in is a matter of `test_subsample.py`.
"""

from fractions import Fraction
from math import ceil
import pickle

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro
import numpyro.distributions as dist

from numpyro_subanneal import (
    AbstractSchedule,
    AcceleratingSchedule,
    ChineseRestaurantProcess,
    LinearSchedule,
    PriorGibbs,
    SequentialGibbs,
    SplitMerge,
    SubsampleAnnealedGibbs,
)
from numpyro_subanneal.schedule import Steps

pytestmark = pytest.mark.quickly_compiled

SIZES = [(1, 1), (1, 5), (5, 1), (6, 4), (7, 7), (10, 3), (3, 10), (1000, 33)]
SIZES += [(10**9, 7), (2**31 - 1, 1000)]
by_size = pytest.mark.parametrize("num_rows, num_warmup", SIZES)
SCHEDULES = [
    LinearSchedule(churn=0),
    LinearSchedule(2),
    LinearSchedule(2, ramp=3),
    AcceleratingSchedule(3),
    AcceleratingSchedule(0, small_size=2),
    SequentialGibbs(),
    PriorGibbs(),
]


@by_size
@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_all_rows_are_in_at_the_end_and_the_first_step_adds(
    schedule, num_rows, num_warmup
):
    added, churned = steps = schedule.steps(num_rows, num_warmup)
    assert isinstance(steps, Steps)
    assert added.shape == churned.shape == (num_warmup,)
    assert (added >= 0).all() and (churned >= 0).all()
    assert added.sum() == (0 if schedule.starts_full else num_rows)
    assert schedule.starts_full or added[0] > 0


@by_size
@pytest.mark.parametrize("churn", [0, 1, 3])
def test_linear_schedule_grows_linearly(num_rows, num_warmup, churn):
    # After t of T steps there are ceil(t N / T) rows: the paper's linear growth. Each
    # row added is followed by `churn` churns.
    added, churned = LinearSchedule(churn).steps(num_rows, num_warmup)
    t = [(i + 1) * num_rows for i in range(num_warmup)]
    np.testing.assert_array_equal(added.cumsum(), [-(-x // num_warmup) for x in t])
    np.testing.assert_array_equal(churned, churn * added)


@pytest.mark.parametrize("num_rows, num_warmup", [(5, 1), (6, 4), (100, 7)])
def test_linear_schedule_churns_as_many_rows_as_there_are_steps(num_rows, num_warmup):
    default = LinearSchedule().steps(num_rows, num_warmup)
    explicit = LinearSchedule(churn=num_warmup).steps(num_rows, num_warmup)
    np.testing.assert_array_equal(default, explicit)
    # So a step costs about a sweep, however many there are.
    moves = (default.added + default.churned).sum()
    assert moves == num_rows * (num_warmup + 1)


@pytest.mark.parametrize("num_rows, num_warmup", [(1, 1), (30, 4), (100, 150)])
@pytest.mark.parametrize("ramp", [1, 2, 30, 1000])
def test_a_ramp_churns_in_proportion_to_the_rows_in(ramp, num_rows, num_warmup):
    churn = 6
    steep = LinearSchedule(churn, ramp=ramp).checked_steps(num_rows, num_warmup)
    plain = LinearSchedule(churn).steps(num_rows, num_warmup)
    np.testing.assert_array_equal(steep.added, plain.added)
    # One row at a time, summed; rounded up.
    each = [Fraction(churn * min(n, ramp), ramp) for n in range(1, num_rows + 1)]
    total = [ceil(sum(each[:size])) for size in steep.added.cumsum()]
    np.testing.assert_array_equal(steep.churned.cumsum(), total)


@pytest.mark.parametrize("num_warmup", [1, 7, 100])
def test_accelerating_schedule_is_linear_while_small(num_warmup):
    # No row is beyond `small_size`: as many moves as the linear schedule.
    fast = AcceleratingSchedule(4, small_size=500).checked_steps(500, num_warmup)
    slow = LinearSchedule(4).checked_steps(500, num_warmup)
    np.testing.assert_array_equal(fast, slow)


def test_accelerating_schedule_churns_as_the_root_of_the_size():
    num_rows, small, churn = 10**7, 1000, 20
    added, churned = AcceleratingSchedule(churn, small).steps(num_rows, 1000)
    size = np.cumsum(added)
    # One row at a time, summed: the law of the docstring.
    each = churn * np.minimum(1, np.sqrt(small / np.arange(1, num_rows + 1)))
    expected = np.cumsum(each)[size - 1]
    np.testing.assert_allclose(np.cumsum(churned), expected, rtol=2e-3)
    np.testing.assert_allclose(
        churned.sum(), 2 * churn * np.sqrt(small * num_rows), rtol=1e-2
    )
    # Steps of equal length.
    moves = added + churned
    np.testing.assert_allclose(moves, moves.mean(), rtol=1e-2)


@pytest.mark.parametrize(
    "schedule",
    [
        LinearSchedule(),
        LinearSchedule(3),
        LinearSchedule(ramp=100),
        AcceleratingSchedule(),
        SequentialGibbs(),
        PriorGibbs(),
    ],
    ids=repr,
)
@pytest.mark.parametrize("num_rows", [1, 3, 50, 2000])
@pytest.mark.parametrize("at_least", [1, 256])
def test_turns_are_counted(schedule, num_rows, at_least):
    steps = schedule.checked_steps(num_rows, 12)
    size = first_size = num_rows if schedule.starts_full else 0
    turns = since = 0
    for added, churned in zip(*steps, strict=True):
        # As `Churn` says.
        credit = churned
        for _ in range(added + churned):
            credit += added
            if added and credit >= added + churned:
                size, credit = size + 1, credit - added - churned
            since += 1
            if since >= max(size, min(at_least, num_rows)):
                turns, since = turns + 1, 0
    counted = steps.num_turns(first_size, at_least)
    assert abs(counted - turns) <= 1 + 0.03 * turns, (counted, turns)


@pytest.mark.parametrize("schedule", [LinearSchedule, AcceleratingSchedule])
@pytest.mark.parametrize("churn", [-1, 1.0, True, "3", 2**31, 10**30])
def test_churn_that_is_no_number_of_moves_is_refused(schedule, churn):
    with pytest.raises(ValueError, match="`churn` must be a nonnegative integer"):
        schedule(churn)


@pytest.mark.parametrize("ramp", [-1, 1.0, True, None])
def test_ramp_must_not_be_negative(ramp):
    with pytest.raises(ValueError, match="`ramp` must be a nonnegative integer"):
        LinearSchedule(ramp=ramp)


@pytest.mark.parametrize("size", [0, -1, 1.0, True, None])
def test_small_size_must_be_positive(size):
    with pytest.raises(ValueError, match="`small_size` must be a positive integer"):
        AcceleratingSchedule(small_size=size)


@pytest.mark.parametrize("num_rows, num_warmup", [(5, 1), (6, 4)])
def test_sequential_gibbs_adds_all_rows_first_then_sweeps(num_rows, num_warmup):
    added, churned = SequentialGibbs().checked_steps(num_rows, num_warmup)
    np.testing.assert_array_equal(added, [num_rows] + [0] * (num_warmup - 1))
    np.testing.assert_array_equal(churned, [0] + [num_rows] * (num_warmup - 1))
    assert not SequentialGibbs.starts_full


@pytest.mark.parametrize("num_rows, num_warmup", [(5, 1), (6, 4)])
def test_prior_gibbs_starts_full_and_sweeps(num_rows, num_warmup):
    added, churned = PriorGibbs().checked_steps(num_rows, num_warmup)
    np.testing.assert_array_equal(added, np.zeros(num_warmup))
    np.testing.assert_array_equal(churned, np.full(num_warmup, num_rows))
    assert PriorGibbs.starts_full


@pytest.mark.parametrize(
    "schedule", [*SCHEDULES, LinearSchedule(), AcceleratingSchedule()], ids=repr
)
def test_schedules_are_values(schedule):
    again = pickle.loads(pickle.dumps(schedule))
    assert again == schedule and hash(again) == hash(schedule)
    with pytest.raises(AttributeError):
        schedule.churn = 3


def test_no_warmup_needs_no_steps():
    for schedule in SCHEDULES:
        added, churned = schedule.checked_steps(5, 0)
        assert added.shape == churned.shape == (0,)
        assert added.dtype == churned.dtype == np.int32


def test_abstract_schedule_cannot_be_made():
    with pytest.raises(TypeError, match="steps"):
        AbstractSchedule()


# --- Checks -------------------------------------------------------------------


class Given(AbstractSchedule):
    """Whatever it is given."""

    def __init__(self, added, churned):
        self.given = added, churned

    def steps(self, num_rows, num_warmup):
        return self.given


class GivenFull(Given):
    starts_full = True


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, np.uint64])
def test_checked_steps_are_int32_of_any_integers(dtype):
    added, churned = np.array([2, 0, 3], dtype), np.array([0, 4, 1], dtype)
    steps = Given(added, churned).checked_steps(5, 3)
    assert steps.added.dtype == steps.churned.dtype == np.int32
    np.testing.assert_array_equal(steps, [added, churned])
    lists = Given([2, 0, 3], [0, 4, 1]).checked_steps(5, 3)
    np.testing.assert_array_equal(lists, steps)


@pytest.mark.parametrize(
    "added, churned, message",
    [
        ([5, 0], [0, 0, 0], r"`added` with shape \(2,\) and dtype int64"),
        (5, [0, 0, 0], r"`added` with shape \(\)"),
        ([5, 0, 0], [[0, 0, 0]], r"`churned` with shape \(1, 3\)"),
        ([5.0, 0.0, 0.0], [0, 0, 0], "`added` with shape .* dtype float64"),
        ([5, 0, 0], [True, True, False], "`churned` with shape .* dtype bool"),
        ([6, -1, 0], [0, 0, 0], r"added\[1\] = -1; numbers of rows must not be"),
        ([5, 0, 0], [0, 0, -2], r"churned\[2\] = -2"),
        ([5, 1, 0], [0, 0, 0], "adds 6 rows in all, but must add 5"),
        ([2, 1, 1], [0, 0, 0], "adds 4 rows in all, but must add 5"),
        ([0, 5, 0], [2, 0, 0], "churns 2 rows in step 0, before any row was added"),
        ([0, 0, 5], [0, 3, 0], "churns 3 rows in step 1, before any"),
        ([5, 0, 0], [0, 2**30 + 1, 0], "makes 1073741825 moves in one warm-up step"),
        ([5, 0, 0], [2**30 - 4, 0, 0], "makes 1073741825 moves"),
        ([5, 0, 0], [2**31, 0, 0], "makes 2147483653 moves"),
    ],
)
def test_checked_steps_names_the_law_that_is_broken(added, churned, message):
    with pytest.raises(ValueError, match=f"^Given.steps.*{message}"):
        Given(added, churned).checked_steps(num_rows=5, num_warmup=3)


@pytest.mark.parametrize("steps", [None, 3, ([3, 0, 0],)])
def test_checked_steps_wants_two_arrays(steps):
    class Bad(AbstractSchedule):
        def steps(self, num_rows, num_warmup):
            return steps

    with pytest.raises(ValueError, match=r"Bad.steps returned .* `Steps\(added, chur"):
        Bad().checked_steps(num_rows=3, num_warmup=3)


def test_checked_steps_of_a_schedule_that_starts_full():
    GivenFull([0, 0], [5, 5]).checked_steps(5, 2)
    with pytest.raises(ValueError, match="GivenFull.steps adds 5 rows .* must add 0"):
        GivenFull([5, 0], [0, 5]).checked_steps(5, 2)


def test_most_moves_in_a_step_are_allowed():
    steps = Given([5, 0], [2**30 - 5, 2**30]).checked_steps(5, 2)
    np.testing.assert_array_equal(steps.churned, [2**30 - 5, 2**30])

    assert LinearSchedule(np.int64(3)) == LinearSchedule(3)


# --- In the kernel ------------------------------------------------------------

NUM_ROWS = 7


def model(x):
    z = numpyro.sample("z", ChineseRestaurantProcess(1.0, size=NUM_ROWS))
    with numpyro.plate("clusters", NUM_ROWS):
        probs = numpyro.sample("probs", dist.Dirichlet(jnp.ones(2)))
    with numpyro.plate("rows", NUM_ROWS):
        numpyro.sample("x", dist.Categorical(probs[z]), obs=x)


X = np.array([0, 1, 1, 0, 1, 0, 0])


class OneAtATime(AbstractSchedule):
    """Four rows, of which one a step is churned, two more, churned, and the last."""

    def steps(self, num_rows, num_warmup):
        added = np.zeros(num_warmup, int)
        added[[0, 13, 14, -1]] = 4, 1, 1, num_rows - 6
        churned = np.ones(num_warmup, int)
        churned[[0, 13, 14]] = 0
        return Steps(added, churned)


class RoundRobin(OneAtATime):
    def leaving(self, bits, order, size, move):
        return move


class Lowest(OneAtATime):
    """Of the rows that may, the one of the lowest number enters."""

    def entering(self, bits, order, size, vacant):
        place = jnp.arange(order.shape[0])
        may = (place >= size) | (place == vacant)
        return jnp.argmin(jnp.where(may, order, order.shape[0]))


class Uneven(AbstractSchedule):
    """Steps that only add, only churn, do both, or nothing."""

    def steps(self, num_rows, num_warmup):
        return Steps(np.array([3, 0, 2, 0, 2]), np.array([0, 5, 4, 0, 3]))


IN_KERNEL = [Uneven(), LinearSchedule(), SequentialGibbs(), PriorGibbs()]


@pytest.fixture(scope="module")
def step():
    """A kernel's step for states of any of these schedules: all five steps long."""
    kernel = SubsampleAnnealedGibbs(model)
    kernel.init(random.key(0), 5, None, (X,), {})
    return jax.jit(lambda state: kernel.sample(state, (X,), {}))


@pytest.mark.parametrize("schedule", IN_KERNEL, ids=lambda s: type(s).__name__)
def test_kernel_follows_its_schedule_and_then_sweeps(schedule, step):
    kernel = SubsampleAnnealedGibbs(model, schedule)
    assert kernel.schedule is schedule
    state = kernel.init(random.key(1), 5, None, (X,), {})
    added, churned = schedule.checked_steps(NUM_ROWS, 5)
    np.testing.assert_array_equal(state.added, added)
    np.testing.assert_array_equal(state.churned, churned)
    size = NUM_ROWS if schedule.starts_full else 0
    for i, more in enumerate([0, *added, 0, 0]):
        if i:
            state = step(state)
        size += more
        assert state.i == i
        assert state.subsample_size == size
        z, order = np.asarray(state.z["z"]), np.asarray(state.order)
        # Rows that are out read -1, and are the end of the order.
        assert sorted(order) == list(range(NUM_ROWS))
        assert (z[order[:size]] >= 0).all() and (z[order[size:]] == -1).all()
    assert size == NUM_ROWS


def test_kernel_names_a_schedule_that_is_none():
    for schedule in (LinearSchedule, "linear", 3):
        with pytest.raises(ValueError, match="`schedule` must be an instance"):
            SubsampleAnnealedGibbs(model, schedule)
    assert SubsampleAnnealedGibbs(model).schedule == LinearSchedule()


def test_kernel_checks_the_schedule_at_init():
    kernel = SubsampleAnnealedGibbs(model, Given([1, 1], [0, 0]))
    with pytest.raises(ValueError, match="adds 2 rows in all, but must add 7"):
        kernel.init(random.key(0), 2, None, (X,), {})


# --- Which rows ---------------------------------------------------------------


def rows_in(schedule, num_steps, split_merge=None):
    """Rows in after each step, by position."""
    kernel = SubsampleAnnealedGibbs(model, schedule, split_merge=split_merge)
    state = kernel.init(random.key(2), num_steps, None, (X,), {})
    step = jax.jit(lambda state: kernel.sample(state, (X,), {}))
    found = []
    for _ in range(num_steps):
        state = step(state)
        found.append(np.asarray(state.order[: state.subsample_size]).tolist())
    return found


@pytest.mark.parametrize("split_merge", [None, SplitMerge()])
def test_rows_leave_in_turn_over_all_steps(split_merge):
    # First in, first out, whether or not anything is done at turnovers. The additions
    # and the first churn, of the last row, complete the first turnover.
    found = rows_in(RoundRobin(), 16, split_merge)
    assert found[0][:3] == found[1][:3]
    found = found[1:]
    arrived = {row: place for place, row in enumerate(found[0])}
    for time, (before, after) in enumerate(zip(found, found[1:], strict=False)):
        if len(after) > len(before):
            break
        (out,) = set(before) - set(after) or {next(iter(arrived))}
        assert out == min(arrived, key=arrived.get)
        (new,) = set(after) - set(before) or {out}
        del arrived[out]
        arrived[new] = 10 + time
        # In its place.
        assert after == [new if row == out else row for row in before]
    assert time == 11


def test_rows_enter_by_choice_at_additions_and_churns():
    found = rows_in(Lowest(), 20)
    # A row that leaves returns, unless one of a lower number is out.
    assert found[:13] == [found[0]] * 13 and sorted(found[0]) == [0, 1, 2, 3]
    assert found[13] == [*found[0], 4] and found[14] == [*found[0], 4, 5]


def test_sweeps_are_the_same_whatever_chooses_rows():
    # Bit by bit: a chain that starts full, and its draws.
    kernels = [
        SubsampleAnnealedGibbs(model, s) for s in (OneAtATime(), RoundRobin(), Lowest())
    ]
    draws = []
    for kernel in kernels:
        state = kernel.init(random.key(3), 0, None, (X,), {})
        step = jax.jit(lambda state, kernel=kernel: kernel.sample(state, (X,), {}))
        labels = []
        for _ in range(5):
            state = step(state)
            labels.append(np.asarray(state.z["z"]))
        draws.append(labels)
    np.testing.assert_array_equal(draws[0], draws[1])
    np.testing.assert_array_equal(draws[0], draws[2])


def test_whether_rows_are_chosen_is_seen_of_the_class():
    assert not any(s.chooses_rows for s in SCHEDULES)
    assert RoundRobin().chooses_rows and Lowest().chooses_rows


@pytest.mark.parametrize(
    "method, position, message",
    [
        ("leaving", lambda size, other: size, "chose 1 where size = 1; .*0..size - 1"),
        ("leaving", lambda size, other: -1, "chose -1 where size = 1;"),
        ("leaving", lambda size, other: 0.0, r"shape \(\) and dtype float32"),
        ("leaving", lambda size, other: jnp.zeros(2, int), r"shape \(2,\) and dtype"),
        # Not wrong where one row is in.
        ("leaving", lambda size, other: 1 - (size == 1) * 2 + size, "size = 4;"),
        (
            "entering",
            lambda size, other: size,
            "chose 7 where size = 7 and vacant = .; .*`vacant`, or .*size..6",
        ),
        ("entering", lambda size, other: size - 1, "where size = 4 and vacant = [012]"),
        ("entering", lambda size, other: other > 0, "dtype bool; .* an integer"),
    ],
)
def test_positions_that_must_not_be_chosen_are_named(method, position, message):
    class Bad(LinearSchedule):
        pass

    def choose(self, bits, order, size, other):
        return jnp.asarray(position(size, other))

    setattr(Bad, method, choose)
    kernel = SubsampleAnnealedGibbs(model, Bad())
    with pytest.raises(ValueError, match=f"^Bad.{method} .*{message}"):
        kernel.init(random.key(0), 2, None, (X,), {})
