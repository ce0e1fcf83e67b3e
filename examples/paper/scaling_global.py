# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

r"""
Theorem 2 of the paper: energy barriers that grow with N.

Claimed, of two states that an energy gap of gamma N and a barrier of delta N separate:
to come within total variation distance epsilon takes cold inference
:math:`O(\exp(\delta N) \log(1 / \epsilon))` steps, and the linear anneal
:math:`O(\delta N \log(1 / \epsilon) \, (1 / \epsilon)^{\delta / \gamma})`.

Two states: equation 1 of the paper, from the wrong state, x(0) = 0. It is linear, so
the error at the end of the anneal is an integral, taken numerically
(:func:`annealed_error`), and the cold one is known; nothing is simulated.

Two urns: balls have two features, both of which agree with the colour (as if the
likelihood were squared), p = 0.3, and three of ten are red. One mode has all reds on
the left and the blues on the right, the other the reverse; gap and barrier are read off
the exact posterior (:func:`landscape`). Mixing times are those of the exact law, as in
:mod:`scaling_local`: cold from the worse mode, the prior, and Sequential; annealed from
nothing, where the temperature is the size of the subsample, not that of the theorem.

The kernel: the same model as a NumPyro model, sampled by ``MCMC.run`` of
``SubsampleAnnealedGibbs``, moves of single rows only (no splits and merges of clusters,
which would cross the barrier at once). How many chains are in the better mode is shown
beside the exact law, for the anneal and for Sequential+Gibbs with as many steps.

    python examples/paper/scaling_global.py
    python examples/paper/scaling_global.py --large      # more sizes and longer anneals
"""

import argparse

import drawing
from jax import random
import jax.numpy as jnp
import numpy as np
import scaling_local as local
from scipy import integrate, ndimage, optimize, special
import two_urns

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC

from numpyro_subanneal import LinearSchedule, SequentialGibbs, SubsampleAnnealedGibbs

P, ALPHA, RED = 0.3, 0.5, 0.3
CHURNS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)

# --- Two states ---------------------------------------------------------------


def log_cold_time(num_rows, epsilon, gamma, delta):
    r"""
    Log of the time that takes x from 0 to within `epsilon` of the truth, all data in:
    the distance decays as :math:`\exp(-t e^{-\delta N})`.
    """
    return delta * num_rows + np.log(np.log(special.expit(gamma * num_rows) / epsilon))


def annealed_error(time, num_rows, gamma, delta, num_points=20_001):
    r"""
    Distance from the truth at the end of an anneal of length `time`, beta = t / T,
    from x(0) = 0.

    With :math:`u = \beta \gamma N`, and :math:`W(\beta) = T / (N \delta) \, (e^{-\beta
    \delta N} - e^{-\delta N})` the jumps still expected at beta, it is :math:`e^{-W(0)}
    / 2 + \int_0^{\gamma N} \sigma'(u) e^{-W} du`: of the last jump, if there is one,
    by parts.
    """
    u = np.linspace(0, min(gamma * num_rows, 60), num_points)  # no more beyond

    def survival(beta_rows):
        jumps = np.exp(-delta * beta_rows) - np.exp(-delta * num_rows)
        return np.exp(-time / (num_rows * delta) * jumps)

    slope = special.expit(u) * special.expit(-u)
    return survival(0.0) / 2 + integrate.simpson(slope * survival(u / gamma), x=u)


def annealed_time(num_rows, epsilon, gamma, delta):
    """Length of the anneal that ends within `epsilon` of the truth."""

    def excess(log_time):
        error = annealed_error(np.exp(log_time), num_rows, gamma, delta)
        return np.log(error) - np.log(epsilon)

    most = np.log(sharp_time(num_rows, epsilon, gamma, delta)) + 20
    return np.exp(optimize.brentq(excess, -20, most, xtol=1e-10))


def sharp_time(num_rows, epsilon, gamma, delta):
    r"""
    What the annealed time tends to for large N and small epsilon: :math:`N \delta
    (\Gamma(1 + \gamma / \delta) / \epsilon)^{\delta / \gamma}`, no logarithm. (The last
    jump is at :math:`e^{-\beta \delta N} = N \delta w / T` with w exponential.)
    """
    return (
        num_rows
        * delta
        * (special.gamma(1 + gamma / delta) / epsilon) ** (delta / gamma)
    )


# --- Two urns, two features ---------------------------------------------------


def balls(num_rows, red=RED):
    num_red = round(red * num_rows)
    return num_red, num_rows - num_red


def posterior(num_rows, p=P, red=RED):
    return two_urns.log_posterior(*balls(num_rows, red), p, ALPHA, num_features=2)


def in_better_mode(law):
    """Mass where a greater share of the reds is on the left than of the blues."""
    a, b = np.indices(law.shape)
    num_red, num_blue = np.array(law.shape) - 1
    return law[a * num_blue > b * num_red].sum()


def landscape(num_rows, p=P, red=RED):
    """Gap between the modes and barrier from the worse one, in nats."""
    log_probs = posterior(num_rows, p, red)
    num_red, num_blue = np.array(log_probs.shape) - 1
    better, worse = (num_red, 0), (0, num_blue)

    def connected(level):
        parts, _ = ndimage.label(log_probs >= level)
        return parts[better] == parts[worse]

    low, high = log_probs.min(), log_probs[worse]
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if connected(middle) else (low, middle)
    return log_probs[better] - log_probs[worse], log_probs[worse] - low


def rates(num_rows, p=P, red=RED):
    """Gamma and delta: how gap and barrier grow with a ball, around this size."""
    most = np.array(landscape(num_rows + 20, p, red))
    return (most - landscape(num_rows, p, red)) / 20


def urns_cold_times(num_rows, epsilon, p=P, red=RED):
    """Steps of cold Gibbs sampling: from the worse mode, the prior, Sequential."""
    num_red, num_blue = balls(num_rows, red)
    chain = local.Cold(num_red, num_blue, p, ALPHA, num_features=2, least=0)
    starts = [
        chain.point((0, num_blue)),
        chain.restrict(np.exp(two_urns.log_prior(num_red, num_blue, p))),
        chain.restrict(annealed_law(num_rows, 0, p, red)),
    ]
    times, distances = chain.distances(np.stack(starts, 1), num_rows, epsilon)
    return [local.mixing_time(times, d, epsilon) for d in distances.T]


def annealed_law(num_rows, churns, p=P, red=RED):
    return local.annealed_law(*balls(num_rows, red), churns, p, ALPHA, num_features=2)


def annealed_distances(num_rows, churns, p=P, red=RED):
    exact = np.exp(posterior(num_rows, p, red))
    laws = (annealed_law(num_rows, c, p, red) for c in churns)
    return np.array([local.total_variation(x.ravel(), exact.ravel()) for x in laws])


def urns_annealed_time(num_rows, epsilon, churns=CHURNS, p=P, red=RED):
    """Steps of the anneal, between whole numbers of churns by interpolation."""
    found = []
    for c in churns:
        found.extend(annealed_distances(num_rows, [c], p, red))
        if found[-1] <= epsilon:
            break
    times = num_rows * (1 + np.array(churns[: len(found)]))
    return local.mixing_time(times, np.array(found), epsilon)


# --- The kernel ---------------------------------------------------------------


def urns(x, p=P):
    """Rows of boolean features, ``[N, D]``, in a left (0) and a right urn (1)."""
    num_rows, num_features = x.shape
    with numpyro.plate("balls", num_rows):
        z = numpyro.sample("z", dist.Categorical(jnp.array([p, 1 - p])))
    with numpyro.plate("features", num_features, dim=-1):
        with numpyro.plate("urns", 2, dim=-2):
            share = numpyro.sample("share", dist.Beta(ALPHA, ALPHA))
        with numpyro.plate("rows", num_rows, dim=-2):
            numpyro.sample("x", dist.Bernoulli(share[z]), obs=x)


def run_kernel(
    rng_key, num_red, num_blue, churns, num_chains, num_features=2, p=P, anneal=True
):
    """
    Reds and blues on the left at the end of the warm-up, ``[num_chains, 2]``: of the
    anneal, or of Sequential+Gibbs with as many steps.
    """
    x = np.repeat([1, 0], [num_red, num_blue])[:, None].repeat(num_features, 1)
    schedule = LinearSchedule(churns) if anneal else SequentialGibbs()
    kernel = SubsampleAnnealedGibbs(urns, schedule, split_merge=None)
    mcmc = MCMC(
        kernel,
        num_warmup=1 + churns,
        num_samples=1,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.warmup(rng_key, x, p, collect_warmup=True, extra_fields=("~z.share",))
    left = np.asarray(mcmc.get_samples(group_by_chain=True)["z"][:, -1]) == 0
    return np.stack([left[:, :num_red].sum(1), left[:, num_red:].sum(1)], 1)


# --- Tables -------------------------------------------------------------------


def slope(x, y):
    return local.exponent(np.exp(x), np.exp(y))


def print_two_states(sizes, epsilons, pairs):
    print("Two states: annealed time ~ N^a (1 / TVD)^b; of b, delta / gamma is claimed")
    print(
        f"{'gamma':>8}{'delta':>8}{'a':>8}{'claimed':>9}{'b':>8}{'claimed':>9}", end=""
    )
    print(f"{'time / sharp':>14}")
    found = []
    for gamma, delta in pairs:
        by_size = [annealed_time(n, 0.01, gamma, delta) for n in sizes]
        by_error = [annealed_time(sizes[-1], e, gamma, delta) for e in epsilons]
        a, _ = slope(np.log(sizes), np.log(by_size))
        b, _ = slope(-np.log(epsilons), np.log(by_error))
        ratio = by_error[-1] / sharp_time(sizes[-1], epsilons[-1], gamma, delta)
        print(
            f"{gamma:8.2f}{delta:8.2f}{a:8.3f}{1:9}{b:8.3f}{delta / gamma:9.2f}"
            f"{ratio:14.4f}"
        )
        found.append((a, b))
    return np.array(found)


def print_urns(sizes, epsilon):
    print(f"\nTwo urns, two features, exact law: sweeps to a TVD of {epsilon}")
    print(f"{'N':>6}{'worse mode':>14}{'prior':>14}{'Sequential':>14}{'anneal':>10}")
    cold, annealed = [], []
    for n in sizes:
        cold.append(urns_cold_times(n, epsilon))
        annealed.append(urns_annealed_time(n, epsilon))
        row = "".join(f"{t / n:14.1f}" for t in cold[-1])
        print(f"{n:6}{row}{annealed[-1] / n:10.1f}", flush=True)
    cold, sizes = np.array(cold), np.array(sizes)
    upper = sizes >= sorted(sizes)[1]  # the smallest is hardly bimodal
    for name, times in zip(("worse mode", "prior", "Sequential"), cold.T, strict=True):
        rate, error = slope(sizes[upper], np.log(times[upper]))
        print(f"cold steps from {name}: exp({rate:.3f} +- {error:.3f} N)", end="")
        print(f", N >= {min(sizes[upper])}")
    power, error = local.exponent(sizes[upper], np.array(annealed)[upper])
    print(f"annealed steps: N^({power:.2f} +- {error:.2f}), N >= {min(sizes[upper])}")
    gamma, delta = rates(int(sizes[-1]))
    print(f"by the posterior, gamma = {gamma:.3f} and delta = {delta:.3f}")
    return cold, np.array(annealed)


def print_urns_errors(num_rows, churns):
    print(f"\nTwo urns, exact law: TVD of the anneal of {num_rows} balls, and b")
    print(f"{'churns':>24}" + "".join(f"{c:>8}" for c in churns))
    found = {}
    for p, red in ((0.3, 0.3), (0.2, 0.4), (0.3, 0.4)):
        gamma, delta = rates(num_rows, p, red)
        distances = annealed_distances(num_rows, churns, p, red)
        name = f"p {p}, {red} red"
        print(f"{name:>24}" + "".join(f"{d:8.4f}" for d in distances))
        b = np.diff(np.log(1 + np.array(churns))) / -np.diff(np.log(distances))
        name = f"delta / gamma = {delta / gamma:.2f}"
        print(f"{name:>24}{'b':>8}" + "".join(f"{x:8.2f}" for x in b), flush=True)
        found[p, red] = delta / gamma, b
    return found


def print_kernel(num_rows, churns, num_chains, seed):
    print(f"\nThe kernel, {num_chains} chains: share in the better mode")
    print(f"{'N':>6}{'sweeps':>8}{'anneal':>10}{'exact law':>11}", end="")
    print(f"{'s. e.':>8}{'Sequential+Gibbs':>18}{'posterior':>11}")
    for n in num_rows:
        num_red, num_blue = balls(n)
        key = random.key(seed)
        shares = []
        for anneal in (True, False):
            key, subkey = random.split(key)
            draws = run_kernel(
                subkey, num_red, num_blue, churns, num_chains, anneal=anneal
            )
            law = np.zeros((num_red + 1, num_blue + 1))
            np.add.at(law, tuple(draws.T), 1 / num_chains)
            shares.append(in_better_mode(law))
        exact = in_better_mode(annealed_law(n, churns))
        error = np.sqrt(exact * (1 - exact) / num_chains)
        print(
            f"{n:6}{1 + churns:8}{shares[0]:10.3f}{exact:11.3f}{error:8.3f}"
            f"{shares[1]:18.3f}{in_better_mode(np.exp(posterior(n))):11.3f}",
            flush=True,
        )


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    sizes = [10, 20, 30, 40]
    parser.add_argument("--sizes", type=int, nargs="*", default=sizes, help="urns")
    parser.add_argument("--epsilon", type=float, default=0.1, help="urns")
    parser.add_argument("--num-balls", type=int, default=30, help="at which b is found")
    parser.add_argument("--kernel", type=int, nargs="*", default=[20, 30], help="sizes")
    parser.add_argument("--churns", type=int, default=16, help="of the kernel")
    parser.add_argument("--num-chains", type=int, default=2000, help="of the kernel")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="also save what was found there (.npz)")
    parser.add_argument("--figure", help="also draw the urns' times there (.png)")
    args = parser.parse_args(argv)
    churns = CHURNS[2:-1]
    if args.large:
        args.sizes += [50, 60]
        args.num_balls, churns = 50, CHURNS[2:]
    saved = {}
    saved["two_states"] = print_two_states(
        np.array([100, 300, 1000, 3000, 10_000]),
        10.0 ** -np.arange(2, 7),
        [(0.3, 0.15), (0.3, 0.3), (0.3, 0.6)],
    )
    if args.sizes:
        saved["cold"], saved["annealed"] = print_urns(args.sizes, args.epsilon)
    saved["errors"] = [b for _, b in print_urns_errors(args.num_balls, churns).values()]
    if args.kernel:
        print_kernel(args.kernel, args.churns, args.num_chains, args.seed)
    if args.out:
        np.savez(args.out, **saved)
    if args.figure and args.sizes:
        names = [f"cold, from {s}" for s in ("worse mode", "prior", "Sequential")]
        times = [*saved["cold"].T, saved["annealed"]]
        drawing.draw_times(
            [
                (name, args.sizes, t / np.array(args.sizes))
                for name, t in zip([*names, "anneal"], times, strict=True)
            ],
            args.figure,
            f"to a total variation distance of {args.epsilon}",
            logx=False,
        )


if __name__ == "__main__":
    main()
