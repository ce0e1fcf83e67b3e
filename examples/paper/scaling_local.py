# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

r"""
Theorem 1 of the paper: how mixing time grows with N in the model of two urns.

Claimed: to come within total variation distance epsilon of the posterior takes cold
Gibbs sampling :math:`O(N^2 \log(1 / \epsilon))` steps, and the linear anneal
:math:`O(N \log(1 / \epsilon))`. The theorem does not say from which start. Cold chains
are followed from three: a state at the end of the ridge where the posterior lies (no
red on the left), a draw from the prior, and what Sequential makes of the balls. The
anneal starts empty. Two balls of five are red, p = 0.45, alpha = 1/2.

Where it can be, the law itself is propagated, and no chain is simulated:

- Cold: P is reversible with eigenvalues in [0, 1], and with X = 2 P - 1,
  :math:`P^t = \sum_k b_{2t}(t + k) T_k(X)`, where b is the binomial distribution with
  success probability 1/2 and T the Chebyshev polynomials (Varopoulos, 1985; Carne,
  1985). All terms beyond :math:`k \approx 5 \sqrt t` vanish, so that t steps cost that
  many products with P.
- Anneal: the law of (reds in, reds left, blues left), at each size of the subsample;
  numbers of reds in of probability below 1e-13 are left out. For larger N chains are
  simulated by the dynamics of :mod:`two_urns`, and their total variation distance is
  that of counts in 64 cells of about equal posterior probability (:class:`Cells`): a
  little less than the distance on all states, and more for their number being finite,
  by how much is seen from the distance that perfect draws show.

Time is in steps, assignments of a ball, of a schedule that churns c balls for each ball
added: T = (1 + c) N. Between whole c, and between times t and 1.5 t, the logarithm of
the distance is interpolated. Exponents are slopes of log time against log N by least
squares, with their standard error.

    python examples/paper/scaling_local.py               # N up to 5,000
    python examples/paper/scaling_local.py --large       # N up to 10,000, more chains
"""

import argparse

import drawing
from jax import random
import numpy as np
from scipy import sparse, stats
from scipy.sparse.linalg import eigsh
import two_urns

P, ALPHA = 0.45, 0.5
EPSILONS = (0.2, 0.1, 0.05, 0.02)
CHURNS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
STARTS = ("one end", "prior", "sequential")


def balls(num_rows):
    """Reds and blues, two to three."""
    red = round(0.4 * num_rows)
    return red, num_rows - red


def share_left(same_left, same_right, left, right, p, alpha, num_features):
    """Probability that a ball is assigned to the left."""
    odds = two_urns.odds_left(
        same_left, same_right, left, right, p, alpha, num_features
    )
    return odds / (1 + odds)


def total_variation(law, other):
    return 0.5 * np.abs(law - other).sum(0)


# --- Cold ---------------------------------------------------------------------


class Cold:
    """
    Gibbs sampling of all balls, by the law of the state.

    States of posterior probability below `least` are left out, and no move leads there.

    - **posterior** - ``[states]``.
    - **matrix** - P, transposed: it takes laws ``[states, starts]`` one step on.
    """

    def __init__(
        self, num_red, num_blue, p=P, alpha=ALPHA, num_features=1, least=1e-14
    ):
        log_posterior = two_urns.log_posterior(
            num_red, num_blue, p, alpha, num_features
        )
        self.kept = np.exp(log_posterior) > least
        self.posterior = self.restrict(np.exp(log_posterior))
        num_states = len(self.posterior)
        index = np.full((num_red + 2, num_blue + 2), -1)  # -1 beyond the edges too
        index[:-1, :-1][self.kept] = np.arange(num_states)
        a, b = np.nonzero(self.kept)
        num_rows = num_red + num_blue
        source, target, rate = [], [], []
        for colour in (0, 1):
            total = (num_red, num_blue)[colour]
            for step in (1, -1):
                here = (a, b)[colour]
                # Without the ball that is moved.
                left = here - (step == -1)
                right = total - here - (step == 1)
                moving = (left >= 0) & (right >= 0)
                left, right = np.maximum(left, 0), np.maximum(right, 0)
                urn = left + (b, a)[colour]
                share = share_left(
                    left, right, urn, num_rows - 1 - urn, p, alpha, num_features
                )
                count = total - here if step == 1 else here
                chosen = share if step == 1 else 1 - share
                to = index[a + step * (colour == 0), b + step * (colour == 1)]
                moving &= to >= 0
                source.append(np.nonzero(moving)[0])
                target.append(to[moving])
                rate.append((count / num_rows * chosen)[moving])
        source, target, rate = (np.concatenate(x) for x in (source, target, rate))
        stay = 1 - np.bincount(source, rate, num_states)
        same = np.arange(num_states)
        where = np.append(target, same), np.append(source, same)
        self.matrix = sparse.csr_array((np.append(rate, stay), where))

    def restrict(self, law):
        """
        A law on all states, of those that are kept; the mass of others goes to the
        nearest one with as many reds on the left.
        """
        a, b = np.indices(self.kept.shape)
        first = self.kept.argmax(1)[:, None]
        last = self.kept.shape[1] - 1 - self.kept[:, ::-1].argmax(1)[:, None]
        moved = np.zeros(self.kept.shape)
        np.add.at(moved, (a, np.clip(b, first, last)), law)
        law = moved[self.kept]
        return law / law.sum()

    def point(self, state):
        """All mass at one state, (reds left, blues left)."""
        law = np.zeros(self.kept.shape)
        law[tuple(state)] = 1
        return self.restrict(law)

    def after(self, law, num_steps):
        """`law` after so many steps, exact but for terms below 1e-12."""
        # Standard deviation sqrt(t / 2), so that the rest is beyond 7.5 of them.
        last = int(min(num_steps, 5 + 5.3 * np.sqrt(num_steps)))
        order = np.arange(last + 1)
        weights = stats.binom.pmf(num_steps + order, 2 * num_steps, 0.5)
        weights[1:] *= 2
        before, now = law, 2 * (self.matrix @ law) - law
        total = weights[0] * before
        if last:
            total = total + weights[1] * now
        for w in weights[2:]:
            before, now = now, 4 * (self.matrix @ now) - 2 * now - before
            total += w * now
        return total

    def distances(self, laws, first, least, ratio=1.5):
        """
        Distance from the posterior at times that grow geometrically, until all are
        below `least`.

        :param laws: starts, ``[states, starts]``.
        :return: times ``[T]``, distances ``[T, starts]``.
        """
        times = [0]
        found = [total_variation(laws, self.posterior[:, None])]
        while (found[-1] > least).any():
            now = max(first, int(np.ceil(times[-1] * ratio)))
            laws = self.after(laws, now - times[-1])
            times.append(now)
            found.append(total_variation(laws, self.posterior[:, None]))
        return np.array(times), np.array(found)

    def relaxation_time(self):
        """1 / (1 - second eigenvalue): of the slowest mode to fall by a factor e."""
        root = np.sqrt(self.posterior)
        matrix = sparse.diags_array(1 / root) @ self.matrix @ sparse.diags_array(root)
        matrix = ((matrix + matrix.T) / 2).tocsc()
        # Just above 1, as at 1 it is singular.
        values = eigsh(
            matrix, k=2, sigma=1 + 1e-7, which="LM", return_eigenvectors=False
        )
        return 1 / (1 - values.min())


def mixing_time(times, distances, epsilon):
    """
    First time at which the distance is epsilon, its logarithm interpolated; 0 if it is
    less from the start, NaN if it is never seen to be.
    """
    below = distances <= epsilon
    if not below.any():
        return np.nan
    i = int(np.argmax(below))
    if i == 0:
        return 0.0
    y = np.log(distances[i - 1 : i + 1])
    share = (y[0] - np.log(epsilon)) / (y[0] - y[1])
    return times[i - 1] + share * (times[i] - times[i - 1])


def cold_times(num_rows, epsilons=EPSILONS, p=P, alpha=ALPHA):
    """Mixing times in steps, ``[starts, epsilons]``, in the order of `STARTS`."""
    num_red, num_blue = balls(num_rows)
    chain = Cold(num_red, num_blue, p, alpha)
    posterior = two_urns.log_posterior(num_red, num_blue, p, alpha)
    laws = [
        chain.point((0, posterior[0].argmax())),
        chain.restrict(np.exp(two_urns.log_prior(num_red, num_blue, p))),
        chain.restrict(sequential_law(num_red, num_blue, p, alpha)),
    ]
    times, distances = chain.distances(
        np.stack(laws, 1), first=max(1, num_rows // 4), least=min(epsilons)
    )
    return np.array([[mixing_time(times, d, e) for e in epsilons] for d in distances.T])


# --- Anneal -------------------------------------------------------------------


def sequential_law(num_red, num_blue, p, alpha):
    """
    The law of Sequential: of (reds left, blues left) when all are assigned. Beyond 200
    balls that of 100,000 simulated chains.
    """
    if num_red + num_blue <= 200:
        return annealed_law(num_red, num_blue, 0, p, alpha)
    draws = two_urns.simulate(
        random.key(0), "Sequential", 100_000, num_red, num_blue, p, alpha
    )
    law = np.zeros((num_red + 1, num_blue + 1))
    np.add.at(law, tuple(draws.T), 1 / len(draws))
    return law


def annealed_law(num_red, num_blue, churns, p=P, alpha=ALPHA, num_features=1):
    """
    The law of (reds left, blues left) at the end of the anneal, after each of whose
    additions `churns` balls are churned.
    """
    num_rows = num_red + num_blue
    law = np.zeros((num_red + 1, num_red + 1, num_blue + 1))
    law[0, 0, 0] = 1
    red_in = stats.hypergeom(num_rows, num_red, np.arange(num_rows + 1)[:, None])
    low, high = red_in.ppf([1e-13, 1 - 1e-13]).astype(int).T
    for size in range(1, num_rows + 1):
        # Sizes `size - 1` and `size`, and little else, as a view of the law.
        first, last = low[size - 1], high[size]
        window = np.s_[
            first : last + 1,
            : last + 1,
            : min(size - first, num_blue) + 1,
        ]
        entering = enter_rates(
            window, size - 1, num_red, num_blue, p, alpha, num_features
        )
        leaving = leave_rates(window, size)
        part = law[window]
        part = enter(part, entering)
        for _ in range(churns):
            part = enter(leave(part, leaving), entering)
        law[window] = part
    return law[num_red]


def grid(window):
    """Reds in, reds left, blues left, of the states of a view of the law."""
    return np.ogrid[window[0], slice(0, window[1].stop), slice(0, window[2].stop)]


def enter_rates(window, size, num_red, num_blue, p, alpha, num_features):
    """Of each state with `size` balls in: red to the left, right; blue likewise."""
    red_in, a, b = grid(window)
    other_a, other_b = np.maximum(red_in - a, 0), np.maximum(size - red_in - b, 0)
    urns = a + b, other_a + other_b
    out = num_red + num_blue - size
    red = np.clip((num_red - red_in) / out, 0, 1)
    rates = []
    for share, ours in ((red, (a, other_a)), (1 - red, (b, other_b))):
        left = share_left(*ours, *urns, p, alpha, num_features)
        rates += [share * left, share * (1 - left)]
    return rates


def enter(law, rates):
    red_left, red_right, blue_left, blue_right = rates
    new = law * blue_right
    new[1:, 1:] += (law * red_left)[:-1, :-1]
    new[1:] += (law * red_right)[:-1]
    new[:, :, 1:] += (law * blue_left)[:, :, :-1]
    return new


def leave_rates(window, size):
    """Of each state with `size` balls in: red from the left, right; blue likewise."""
    red_in, a, b = grid(window)
    return [
        a / size,
        np.maximum(red_in - a, 0) / size,
        b / size,
        np.maximum(size - red_in - b, 0) / size,
    ]


def leave(law, rates):
    red_left, red_right, blue_left, blue_right = rates
    new = law * blue_right
    new[:-1, :-1] += (law * red_left)[1:, 1:]
    new[:-1] += (law * red_right)[1:]
    new[:, :, :-1] += (law * blue_left)[:, :, 1:]
    return new


class Cells:
    """
    64 cells of about equal posterior probability, as far as single states allow: 16 by
    the reds on the left, each in 4 by the balls on the left.

    - **posterior** - probability of each, ``[64]``.
    """

    def __init__(self, log_posterior, num_red_cells=16, num_ball_cells=4):
        weight = np.exp(log_posterior)
        a, b = np.indices(weight.shape)
        self.edges = []
        for values, num in ((a, num_red_cells), (a + b, num_ball_cells)):
            below = np.bincount(values.ravel(), weight.ravel()).cumsum()
            self.edges.append(np.searchsorted(below, np.arange(1, num) / num))
        self.num = num_red_cells, num_ball_cells
        self.posterior = self.count(a.ravel(), b.ravel(), weight.ravel())

    def count(self, a, b, weight=None):
        """Total weight, or number of states, in each cell."""
        red = np.searchsorted(self.edges[0], a)
        ball = np.searchsorted(self.edges[1], a + b)
        return np.bincount(red * self.num[1] + ball, weight, np.prod(self.num))

    def distance(self, draws):
        """Total variation distance of draws, ``[chains, 2]``, from the posterior."""
        found = self.count(*draws.T) / len(draws)
        return 0.5 * np.abs(found - self.posterior).sum()

    def distance_of_law(self, law):
        a, b = np.indices(law.shape)
        found = self.count(a.ravel(), b.ravel(), law.ravel())
        return 0.5 * np.abs(found - self.posterior).sum()

    def distance_of_perfect(self, num_draws, repeats=20):
        rng = np.random.default_rng(0)
        p = self.posterior / self.posterior.sum()
        found = rng.multinomial(num_draws, p, repeats) / num_draws
        return 0.5 * np.abs(found - self.posterior).sum(1).mean()


def annealed_distances(num_rows, churns, num_chains=None, rng_key=None):
    """
    Distances at the end of anneals, ``[churns]``: of the law itself, or of so many
    simulated chains in 64 cells.
    """
    num_red, num_blue = balls(num_rows)
    log_posterior = two_urns.log_posterior(num_red, num_blue, P, ALPHA)
    found = []
    for c in churns:
        if num_chains is None:
            law = annealed_law(num_red, num_blue, c)
            found.append(0.5 * np.abs(law - np.exp(log_posterior)).sum())
            continue
        key = random.fold_in(random.fold_in(rng_key, num_rows), c)
        draws = two_urns.simulate(
            key, "Anneal Subsample", num_chains, num_red, num_blue, P, ALPHA, c + 1
        )
        found.append(Cells(log_posterior).distance(draws))
    return np.array(found)


def annealed_times(num_rows, epsilons=EPSILONS, **options):
    """Mixing times of the anneal in steps, ``[epsilons]``, NaN if beyond `CHURNS`."""
    churns, distances = [], []
    for c in CHURNS:
        churns.append(c)
        distances.extend(annealed_distances(num_rows, [c], **options))
        if distances[-1] <= min(epsilons):
            break
    # No anneal is shorter than N steps.
    times = num_rows * (1 + np.array(churns))
    found = [mixing_time(times, np.array(distances), e) for e in epsilons]
    return np.maximum(found, num_rows)


# --- Exponents ----------------------------------------------------------------


def exponent(sizes, times):
    """Slope of log time against log size and its standard error."""
    sizes, times = np.asarray(sizes, float), np.asarray(times, float)
    seen = times > 0  # false of NaN
    if seen.sum() < 3:
        return np.nan, np.nan
    fit = stats.linregress(np.log(sizes[seen]), np.log(times[seen]))
    return fit.slope, fit.stderr


def print_times(title, sizes, times, epsilons, power, smallest):
    """Times over N**power, and exponents of all sizes and of those not small."""
    print(f"\n{title}: steps / N^{power}")
    print(f"{'N':>12}" + "".join(f"{f'TVD {e}':>16}" for e in epsilons))
    for n, row in zip(sizes, times, strict=True):
        print(f"{n:12}" + "".join(f"{t / n**power:16.4f}" for t in row))
    sizes, times = np.array(sizes), np.array(times)
    for least in (min(sizes), smallest):
        row = f"{'N^, N >= ' + str(least):12}"
        for column in times[sizes >= least].T:
            slope, error = exponent(sizes[sizes >= least], column)
            row += f"{f'{slope:.3f} +- {error:.3f}':>16}"
        print(row)
    if len(epsilons) > 2:
        slope, error = exponent(1 / np.array(epsilons), times[-1])
        print(f"(1 / TVD)^ at N = {sizes[-1]}: {slope:.2f} +- {error:.2f}", flush=True)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    cold = [5, 10, 20, 50, 100, 200, 500]
    parser.add_argument("--cold", type=int, nargs="*", default=cold, help="sizes")
    relaxation = [5, 10, 20, 50, 100, 200, 500, 1000, 2000]
    parser.add_argument(
        "--relaxation", type=int, nargs="*", default=relaxation, help="sizes"
    )
    exact = [5, 10, 20, 50, 100]
    parser.add_argument("--exact", type=int, nargs="*", default=exact, help="annealed")
    more = [200, 500, 1000, 2000, 5000]
    parser.add_argument(
        "--simulated", type=int, nargs="*", default=more, help="annealed"
    )
    parser.add_argument("--num-chains", type=int, default=20_000, help="simulated")
    parser.add_argument("--large", action="store_true", help="larger sizes, an hour")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="also save times there (.npz)")
    parser.add_argument("--figure", help="also draw them there (.png)")
    args = parser.parse_args(argv)
    if args.large:
        args.cold += [1000]
        args.relaxation += [5000]
        args.exact += [200]
        args.simulated += [10_000]
        args.num_chains *= 5
    saved = {}
    if args.cold:
        saved["cold"] = np.array([cold_times(n) for n in args.cold])
        for i, start in enumerate(STARTS):
            title = f"Cold, from {start}"
            print_times(title, args.cold, saved["cold"][:, i], EPSILONS, 2, 50)
    if args.relaxation:
        chains = (Cold(*balls(n)) for n in args.relaxation)
        times = np.array([chain.relaxation_time() for chain in chains])
        saved["relaxation"] = times
        print("\nCold, relaxation time: steps / N^2")
        for n, t in zip(args.relaxation, times, strict=True):
            print(f"{n:12}{t / n**2:16.4f}")
        for least in (min(args.relaxation), 50):
            used = np.array(args.relaxation) >= least
            slope, error = exponent(np.array(args.relaxation)[used], times[used])
            print(f"{'N^, N >= ' + str(least):12}{f'{slope:.3f} +- {error:.3f}':>16}")
    if args.exact:
        saved["exact"] = [annealed_times(n, EPSILONS[:3]) for n in args.exact]
        title = "Anneal, exact law"
        print_times(title, args.exact, saved["exact"], EPSILONS[:3], 1, 20)
    if args.simulated:
        key = random.key(args.seed)
        epsilons = EPSILONS[:2]
        saved["simulated"] = [
            annealed_times(n, epsilons, num_chains=args.num_chains, rng_key=key)
            for n in args.simulated
        ]
        title = f"Anneal, {args.num_chains} chains"
        print_times(title, args.simulated, saved["simulated"], epsilons, 1, 500)
        num_red, num_blue = balls(args.simulated[-1])
        found = Cells(two_urns.log_posterior(num_red, num_blue, P, ALPHA))
        perfect = found.distance_of_perfect(args.num_chains)
        print(f"(as many perfect draws show a distance of {perfect:.3f})")
    if args.out:
        np.savez(args.out, **saved)
    if args.figure:
        lines = []
        if args.cold:
            for start, times in zip(STARTS, saved["cold"].swapaxes(0, 1), strict=True):
                lines.append((f"cold, from {start}", args.cold, times))
        for name in ("exact", "simulated"):
            if name in saved:
                lines.append((f"anneal, {name}", vars(args)[name], saved[name]))
        drawing.draw_times(
            [(n, sizes, np.array(t)[:, 1] / sizes) for n, sizes, t in lines],
            args.figure,
            f"to a total variation distance of {EPSILONS[1]}",
        )


if __name__ == "__main__":
    main()
