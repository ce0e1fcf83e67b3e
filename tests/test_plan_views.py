# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""Models with several partitions of the rows: how they are read, and which are refused.

What a feature is indexed by is not declared, so each way to index must be found, and
each way to index wrongly must be told apart.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro
from numpyro import handlers
import numpyro.distributions as dist

from numpyro_subanneal import (
    ChineseRestaurantProcess,
    FiniteDirichletMixture,
    Grid,
    MixtureOfFiniteMixtures,
    NotRecognised,
    PitmanYorProcess,
    explain,
)
from numpyro_subanneal import plan as planning
from numpyro_subanneal.probe import _NUM_VARIED, Prober

pytestmark = pytest.mark.quickly_compiled

N, D, V, K = 7, 5, 3, 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, D)).astype(np.float32)
SQUARE = RNG.normal(size=(D, D)).astype(np.float32)
X3 = RNG.normal(size=(N, 2, 3)).astype(np.float32)
CODES = RNG.integers(3, size=(N, D))
d = jnp.arange(D)


# --- Building blocks of models ---


def normals(name, x, k, indexed=None, mask=True, obs_mask=None):
    """Normal features ``[N, ...]`` with clusters `k`."""
    prior = dist.InverseGamma(2.0, 1.0).expand([K, *x.shape[1:]])
    var = numpyro.sample(f"var_{name}", prior)
    loc = numpyro.sample(f"loc_{name}", dist.Normal(0.0, jnp.sqrt(var / 0.1)))
    cell = (k, *np.indices(x.shape[1:]))
    fn = dist.Normal(loc[cell], jnp.sqrt(var[cell]))
    if indexed is not None:
        fn = indexed(loc, var)
    with handlers.mask(mask=mask):
        numpyro.sample(name, fn, obs=x, obs_mask=obs_mask)


def categories(name, x, k, num=3):
    p = dist.Dirichlet(jnp.ones(num)).expand([K, x.shape[1]])
    p = numpyro.sample(f"p_{name}", p)
    numpyro.sample(name, dist.Categorical(p[k, jnp.arange(x.shape[1])]), obs=x)


def features(num=D, name="view"):
    return numpyro.sample(name, PitmanYorProcess(1.0, 0.1, size=num))


def rows(num_views=V, name="z", num_rows=N, prior=ChineseRestaurantProcess):
    if num_views is None:
        return numpyro.sample(name, prior(1.0, size=num_rows))
    with numpyro.plate(f"views_{name}", num_views):
        return numpyro.sample(name, prior(1.0, size=num_rows))


def crosscat(
    index=lambda z, view: z[view].T, num_views=V, elements=D, indexed=None, draw=rows
):
    """A model of one site, `index` of whose features may be anything."""

    def model(x):
        view = features(elements)
        z = draw(num_views, num_rows=len(x))
        k = index(z, view)
        fn = None if indexed is None else lambda loc, var: indexed(loc, var, k, view)
        normals("x", x, k, indexed=fn)

    return model


def fixed(index, num_views=V, draw=rows):
    """A model of one site, features of which are in known views."""

    def model(x):
        normals("x", x, index(draw(num_views, num_rows=len(x))))

    return model


def whole(x, num_views=8, num_clusters=6):
    """The model of the manual, in plates."""
    N, D = x.shape
    view = numpyro.sample("view", PitmanYorProcess(1.0, 0.1, size=D))
    with numpyro.plate("views", num_views):
        concentration = numpyro.sample("concentration", dist.Gamma(1.0, 1.0))
        z = numpyro.sample("z", PitmanYorProcess(concentration, 0.1, size=N))
    with numpyro.plate("features", D, dim=-1):
        with numpyro.plate("clusters", num_clusters, dim=-2):
            var = numpyro.sample("var", dist.InverseGamma(2.0, 1.0))
            loc = numpyro.sample("loc", dist.Normal(0.0, jnp.sqrt(var / 0.1)))
        with numpyro.plate("rows", N, dim=-2):
            k = z[view].T
            d = jnp.arange(D)
            numpyro.sample("x", dist.Normal(loc[k, d], jnp.sqrt(var[k, d])), obs=x)


# --- What plans say ---


def seats(plan):
    """Of each observed site the partition, elements and views of its features."""
    found = {}
    for block, membership in zip(plan.blocks, plan.memberships, strict=True):
        start = 0
        for shape in block.sites:
            own = slice(start, start + shape.num_features)
            names = {plan.partitions[i].name for i in membership.partition[own]}
            (name,) = names
            found[shape.name] = name, membership.element[own], membership.view[own]
            start = own.stop
        assert start == block.num_features == len(membership.element)
        assert len(membership.partition) == len(membership.view) == start
    return found


def in_elements(*elements, z="z"):
    return z, elements, (-1,) * len(elements)


def in_views(*views, z="z"):
    return z, (-1,) * len(views), views


def summary(plan):
    return [
        (p.name, p.num_rows, p.num_views, p.features, p.num_elements)
        for p in plan.partitions
    ]


def test_the_model_of_the_manual():
    plan = planning.recognise(whole, (X,), {})
    assert summary(plan) == [("z", N, 8, "view", D)]
    assert seats(plan) == {"x": in_elements(0, 1, 2, 3, 4)}
    assert plan.viewed and plan.capacity == 6
    assert plan.assigned == {"view": (D,), "z": (8, N)}
    (site,) = plan.hyper
    assert (site.name, site.per_view) == ("concentration", "z")
    assert site.factors == ("concentration", "z")
    assert set(plan.cluster_sites) == {"var", "loc"}
    assert all(type(i) is int for m in plan.memberships for i in (*m.element, *m.view))


@pytest.mark.parametrize("wide", [False, True])
def test_precision_makes_no_difference(wide):
    with jax.enable_x64(wide):
        plan = planning.recognise(whole, (X.astype(np.float64),), {})
    assert summary(plan) == [("z", N, 8, "view", D)]
    assert seats(plan) == {"x": in_elements(0, 1, 2, 3, 4)}


ODD = np.array([6, 2, 2, 0, 5])  # Of seven elements; 1, 3 and 4 move nothing.
ELEMENTS = {
    "two views": (crosscat(num_views=2), X, range(D)),
    "as many views as elements": (crosscat(num_views=D), X, range(D)),
    "more views than elements": (crosscat(num_views=D + 4), X, range(D)),
    "as many rows as elements": (crosscat(), SQUARE, range(D)),
    "as many rows as elements as views": (crosscat(num_views=D), SQUARE, range(D)),
    "permuted": (crosscat(lambda z, v: z[v[::-1]].T), X, range(D)[::-1]),
    "rows first": (crosscat(lambda z, v: z.T[:, v]), X, range(D)),
    "odd": (crosscat(lambda z, v: z[v[ODD]].T, elements=7), X, ODD),
    "many elements": (
        crosscat(lambda z, v: z[v[ODD + 93]].T, elements=100),
        X,
        ODD + 93,
    ),
    "one element for all": (
        crosscat(lambda z, v: z[v[jnp.zeros(D, int)]].T),
        X,
        [0] * D,
    ),
    "one of many, last": (crosscat(lambda z, v: z[v[4]][:, None]), X[:, :1], [4]),
    "one element": (crosscat(elements=1), X[:, :1], [0]),
    "one element in one view": (crosscat(elements=1, num_views=1), X[:, :1], [0]),
    "no feature axis": (crosscat(lambda z, v: z[v[3]]), X[:, 0], [3]),
    "two feature axes": (
        crosscat(lambda z, v: jnp.moveaxis(z[v.reshape(2, 3)], -1, 0), elements=6),
        X3,
        range(6),
    ),
    "one row": (crosscat(), X[:1], range(D)),
    "two rows": (crosscat(num_views=8), X[:2], range(D)),
}


@pytest.mark.parametrize("model, x, elements", ELEMENTS.values(), ids=ELEMENTS.keys())
def test_elements_are_found(model, x, elements):
    plan = planning.recognise(model, (x,), {})
    assert seats(plan) == {"x": in_elements(*map(int, elements))}
    ((name, num_rows, _, view, _),) = summary(plan)
    assert (name, num_rows, view) == ("z", len(x), "view")


VIEWS = {
    "each once": (fixed(lambda z: z[jnp.array([2, 0, 1, 1, 2])].T), X, (2, 0, 1, 1, 2)),
    "one of several": (fixed(lambda z: z[1][:, None]), X, (1,) * D),
    "one of several, no feature axis": (fixed(lambda z: z[2]), X[:, 0], (2,)),
    "the only one": (fixed(lambda z: z[0][:, None], 1), X, (0,) * D),
    "one row": (
        fixed(lambda z: z[jnp.array([2, 0, 1, 1, 2])].T),
        X[:1],
        (2, 0, 1, 1, 2),
    ),
    "priors differ": (
        fixed(
            lambda z: z[jnp.array([0, 1, 2, 1, 0])].T,
            draw=lambda _, num_rows: numpyro.sample(
                "z", PitmanYorProcess(jnp.array([1.0, 2.0, 3.0]), 0.1, size=num_rows)
            ),
        ),
        X,
        (0, 1, 2, 1, 0),
    ),
}


@pytest.mark.parametrize("model, x, views", VIEWS.values(), ids=VIEWS.keys())
def test_known_views_are_found(model, x, views):
    plan = planning.recognise(model, (x,), {})
    assert seats(plan) == {"x": in_views(*views)}
    ((_, num_rows, num_views, view, elements),) = summary(plan)
    assert num_views is not None and (num_rows, view, elements) == (len(x), None, 0)
    assert plan.viewed


def test_a_mixture_without_views_is_not_viewed():
    plan = planning.recognise(fixed(lambda z: z[:, None], None), (X,), {})
    assert summary(plan) == [("z", N, None, None, 0)]
    assert seats(plan) == {"x": in_views(*(0,) * D)}
    assert not plan.viewed


# --- Several observed sites, several partitions ---


def slices(x, c):
    view, z = features(D + 3), rows()
    normals("x", x, z[view[:D]].T)
    categories("c", c, z[view[D:]].T)


def same_elements(x, y):
    view, z = features(D), rows()
    normals("x", x, z[view].T)
    normals("y", y, z[view[jnp.array([4, 0])]].T)


def two_crosscats(x, c):
    normals("x", x, rows(3, "a")[features(D, "u")].T)
    categories("c", c, rows(4, "b")[features(c.shape[1], "v")].T)


def two_mixtures(x, c):
    normals("x", x, rows(None, "a")[:, None])
    categories("c", c, rows(None, "b")[:, None])


def crosscat_and_mixture(x, c):
    a = rows(None, "a")
    normals("x", x, rows(3, "b")[features()].T)
    categories("c", c, a[:, None])


def known_by_row(x, trials):
    k = rows()[features()].T
    p = numpyro.sample("p", dist.Beta(1.0, 1.0).expand([K, D]))
    numpyro.sample("x", dist.Binomial(trials, p[k, d]), obs=x)


def multivariate(x, c):
    view, z = features(4), rows()
    with numpyro.plate("columns", 2, dim=-1), numpyro.plate("clusters", K, dim=-2):
        cov = numpyro.sample("cov", dist.InverseWishart(5.0, jnp.eye(3)))
        loc = numpyro.sample("loc", dist.MultivariateNormal(jnp.zeros(3), cov / 0.1))
    k, i = z[view[jnp.array([3, 1])]].T, jnp.arange(2)
    numpyro.sample("x", dist.MultivariateNormal(loc[k, i], cov[k, i]), obs=x)
    p = numpyro.sample("p", dist.Dirichlet(jnp.ones(3)).expand([K]))
    numpyro.sample("c", dist.Categorical(p[z[view[2]]]), obs=c)


SEVERAL = {
    "slices": (
        slices,
        (X, CODES[:, :3]),
        [("z", N, V, "view", D + 3)],
        {"x": in_elements(0, 1, 2, 3, 4), "c": in_elements(5, 6, 7)},
    ),
    "two features move together": (
        same_elements,
        (X, X[:, :2]),
        [("z", N, V, "view", D)],
        {"x": in_elements(0, 1, 2, 3, 4), "y": in_elements(4, 0)},
    ),
    "two CrossCats": (
        two_crosscats,
        (X, CODES),
        [("a", N, 3, "u", D), ("b", N, 4, "v", D)],
        {
            "x": in_elements(0, 1, 2, 3, 4, z="a"),
            "c": in_elements(0, 1, 2, 3, 4, z="b"),
        },
    ),
    "two mixtures": (
        two_mixtures,
        (X, CODES),
        [("a", N, None, None, 0), ("b", N, None, None, 0)],
        {"x": in_views(*(0,) * D, z="a"), "c": in_views(*(0,) * D, z="b")},
    ),
    "a CrossCat and a mixture": (
        crosscat_and_mixture,
        (X, CODES),
        [("a", N, None, None, 0), ("b", N, 3, "view", D)],
        {"x": in_elements(0, 1, 2, 3, 4, z="b"), "c": in_views(*(0,) * D, z="a")},
    ),
    "known by row": (
        known_by_row,
        (CODES, CODES + np.arange(N)[:, None]),
        [("z", N, V, "view", D)],
        {"x": in_elements(0, 1, 2, 3, 4)},
    ),
    "multivariate": (
        multivariate,
        (X3, CODES[:, 0]),
        [("z", N, V, "view", 4)],
        {"x": in_elements(3, 1), "c": in_elements(2)},
    ),
}


@pytest.mark.parametrize(
    "model, args, partitions, where", SEVERAL.values(), ids=SEVERAL.keys()
)
def test_several_sites(model, args, partitions, where):
    plan = planning.recognise(model, args, {})
    assert summary(plan) == partitions
    assert seats(plan) == where
    assert plan.viewed


def test_sites_of_one_pair_follow_one_another_in_a_block():
    plan = planning.recognise(same_elements, (X, X[:, :2]), {})
    (block,), (membership,) = plan.blocks, plan.memberships
    assert [s.name for s in block.sites] == ["x", "y"]
    assert membership.element == (0, 1, 2, 3, 4, 4, 0)


def test_blocks_of_views_know_that_features_are_apart():
    plan = planning.recognise(slices, (X, CODES[:, :3]), {})
    assert plan.blocks == tuple(b.apart() for b in plan.blocks)
    plain = planning.recognise(fixed(lambda z: z[:, None], None), (X,), {})
    assert plain.blocks == tuple(plain.blocks)


@pytest.mark.parametrize("how", ["mask", "obs_mask"])
def test_masks(how):
    live = RNG.random(X.shape) < 0.7
    live[:, 2] = False  # A column of which nothing is known is still somewhere.
    x = np.where(live, X, np.nan)

    def model(x):
        normals("x", x, rows()[features()].T, **{how: live})

    if how == "mask":
        plan = planning.recognise(model, (x,), {})
    else:
        # NumPyro itself evaluates the distribution at what is masked.
        plan = planning.recognise(model, (np.where(live, X, 0),), {})
        assert plan.imputed == ("x_unobserved",)
    ((_, *where),) = seats(plan).values()
    assert where == list(in_elements(0, 1, 2, 3, 4)[1:])
    assert plan.blocks[0].masked


def test_more_rows_than_are_looked_at():
    x = np.random.default_rng(1).normal(size=(5000, D)).astype(np.float32)
    plan = planning.recognise(crosscat(num_views=20), (x,), {})
    assert seats(plan) == {"x": in_elements(0, 1, 2, 3, 4)}


@pytest.mark.parametrize(
    "model, most",
    [
        (fixed(lambda z: z[:, None], None), 13),
        (fixed(lambda z: z[jnp.array([0, 7, 2, 2, 0])].T, 8), 13 + 1 + 2),
        # By two digits and by three, each twice, and one of them once more.
        (crosscat(lambda z, v: z[v[d * 12]].T, 8, 64), 13 + 1 + 3 + 1 + 2 * 3),
        (crosscat(lambda z, v: z[v[d * 99]].T, 8, 512), 13 + 1 + 3 + 1 + 2 * 4),
    ],
)
def test_few_evaluations(monkeypatch, model, most):
    # A mixture without views costs what it did; elements are told apart by digits.
    calls = []
    evaluate = Prober.evaluate

    def counted(self, *args):
        calls.append(args)
        return evaluate(self, *args)

    monkeypatch.setattr(Prober, "evaluate", counted)
    x = np.random.default_rng(1).normal(size=(50, D)).astype(np.float32)
    planning.recognise(model, (x,), {})
    assert len(calls) == most + _NUM_VARIED[0][1]


# --- Hyperparameters ---


def with_hyper(hyper, spoil=None):
    """A CrossCat with hyperparameters: `hyper` draws those of the rows, and `z`."""

    def model(x):
        view = features()
        with numpyro.plate("views", V):
            z, values = hyper(len(x))
        var = dist.InverseGamma(2.0, spoil(values) if spoil else 1.0).expand([K, D])
        var = numpyro.sample("var", var)
        loc = numpyro.sample("loc", dist.Normal(0.0, jnp.sqrt(var / 0.1)))
        k = z[view].T
        numpyro.sample("x", dist.Normal(loc[k, d], jnp.sqrt(var[k, d])), obs=x)

    return model


def by_view(n, prior=lambda: dist.Gamma(1.0, 1.0), law=ChineseRestaurantProcess):
    a = numpyro.sample("a", prior())
    return numpyro.sample("z", law(a, size=n)), a


def chained(n):
    b = numpyro.sample("b", dist.Gamma(1.0, 1.0))
    a = numpyro.sample("a", dist.Gamma(2.0, b))
    return numpyro.sample("z", ChineseRestaurantProcess(a, size=n)), a


def vectors(n):
    a = numpyro.sample("a", dist.Gamma(1.0, 1.0).expand([2]).to_event(1))
    return numpyro.sample("z", PitmanYorProcess(a.sum(-1), 0.1, size=n)), a


def mfm(a, size):
    return MixtureOfFiniteMixtures(a, dist.Poisson(1.0), size=size)


def finite(a, size):
    return FiniteDirichletMixture(a, num_components=3, size=size)


def grid():
    return Grid(jnp.array([0.5, 1.0, 2.0]))


PER_VIEW = {
    "one": (by_view, ["a"]),
    "chain": (chained, ["b", "a"]),
    "vectors": (vectors, ["a"]),
    "grid": (lambda n: by_view(n, grid), ["a"]),
    "finite": (lambda n: by_view(n, law=finite), ["a"]),
    "mixture of finite": (lambda n: by_view(n, law=mfm), ["a"]),
}


@pytest.mark.parametrize("hyper, names", PER_VIEW.values(), ids=PER_VIEW.keys())
def test_hyperparameters_of_views(hyper, names):
    plan = planning.recognise(with_hyper(hyper), (X,), {})
    assert [(s.name, s.per_view) for s in plan.hyper] == [(n, "z") for n in names]


def test_other_hyperparameters_are_not_of_views():
    def model(x):
        b = numpyro.sample("b", dist.Gamma(1.0, 1.0))
        c = numpyro.sample("c", dist.Gamma(1.0, 1.0))
        e = numpyro.sample("e", dist.Gamma(1.0, 1.0).expand([D]))
        view = numpyro.sample("view", ChineseRestaurantProcess(b, size=D))
        with numpyro.plate("views", V):
            z = numpyro.sample("z", ChineseRestaurantProcess(c, size=len(x)))
        var = numpyro.sample("var", dist.InverseGamma(2.0, e).expand([K, D]))
        loc = numpyro.sample("loc", dist.Normal(0.0, jnp.sqrt(var / 0.1)))
        k = z[view].T
        numpyro.sample("x", dist.Normal(loc[k, d], jnp.sqrt(var[k, d])), obs=x)

    plan = planning.recognise(model, (X,), {})
    assert {s.name: s.factors for s in plan.hyper} == {
        "b": ("b", "view"),
        "c": ("c", "z"),
        "e": ("e", "x"),
    }
    assert not any(s.per_view for s in plan.hyper)


def test_hyperparameters_of_known_views_may_be_anything():
    def model(x):
        with numpyro.plate("views", V):
            a = numpyro.sample("a", dist.Gamma(jnp.arange(1.0, V + 1), 1.0))
            z = numpyro.sample("z", ChineseRestaurantProcess(a, size=len(x)))
        var = dist.InverseGamma(2.0, a[0]).expand([K, D])
        var = numpyro.sample("var", var)
        loc = numpyro.sample("loc", dist.Normal(0.0, jnp.sqrt(var / 0.1)))
        k = z[jnp.array([0, 1, 2, 1, 0])].T
        numpyro.sample("x", dist.Normal(loc[k, d], jnp.sqrt(var[k, d])), obs=x)

    (site,) = planning.recognise(model, (X,), {}).hyper
    assert (site.name, site.per_view, site.factors) == ("a", None, ("a", "z", "x"))


def test_two_rows_partitions_and_hyperparameters_of_each():
    def model(x, y):
        for name, value in (("x", x), ("y", y)):
            view = features(D, f"view_{name}")
            with numpyro.plate(f"views_{name}", V):
                a = numpyro.sample(f"a_{name}", dist.Gamma(1.0, 1.0))
                prior = ChineseRestaurantProcess(a, size=len(x))
                z = numpyro.sample(f"z_{name}", prior)
            normals(name, value, z[view].T)

    plan = planning.recognise(model, (X, X), {})
    assert {s.name: s.per_view for s in plan.hyper} == {"a_x": "z_x", "a_y": "z_y"}


# What views' priors may be drawn as, if they are the same.


@pytest.mark.parametrize(
    "prior",
    [
        lambda: ChineseRestaurantProcess(1.0, size=N).expand([V]),
        lambda: PitmanYorProcess(jnp.ones(V), 0.1, size=N),
        lambda: FiniteDirichletMixture(jnp.ones(V), num_components=3, size=N),
    ],
)
def test_views_without_a_plate(prior):
    model = crosscat(draw=lambda *_, num_rows: numpyro.sample("z", prior()))
    assert summary(planning.recognise(model, (X,), {})) == [("z", N, V, "view", D)]


# --- Refused: sites and shapes ---


def refused(model, *args, **kwargs):
    with pytest.raises(NotRecognised) as error:
        planning.recognise(model, args, kwargs)
    return str(error.value)


def three_behind(x):
    k = rows()[features(D, "u")[features(D, "w") % D]].T
    normals("x", x, k)


def without_views(x):
    normals("x", x, (rows(None)[:, None] + features()) % K)


def both_with_views(x):
    normals("x", x, rows(V, "a")[rows(V, "b", D)[0] % V].T)


def in_two_plates(x):
    with numpyro.plate("outer", 2, dim=-2):
        z = rows()
    normals("x", x, z[0, 1][:, None])


def unused_features(x):
    features()
    normals("x", x, rows()[0][:, None])


def unused_rows(x):
    rows(V, "other")
    normals("x", x, rows()[features()].T)


def shared_features(x, y):
    view = features()
    normals("x", x, rows(V, "a")[view].T)
    normals("y", y, rows(V, "b")[view].T)


def shared_rows(x, y):
    z = rows()
    normals("x", x, z[features(D, "u")].T)
    normals("y", y, z[features(D, "w")].T)


def partly_latent_sites(x, y):
    z = rows()
    normals("x", x, z[features()].T)
    normals("y", y, z[jnp.array([0, 1, 0, 1, 0])].T)


def features_as_rows(x, y):
    view = features()
    normals("x", x, rows()[view].T)
    normals("y", y, view[:, None])


def rows_as_features(x, y):
    view = features()
    normals("y", y, view[:, None])
    normals("x", x, rows()[view].T)


def rows_of_two_sizes(x, y):
    normals("x", x, rows(None, "a")[:, None])
    normals("y", y, rows(None, "b", num_rows=4)[:, None])


def factor_of_features(x):
    view = features()
    normals("x", x, rows()[view].T)
    numpyro.factor("penalty", -(view == 0).sum().astype(float))


def labelled(shape, num_views=None):
    """A categorical site of assignments `label` beside, or without, a partition."""

    def model(x):
        fn = dist.Categorical(jnp.ones(K) / K).expand(shape)
        label = numpyro.sample("label", fn)
        if num_views is None and shape == [V, N]:
            k = label[jnp.zeros(D, int)].T
        elif shape == [N]:
            var_k = label[:, None]
            var = numpyro.sample("var", dist.InverseGamma(2.0, 1.0).expand([K, D]))
            loc = numpyro.sample("loc", dist.Normal(0.0, jnp.sqrt(var / 0.1)))
            fn = dist.Normal(loc[rows(None)[:, None], d], jnp.sqrt(var[var_k, d]))
            return numpyro.sample("x", fn, obs=x)
        else:
            k = rows(num_views)[label % V].T
        normals("x", x, k)

    return model


def two_labelled(x, y):
    for name, value in (("x", x), ("y", y)):
        fn = dist.Categorical(jnp.ones(K) / K).expand([N])
        normals(name, value, numpyro.sample(f"label_{name}", fn)[:, None])


def zero_views(x):
    z = numpyro.sample("z", PitmanYorProcess(jnp.ones(0), 0.1, size=N))
    normals("x", x, z.sum() + features())


def zero_elements(x):
    normals("x", x, rows()[features(0).sum() + jnp.zeros(D, int)].T)


def one_cluster(x):
    var = numpyro.sample("var", dist.InverseGamma(2.0, 1.0).expand([1, D]))
    loc = numpyro.sample("loc", dist.Normal(0.0, jnp.sqrt(var / 0.1)))
    k = rows()[features()].T
    numpyro.sample("x", dist.Normal(loc[k, d], jnp.sqrt(var[k, d])), obs=x)


def one_cluster_known_views(x):
    var = numpyro.sample("var", dist.InverseGamma(2.0, 1.0).expand([1, D]))
    loc = numpyro.sample("loc", dist.Normal(0.0, jnp.sqrt(var / 0.1)))
    k = rows()[jnp.array([0, 1, 2, 1, 0])].T
    numpyro.sample("x", dist.Normal(loc[k, d], jnp.sqrt(var[k, d])), obs=x)


def clusters_by_view(x):
    z, view = rows(), features()
    var = numpyro.sample("var", dist.InverseGamma(2.0, 1.0).expand([V, K, D]))
    loc = numpyro.sample("loc", dist.Normal(0.0, jnp.sqrt(var / 0.1)))
    k = z[view].T
    fn = dist.Normal(loc[view, k, d], jnp.sqrt(var[view, k, d]))
    numpyro.sample("x", fn, obs=x)


def bad_concentration(x):
    view = numpyro.sample("view", ChineseRestaurantProcess(-1.0, size=D))
    normals("x", x, rows()[view].T)


REFUSED = {
    "three behind": (
        three_behind,
        (X,),
        ["'x'", "3 partition sites", "'u'", "'w'", "'z'", "exactly one"],
    ),
    "neither has views": (
        without_views,
        (X,),
        ["'x'", "'z' of shape (7,)", "'view' of shape (5,)", "two axes", "plate"],
    ),
    "both have views": (
        both_with_views,
        (X,),
        ["'x'", "'a' of shape (3, 7)", "'b' of shape (3, 5)", "exactly one"],
    ),
    "two plates": (in_two_plates, (X,), ["'z'", "(2, 3, 7)", "two, views and rows"]),
    "features unused": (
        unused_features,
        (X,),
        ["No observed site", "'view'", "z[view].T"],
    ),
    "rows unused": (unused_rows, (X,), ["No observed site", "'other'"]),
    "features of two": (shared_features, (X, X), ["'view'", "'a'", "'b'", "own"]),
    "rows of two": (shared_rows, (X, X), ["'z'", "'u'", "'w'", "'x'", "'y'"]),
    "partly latent": (partly_latent_sites, (X, X), ["'z'", "'view'", "none", "'y'"]),
    "features as rows": (
        features_as_rows,
        (X, X[:D]),
        ["'view'", "the rows of observed site 'y'", "the features of 'x'"],
    ),
    "rows as features": (
        rows_as_features,
        (X, X[:D]),
        ["'view'", "the features of observed site 'x'", "the rows of 'y'"],
    ),
    "rows of two sizes": (rows_of_two_sizes, (X, X[:4]), ["'a'", "'b'", "7 and 4"]),
    "factor": (factor_of_features, (X,), ["'penalty'", "'view'", "actor"]),
    "labels with views": (
        labelled([V, N]),
        (X,),
        ["'label'", "(3, 7)", "FiniteDirichletMixture"],
    ),
    "labels beside a partition": (
        labelled([N]),
        (X,),
        ["'label'", "'x'", "FiniteDirichletMixture"],
    ),
    "labels of features": (
        labelled([D], V),
        (X,),
        ["'label'", "'x'", "FiniteDirichletMixture"],
    ),
    "two of labels": (two_labelled, (X, X), ["exactly one", "FiniteDirichletMixture"]),
    "zero views": (zero_views, (X,), ["'z'", "zero views"]),
    "no views in a plate": (crosscat(num_views=0), (X,), ["'views_z'", "size 0"]),
    "no elements": (zero_elements, (X,), ["'view'", "zero rows or features"]),
    "no rows": (crosscat(), (X[:0],), ["zero rows or features"]),
    "one view": (crosscat(num_views=1), (X,), ["'z'", "one view", "at least 2"]),
    "one cluster": (one_cluster, (X,), ["'var'", "'z'", "at least 2"]),
    "one cluster, known views": (one_cluster_known_views, (X,), ["'z'", "at least 2"]),
    "clusters by view": (
        clusters_by_view,
        (X,),
        ["'var'", "(3, 4, 5)", "no axis of views"],
    ),
    "bad concentration": (bad_concentration, (X,), ["'view'", "`concentration`", "-1"]),
}


@pytest.mark.parametrize("model, args, words", REFUSED.values(), ids=REFUSED.keys())
def test_refused(model, args, words):
    message = refused(model, *args)
    missing = [word for word in words if word not in message]
    assert not missing, message


# --- Refused: what features are indexed by ---


def wrong(code, num_views=V, elements=D):
    """A CrossCat whose likelihood is the `code`."""
    names = {"jnp": jnp, "dist": dist, "d": d, "V": V, "K": K}
    fn = eval(f"lambda loc, var, k, view: {code}", names)
    return crosscat(num_views=num_views, elements=elements, indexed=fn)


RIGHT = "dist.Normal(loc[k, d], jnp.sqrt(var[k, d]))"
MISPLACED = {
    "not transposed": (
        crosscat(lambda z, v: z[v]),
        SQUARE,
        ["'x'", "different rows", "'z'", "`var_x[z[view].T, jnp.arange(D)]`"],
    ),
    "rows by view": (
        crosscat(lambda z, v: z.T[v].T, num_views=D),
        SQUARE,
        ["'x'", "different rows"],
    ),
    "no views": (
        crosscat(lambda z, v: z[0][:, None] + 0 * v),
        X,
        ["Column 0 of observed site 'x'", "one element of 'view'", "fixed"],
    ),
    "some known views": (
        crosscat(lambda z, v: z[v.at[3].set(2)].T),
        X,
        ["Column 3 of observed site 'x'", "one element of 'view'", "fixed"],
    ),
    "next view": (
        crosscat(lambda z, v: z[(v + 1) % V].T),
        X,
        ["of observed site 'x'", "one element of 'view'"],
    ),
    "view of a view": (
        crosscat(lambda z, v: z[v[v]].T),
        X,
        ["of observed site 'x'", "one element of 'view'"],
    ),
    "larger of two": (
        crosscat(lambda z, v: z[jnp.maximum(v, v[4])].T),
        X,
        ["of observed site 'x'", "one element of 'view'"],
    ),
    "sum of two views": (
        crosscat(lambda z, v: ((z[v] + z[v[0]]) % K).T),
        X,
        ["Column 1 of observed site 'x'", "several"],
    ),
    "views and none": (
        crosscat(lambda z, v: jnp.where(d == 2, 1, z[v].T)),
        X,
        ["Column 2 of observed site 'x'", "does not depend on the cluster"],
    ),
    "another row": (
        crosscat(lambda z, v: jnp.roll(z, 1, axis=1)[v].T),
        X,
        ["Column 0 of observed site 'x'", "another row", "its own"],
    ),
    "two known views": (
        fixed(lambda z: (z[0] + z[2])[:, None] % K),
        X,
        ["Column 0 of observed site 'x'", "several", "(3, 7)", "plate"],
    ),
    "known view by row": (
        fixed(lambda z: z[jnp.arange(N) % V, jnp.arange(N)][:, None]),
        X,
        ["Column 0 of observed site 'x'", "different rows"],
    ),
    "all rows alike": (
        fixed(lambda z: z[1, :1][:, None] + jnp.zeros((N, 1), int)),
        X,
        ["Column 0 of observed site 'x'", "another row"],
    ),
    # What is wrong whatever the views.
    "not indexed": (
        wrong("dist.Normal(loc[0], jnp.sqrt(var[0]) + 0 * k)"),
        X,
        ["'x'", "does not depend on the cluster", "`var_x[z[view].T, jnp.arange(D)]`"],
    ),
    "loc not indexed": (
        wrong("dist.Normal(loc[0] + 0 * k, jnp.sqrt(var[k, d]))"),
        X,
        ["`loc`", "'x'", "does not depend on the cluster", "`loc_x[z[view].T, "],
    ),
    "another feature's": (
        wrong("dist.Normal(loc[k, d[::-1]], jnp.sqrt(var[k, d]))"),
        X,
        ["`loc`", "'x'", "expected"],
    ),
    "the first feature's": (
        wrong("dist.Normal(loc[k, 0], jnp.sqrt(var[k, d]))"),
        X,
        ["`loc`", "'x'", "expected"],
    ),
    "coupled clusters": (
        wrong("dist.Normal(jnp.cumsum(loc, 0)[k, d], jnp.sqrt(var[k, d]))"),
        X,
        ["coupled", "`loc`", "'x'", "'loc_x'"],
    ),
    "covariate": (
        wrong("dist.Normal(loc[k, d] + jnp.arange(7.0)[:, None], jnp.sqrt(var[k, d]))"),
        X,
        ["`loc`", "'x'", "between rows", "covariates"],
    ),
    "variance as scale": (
        wrong("dist.Normal(loc[k, d], var[k, d])"),
        X,
        ["`scale`", "'x'", "sqrt(var[z])"],
    ),
    "next cluster": (
        wrong("dist.Normal(loc[(k + 1) % K, d], jnp.sqrt(var[k, d]))"),
        X,
        ["`loc`", "'x'"],
    ),
    "view as a number": (
        wrong("dist.Normal(loc[k, d] + view, jnp.sqrt(var[k, d]))"),
        X,
        ["`loc`", "'x'", "'view' itself"],
    ),
    "how many share a view": (
        wrong(
            "dist.Normal(loc[k, d], jnp.sqrt(var[k, d])"
            " * (view[:, None] == view).sum(0))"
        ),
        X,
        ["`scale`", "'x'", "'view' itself"],
    ),
}


@pytest.mark.parametrize("model, x, words", MISPLACED.values(), ids=MISPLACED.keys())
def test_wrongly_indexed(model, x, words):
    message = refused(model, x)
    missing = [word for word in words if word not in message]
    assert not missing, message


def test_the_right_likelihood_is_what_wrong_ones_are_held_against():
    plan = planning.recognise(wrong(RIGHT), (X,), {})
    assert seats(plan) == {"x": in_elements(0, 1, 2, 3, 4)}


@pytest.mark.parametrize("num_views", [2, 3])
@pytest.mark.parametrize("view", [0, 1])
@pytest.mark.parametrize("num_rows", [1, 2])
def test_few_rows_do_not_make_known_views_look_latent(num_rows, num_views, view):
    model = crosscat(lambda z, v: z[view + 0 * v[:1]].T, num_views, num_views)
    assert "one element of 'view'" in refused(model, X[:num_rows, :1])


def given_by_view(x):
    view = features()
    loc = numpyro.sample("loc", dist.Normal(0.0, 3.0).expand([K, D]))
    scale = jnp.array([1.0, 2.0, 3.0])[view]
    numpyro.sample("x", dist.Normal(loc[rows()[view].T, d], scale), obs=x)


def given_by_cluster(x):
    k = rows()[features()].T
    loc = numpyro.sample("loc", dist.Normal(0.0, 3.0).expand([K, D]))
    numpyro.sample("x", dist.Normal(loc[k, d], 1.0 + k), obs=x)


def views_by_a_hyperparameter(x):
    fn = dist.DiscreteUniform(0, V - 1).expand([D])
    index = numpyro.sample("index", fn)
    normals("x", x, rows()[index].T)


def views_by_a_real_hyperparameter(x):
    u = numpyro.sample("u", dist.Normal(0.0, 1.0).expand([20]))
    normals("x", x, rows()[jnp.where((u[:D] * u[5 : D + 5]) > 0, 0, 1)].T)


@pytest.mark.parametrize(
    "model, words",
    [
        (given_by_view, ["`scale`", "'x'", "'view' itself"]),
        (given_by_cluster, ["`scale`", "'x'", "on the cluster of the row"]),
        (views_by_a_hyperparameter, ["'index'", "'x'", "partition prior"]),
        (views_by_a_real_hyperparameter, ["'x'", "one view of 'z'", "known"]),
    ],
)
def test_what_else_depends_on_views(model, words):
    message = refused(model, X)
    missing = [word for word in words if word not in message]
    assert not missing, message


# --- Refused: views that are not exchangeable ---


def outside_the_plate(x):
    view = features()
    a = numpyro.sample("a", dist.Gamma(1.0, 1.0).expand([V]))
    with numpyro.plate("views", V):
        z = numpyro.sample("z", ChineseRestaurantProcess(a, size=len(x)))
    normals("x", x, z[view].T)


def constants(values):
    def model(x):
        view = features()
        with numpyro.plate("views", len(values)):
            prior = ChineseRestaurantProcess(jnp.array(values), size=len(x))
            z = numpyro.sample("z", prior)
        normals("x", x, z[view].T)

    return model


def shifted(n):
    a = numpyro.sample("a", dist.Gamma(1.0, 1.0))
    prior = ChineseRestaurantProcess(jnp.roll(a, 1), size=n)
    return numpyro.sample("z", prior), a


def neighbours(n):
    a = numpyro.sample("a", dist.Gamma(1.0, 1.0))
    prior = ChineseRestaurantProcess(a + 0.1 * jnp.roll(a, 1), size=n)
    return numpyro.sample("z", prior), a


def in_the_likelihood(x):
    view = features()
    with numpyro.plate("views", V):
        a = numpyro.sample("a", dist.Gamma(1.0, 1.0))
        z = numpyro.sample("z", ChineseRestaurantProcess(1.0, size=len(x)))
    k = z[view].T
    loc = numpyro.sample("loc", dist.Normal(0.0, 3.0).expand([K, D]))
    numpyro.sample("x", dist.Normal(loc[k, d], a[0]), obs=x)


def views_last(x):
    view = features()
    with numpyro.plate("views", V, dim=-1):
        with numpyro.plate("twice", 2, dim=-2):
            a = numpyro.sample("a", dist.Gamma(1.0, 1.0))
        z = numpyro.sample("z", ChineseRestaurantProcess(a.sum(0), size=len(x)))
    normals("x", x, z[view].T)


def one_plate_for_two(x, y):
    u, w = features(D, "u"), features(D, "w")
    with numpyro.plate("views", V):
        a = numpyro.sample("a", dist.Gamma(1.0, 1.0))
        first = numpyro.sample("first", ChineseRestaurantProcess(a, size=len(x)))
        second = numpyro.sample("second", ChineseRestaurantProcess(1.0, size=len(x)))
    normals("x", x, first[u].T)
    normals("y", y, second[w].T)


def in_the_other_rows_prior(x, y):
    view = features()
    with numpyro.plate("views", V):
        a = numpyro.sample("a", dist.Gamma(1.0, 1.0))
        z = numpyro.sample("z", ChineseRestaurantProcess(a, size=len(x)))
    plain = numpyro.sample("plain", ChineseRestaurantProcess(a[0], size=len(x)))
    normals("x", x, z[view].T)
    normals("y", y, plain[:, None])


def in_a_hyperprior(x):
    view = features()
    with numpyro.plate("views", V):
        a = numpyro.sample("a", dist.Gamma(1.0, 1.0))
        z = numpyro.sample("z", ChineseRestaurantProcess(a, size=len(x)))
    b = numpyro.sample("b", dist.Gamma(1.0, a.sum()))
    loc = numpyro.sample("loc", dist.Normal(0.0, b).expand([K, D]))
    numpyro.sample("x", dist.Normal(loc[z[view].T, d], 1.0), obs=x)


def in_the_features_prior(x):
    with numpyro.plate("views", V):
        a = numpyro.sample("a", dist.Gamma(1.0, 1.0))
        z = numpyro.sample("z", ChineseRestaurantProcess(a, size=len(x)))
    view = numpyro.sample("view", ChineseRestaurantProcess(a.sum(), size=D))
    normals("x", x, z[view].T)


UNEQUAL = {
    "constants": (constants([1.0, 2.0, 3.0]), (X,), ["'z'", "not the same", "'view'"]),
    "one constant": (constants([1.0, 1.0, 2.0]), (X,), ["'z'", "not the same"]),
    "two views": (constants([1.0, 2.0]), (X,), ["'z'", "not the same"]),
    "outside the plate": (outside_the_plate, (X,), ["'z'", "not the same", "plate"]),
    "hyperprior": (
        with_hyper(lambda n: by_view(n, lambda: dist.Gamma(jnp.arange(1.0, 4.0), 1.0))),
        (X,),
        ["'a'", "not the same", "'z'"],
    ),
    "next one's": (with_hyper(shifted), (X,), ["'z'", "not the same"]),
    "one's neighbour": (with_hyper(neighbours), (X,), ["'z'", "not the same"]),
    "cluster prior": (
        with_hyper(by_view, lambda a: a.mean()),
        (X,),
        ["'a'", "plate 'views'", "latent site 'var'", "'view'"],
    ),
    "likelihood": (in_the_likelihood, (X,), ["'a'", "observed site 'x'", "'views'"]),
    "other rows": (in_the_other_rows_prior, (X, X), ["'a'", "latent site 'plain'"]),
    "other hyperparameter": (in_a_hyperprior, (X,), ["'a'", "latent site 'b'"]),
    "features": (in_the_features_prior, (X,), ["'a'", "latent site 'view'"]),
    "views last": (views_last, (X,), ["'a'", "(2, 3)", "only axis", "`to_event`"]),
    "one plate": (
        one_plate_for_two,
        (X, X),
        ["'a'", "'first'", "'second'", "a plate of its own"],
    ),
}


@pytest.mark.parametrize("model, args, words", UNEQUAL.values(), ids=UNEQUAL.keys())
def test_views_that_are_not_exchangeable_are_refused(model, args, words):
    message = refused(model, *args)
    missing = [word for word in words if word not in message]
    assert not missing, message


def test_a_hyperparameter_of_views_is_not_for_another_kernel():
    message = refused(whole, X, _gibbs_sites={"concentration": np.ones(8)})
    assert "'concentration'" in message and "another kernel" in message


# --- explain ---


def test_explain_tells_rows_from_features(capsys):
    explain(whole, X)
    shown = capsys.readouterr().out
    lines = {line.split()[0]: line for line in shown.splitlines() if line.strip()}
    assert "Not recognised" not in shown
    assert lines["view"].split()[1] == "features"
    assert "5 features into at most 8 views" in lines["view"]
    assert lines["z"].split()[1] == "partition" and "7 rows, 8 views" in lines["z"]
    assert "clusters of 'z' in the views of 'view'" in lines["x"]
    assert "for each view of 'z'" in lines["concentration"]


def test_explain_of_several_partitions(capsys):
    explain(two_mixtures, X, CODES)
    shown = capsys.readouterr().out
    lines = {line.split()[0]: line for line in shown.splitlines() if line.strip()}
    assert "clusters of 'a'" in lines["x"] and "clusters of 'b'" in lines["c"]
    assert "7 rows" in lines["a"] and "view" not in shown
