# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

r"""
Two urns: the paper's Figure 2, and the dynamics that its other examples share.

Balls come out of a left urn with known probability p, out of a right one with 1 - p.
Each urn has its own unknown share of reds, with a Beta(alpha, alpha) prior. We see the
colours of N balls (8,000 red and 12,000 blue in the paper, where 200 and 300 show the
same) and ask which urn each came from. With the shares integrated out and balls of one
colour alike, the state is the number of reds and of blues on the left, and its
posterior is known exactly (:func:`log_posterior`).

Every strategy makes 10 N steps; a step assigns one ball. Balls are removed and added at
random as in the paper's section 2.3, and assigned with probability proportional to
:math:`p (a + \alpha) / (n + 2 \alpha)` for the left urn, if it holds n balls, of which
a have the colour of the ball; likewise for the right.

- Sequential: N additions and nothing more (so it is the only one that is cheaper).
- Sequential+Gibbs: N additions, then 9 N Gibbs steps.
- Prior+Gibbs: a draw from the prior, then 10 N Gibbs steps.
- Anneal Energy: a draw from the prior, then 10 N Gibbs steps on all data, in which the
  likelihood (the fraction above) is raised to the power t / 10 N in step t: simulated
  annealing from the prior to the posterior.
- Anneal Stepsize: the paper has "block Gibbs sampling on a 1/beta-sized hand full of
  uniformly-colored balls at a time, moving them from one urn to another", such that it
  "behaves like subsample annealing in the continuum limit", and no more. This is our
  reading of it. In step t of T, beta = t / T. A uniformly random ball is
  picked, and with it :math:`h = \mathrm{round}(1 / \beta)` balls of its colour from its
  urn, or all of them if they are fewer. They are assigned together, to the left with
  log odds 1/h times those of the block, so that energy and space contract by the same
  factor: a subsample of beta N balls, each standing for 1/beta of them, would do the
  same in the limit. With h = 1 it is the Gibbs step. `--cold-blocks` leaves out the
  factor 1/h: block Gibbs on the posterior itself.
- Anneal Subsample: after each of N additions 9 balls are churned. This is the law of
  ``SubsampleAnnealedGibbs(model, LinearSchedule(churn=9))``, as tests check.

Printed is the total variation distance from the posterior, after smoothing: states are
counted in 50 x 50 cells of (share of the reds, share of the blues that is on the left),
the counts convolved with a Gaussian kernel of one cell's width, reflected at the edges;
the exact posterior likewise. The last row is the distance that as many perfect draws
show. The paper smoothed 10^6 samples, in a way it does not state.

    python examples/paper/two_urns.py                 # 500 balls, 10^5 chains of each
    python examples/paper/two_urns.py --paper-size    # 20,000 balls, 10^6 chains, hours
"""

import argparse
from functools import partial
import time

import drawing
import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
from scipy import ndimage, special, stats

NUM_CELLS = 50
SIZE = {"num_red": 200, "num_blue": 300, "num_chains": 10**5}
PAPER_SIZE = {"num_red": 8000, "num_blue": 12000, "num_chains": 10**6}
STRATEGIES = (
    "Sequential",
    "Sequential+Gibbs",
    "Prior+Gibbs",
    "Anneal Energy",
    "Anneal Stepsize",
    "Anneal Subsample",
)
# Chains that are simulated together; their counts stay in the processor's cache.
BLOCK = 4000

# --- Exact laws ---------------------------------------------------------------


def log_prior(num_red, num_blue, p):
    """Log probability of each state, ``[num_red + 1, num_blue + 1]``, before data."""
    red = stats.binom.logpmf(np.arange(num_red + 1), num_red, p)
    blue = stats.binom.logpmf(np.arange(num_blue + 1), num_blue, p)
    return red[:, None] + blue


def log_posterior(num_red, num_blue, p, alpha, num_features=1):
    """
    Exact log posterior ``[num_red + 1, num_blue + 1]`` of the reds and blues on the
    left. With several features, all agree with the colour, and each has shares of its
    own.
    """
    red = np.arange(num_red + 1)[:, None]
    blue = np.arange(num_blue + 1)
    left = special.betaln(red + alpha, blue + alpha)
    right = special.betaln(num_red - red + alpha, num_blue - blue + alpha)
    joint = log_prior(num_red, num_blue, p) + num_features * (left + right)
    return joint - special.logsumexp(joint)


# --- Dynamics of the counts ---------------------------------------------------

# Counts of each chain, float32 ``[chains]`` each: reds left, reds right, blues left,
# blues right.


def remove(u, counts):
    """A ball that is drawn by the uniform `u`: one at each of four, zero or one."""
    a, b, c, d = counts
    u = u * (a + b + c + d)
    first, second, third = u < a, u < a + b, u < a + b + c
    return first, second & ~first, third & ~second, ~third


def odds_left(same_left, same_right, left, right, p, alpha, power=None):
    """
    Of a ball, given how many of its colour, and in all, each urn holds. `power` is that
    of the likelihood.
    """
    likelihood = ((same_left + alpha) * (right + 2 * alpha)) / (
        (same_right + alpha) * (left + 2 * alpha)
    )
    if power is not None:
        likelihood = likelihood**power
    return p / (1 - p) * likelihood


def minus(counts, ball):
    return tuple(n - b for n, b in zip(counts, ball, strict=True))


def add(u, counts, share_red, p, alpha, power=None):
    """
    Assign a ball that is red with probability `share_red`. One uniform is enough for
    colour and urn.
    """
    a, b, c, d = counts
    red = u < share_red
    u = jnp.where(red, u, u - share_red) / jnp.where(red, share_red, 1 - share_red)
    same_left, same_right = jnp.where(red, a, c), jnp.where(red, b, d)
    odds = odds_left(same_left, same_right, a + c, b + d, p, alpha, power)
    left = u * (1 + odds) < odds
    return (
        a + (red & left),
        b + (red & ~left),
        c + (~red & left),
        d + (~red & ~left),
    )


def log_rising(x, h):
    r"""
    :math:`\log \Gamma(x + h) - \log \Gamma(x)` for h >= 1: exact at h = 1, elsewhere by
    Stirling's series at x + 1, arranged so that no large numbers are subtracted.
    """
    y, g = x + 1, h - 1
    series = (1 / (y + g) - 1 / y) / 12
    return jnp.log(x) + g * jnp.log(y + g) + (y - 0.5) * jnp.log1p(g / y) - g + series


def move_hand(u, counts, beta, p, alpha, cold_blocks):
    """A step of Anneal Stepsize."""
    hand = remove(u[0], counts)
    group = sum(n * b for n, b in zip(counts, hand, strict=True))
    h = jnp.minimum(jnp.round(1 / beta), group)
    a, b, c, d = minus(counts, (h * b for b in hand))
    red = hand[0] | hand[1]
    same_left, same_right = jnp.where(red, a, c), jnp.where(red, b, d)
    logits = (
        h * jnp.log(p / (1 - p))
        + log_rising(same_left + alpha, h)
        - log_rising(same_right + alpha, h)
        - log_rising(a + c + 2 * alpha, h)
        + log_rising(b + d + 2 * alpha, h)
    )
    if not cold_blocks:
        # A hand of fewer balls than wanted stands for as many.
        logits = logits / h
    left = u[1] < jax.nn.sigmoid(logits)
    return (
        a + h * (red & left),
        b + h * (red & ~left),
        c + h * (~red & left),
        d + h * (~red & ~left),
    )


def gibbs(u, counts, p, alpha, power=None):
    """A Gibbs step on all data: the ball that is removed is the one that is added."""
    ball = remove(u[0], counts)
    return add(u[1], minus(counts, ball), ball[0] | ball[1], p, alpha, power)


def churn(u, counts, num_red, num_blue, p, alpha):
    """A ball out, a ball in, maybe the same: at any size of the subsample."""
    counts = minus(counts, remove(u[0], counts))
    return enter(u[1], counts, num_red, num_blue, p, alpha)


def enter(u, counts, num_red, num_blue, p, alpha):
    """A ball that is not in comes in."""
    red_out = num_red - counts[0] - counts[1]
    blue_out = num_blue - counts[2] - counts[3]
    return add(u, counts, red_out / (red_out + blue_out), p, alpha, None)


def first_counts(rng_key, strategy, num_chains, num_red, num_blue, p):
    """None, or a draw from the prior."""
    if strategy in ("Sequential", "Sequential+Gibbs", "Anneal Subsample"):
        return (jnp.zeros(num_chains, jnp.float32),) * 4
    # NumPy's compiles nothing.
    rng = np.random.default_rng(np.asarray(random.key_data(rng_key)).tolist())
    red, blue = rng.binomial([[num_red], [num_blue]], p, (2, num_chains))
    counts = red, num_red - red, blue, num_blue - blue
    return tuple(jnp.asarray(n, jnp.float32) for n in counts)


@partial(jax.jit, static_argnames=("strategy", "cold_blocks"))
def simulate_block(
    rng_key, strategy, start, num_red, num_blue, p, alpha, sweeps, cold_blocks
):
    """
    Final counts of the chains that begin with `start`, the counts of each: reds left,
    blues left.
    """
    num_rows = num_red + num_blue
    num_chains = len(start[0])

    def uniforms(rng_key):
        rng_key, key = random.split(rng_key)
        return rng_key, random.uniform(key, (2, num_chains))

    def repeat(times, step, carry):
        """``counts = step(t, uniforms, counts)`` so many times."""

        def body(t, carry):
            rng_key, counts = carry
            rng_key, u = uniforms(rng_key)
            counts = tuple(n.astype(jnp.float32) for n in step(t, u, counts))
            return rng_key, counts

        return lax.fori_loop(0, times, body, carry)

    def grow(churns, carry):
        """Each ball added, and so many churned after it."""

        def body(_, carry):
            carry = repeat(
                1, lambda t, u, x: enter(u[1], x, num_red, num_blue, p, alpha), carry
            )
            return repeat(
                churns, lambda t, u, x: churn(u, x, num_red, num_blue, p, alpha), carry
            )

        return lax.fori_loop(0, num_rows, body, carry)

    start = rng_key, start
    total = num_rows * sweeps
    if strategy == "Sequential":
        _, counts = grow(0, start)
    elif strategy == "Sequential+Gibbs":
        more = num_rows * (sweeps - 1)
        _, counts = repeat(more, lambda t, *x: gibbs(*x, p, alpha), grow(0, start))
    elif strategy == "Prior+Gibbs":
        _, counts = repeat(total, lambda t, *x: gibbs(*x, p, alpha), start)
    elif strategy == "Anneal Energy":
        _, counts = repeat(
            total, lambda t, *x: gibbs(*x, p, alpha, (t + 1) / total), start
        )
    elif strategy == "Anneal Stepsize":
        _, counts = repeat(
            total,
            lambda t, *x: move_hand(*x, (t + 1) / total, p, alpha, cold_blocks),
            start,
        )
    else:
        _, counts = grow(sweeps - 1, start)
    return jnp.stack([counts[0], counts[2]], -1).astype(jnp.int32)


def simulate(
    rng_key,
    strategy,
    num_chains,
    num_red,
    num_blue,
    p=0.45,
    alpha=0.5,
    sweeps=10,
    cold_blocks=False,
):
    """
    Draws of the last state of chains of a strategy.

    :param str strategy: one of :data:`STRATEGIES`.
    :param int sweeps: steps for each ball.
    :return: reds and blues on the left, ``[num_chains, 2]``.
    """
    draws = []
    for i in range(-(-num_chains // BLOCK)):
        key, key_start = random.split(random.fold_in(rng_key, i))
        size = min(BLOCK, num_chains - i * BLOCK)
        draws.append(
            simulate_block(
                key,
                strategy,
                first_counts(key_start, strategy, size, num_red, num_blue, p),
                num_red,
                num_blue,
                p,
                alpha,
                sweeps,
                cold_blocks,
            )
        )
    return np.concatenate(draws)


# --- Distances ----------------------------------------------------------------


def cells(weights, states, num_red, num_blue, num_cells=NUM_CELLS):
    """Total weight in each cell, ``[num_cells, num_cells]``, not smoothed."""
    shares = states / np.array([num_red, num_blue])
    index = np.minimum((shares * num_cells).astype(int), num_cells - 1)
    flat = index @ np.array([num_cells, 1])
    return np.bincount(flat, weights, num_cells**2).reshape(num_cells, num_cells)


def exact_cells(log_probs, num_cells=NUM_CELLS):
    """The same of a law on all states."""
    num_red, num_blue = np.array(log_probs.shape) - 1
    found = np.exp(log_probs)
    for axis, size in enumerate((num_red, num_blue)):
        share = np.arange(size + 1) / size
        index = np.minimum((share * num_cells).astype(int), num_cells - 1)
        onto = np.zeros((num_cells, size + 1))
        onto[index, np.arange(size + 1)] = 1
        found = onto @ found if axis == 0 else found @ onto.T
    return found


def smooth(found):
    return ndimage.gaussian_filter(found, 1.0, mode="reflect")


def total_variation(a, b):
    return 0.5 * np.abs(a - b).sum()


def compare(rng_key, num_chains, num_red, num_blue, *, report=print, **options):
    """
    Simulate all strategies.

    :return: dict of the total variation distances, and dict of the smoothed laws.
    """
    p, alpha = options.get("p", 0.45), options.get("alpha", 0.5)
    posterior = exact_cells(log_posterior(num_red, num_blue, p, alpha))
    laws = {
        "Prior": smooth(exact_cells(log_prior(num_red, num_blue, p))),
        "Posterior": smooth(posterior),
    }
    distances = {}
    for i, strategy in enumerate(STRATEGIES):
        begin = time.perf_counter()
        key = random.fold_in(rng_key, i)
        draws = simulate(key, strategy, num_chains, num_red, num_blue, **options)
        weights = np.full(num_chains, 1 / num_chains)
        laws[strategy] = smooth(cells(weights, draws, num_red, num_blue))
        distances[strategy] = total_variation(laws[strategy], laws["Posterior"])
        seconds = time.perf_counter() - begin
        report(f"{strategy:20}{distances[strategy]:8.3f}{seconds:9.1f} s")
    rng = np.random.default_rng(0)
    flat = posterior.ravel() / posterior.sum()
    perfect = rng.multinomial(num_chains, flat, 20).reshape(-1, *posterior.shape)
    distances["perfect draws"] = np.mean(
        [total_variation(smooth(x / num_chains), laws["Posterior"]) for x in perfect]
    )
    report(f"{'perfect draws':20}{distances['perfect draws']:8.3f}")
    return distances, laws


def draw(laws, distances, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 4, figsize=(11, 6), layout="constrained")
    for ax, (name, law) in zip(axes.flat, laws.items(), strict=True):
        # The root shows what is rare beside the peaks.
        ax.imshow(
            np.sqrt(law.T),
            origin="lower",
            extent=(0, 1, 0, 1),
            cmap="magma",
            interpolation="nearest",
        )
        distance = f", TVD {distances[name]:.2f}" if name in distances else ""
        ax.set_title(name + distance, fontsize=10)
    figure.supxlabel("share of the reds on the left")
    figure.supylabel("share of the blues on the left")
    drawing.save(figure, path)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--num-red", type=int)
    parser.add_argument("--num-blue", type=int)
    parser.add_argument("--num-chains", type=int)
    parser.add_argument("--paper-size", action="store_true", help=f"{PAPER_SIZE}")
    parser.add_argument("--sweeps", type=int, default=10)
    parser.add_argument("--p", type=float, default=0.45)
    parser.add_argument("--alpha", type=float, default=0.5)
    parser.add_argument("--cold-blocks", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="two_urns.png", help="of the figure")
    args = parser.parse_args(argv)
    for name, size in (PAPER_SIZE if args.paper_size else SIZE).items():
        if getattr(args, name) is None:
            setattr(args, name, size)
    print(
        f"{args.num_red} red, {args.num_blue} blue, {args.sweeps} N steps, "
        f"{args.num_chains} chains\n{'':20}{'TVD':>8}{'took':>9}"
    )
    distances, laws = compare(
        random.key(args.seed),
        args.num_chains,
        args.num_red,
        args.num_blue,
        report=partial(print, flush=True),
        p=args.p,
        alpha=args.alpha,
        sweeps=args.sweeps,
        cold_blocks=args.cold_blocks,
    )
    draw(laws, distances, args.out)


if __name__ == "__main__":
    main()
