# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""Pairs from outside the package: that of the README, registered and sampled."""

from pathlib import Path
import re

from jax import random
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC

from numpyro_subanneal import (
    AbstractConjugatePair,
    ChineseRestaurantProcess,
    NotRecognised,
    SubsampleAnnealedGibbs,
    explain,
    register_conjugate,
    testing,
)
from numpyro_subanneal.conjugate import PAIRS, known_pairs, registry
from numpyro_subanneal.conjugate.normal import NormalInverseGamma

README = (Path(__file__).parents[1] / "README.md").read_text()


def from_readme():
    """The class that the README shows."""
    (code,) = re.findall(r"^class InverseGammaLaplace.*?(?=^\w)", README, re.M | re.S)
    names = {
        "AbstractConjugatePair": AbstractConjugatePair,
        "dist": dist,
        "jnp": jnp,
        "gammaln": __import__("jax.scipy.special", fromlist=["gammaln"]).gammaln,
    }
    exec(code, names)
    return names["InverseGammaLaplace"], code


InverseGammaLaplace, CODE = from_readme()


@pytest.fixture(autouse=True)
def registry_of_before(monkeypatch):
    monkeypatch.setattr(registry, "_registered", [])


def model(x, num_clusters=5):
    z = numpyro.sample("z", ChineseRestaurantProcess(1.0, size=len(x)))
    with numpyro.plate("columns", x.shape[1], dim=-1):
        with numpyro.plate("clusters", num_clusters, dim=-2):
            scale = numpyro.sample("scale", dist.InverseGamma(2.0, 1.5))
        with numpyro.plate("rows", len(x), dim=-2):
            numpyro.sample("x", dist.Laplace(0.5, scale[z]), obs=x)


X = np.array([[0.4, 9.0], [-3.0, 0.6], [0.6, -4.0], [5.0, 0.4], [0.5, 0.5]], np.float32)


def test_the_readmes_pair_is_short():
    assert len(CODE.splitlines()) <= 65


@pytest.mark.quickly_compiled
def test_the_readmes_pair_obeys_the_laws():
    hyper = {"loc": 0.5, "shape": 2.0, "rate": 1.5}
    examples = [
        testing.ConjugateExample(hyper, np.array([0.3, -1.2, 2.5, 0.5, 8.0])),
        testing.ConjugateExample(hyper | {"shape": 0.6}, np.array([0.5, 0.5, 1.5])),
    ]
    testing.check_conjugate(InverseGammaLaplace(), examples, num_moves=20_000)


@pytest.mark.quickly_compiled(level=1)
def test_a_registered_pair_is_sampled_exactly(capsys):
    # Against the enumeration, the marginal by quadrature over the prior's quantiles.
    # 12,000 draws of 52 partitions; false alarm 1e-3.
    with pytest.raises(NotRecognised, match="Laplace"):
        explain_or_raise(X)
    register_conjugate(InverseGammaLaplace())
    explain(model, X)
    assert "(InverseGamma)-Laplace with known loc" in capsys.readouterr().out
    scale = stats.invgamma(2.0, scale=1.5).ppf((np.arange(20_000) + 0.5) / 20_000)

    def log_marginal(x):
        total = 0.0
        for column in x.T:
            each = [stats.laplace.logpdf(v, 0.5, scale) for v in column]
            total += special.logsumexp(sum(each)) - np.log(len(scale))
        return total

    exact = testing.enumerate_posterior(
        lambda z: testing.log_eppf(z, 1.0), lambda i: log_marginal(X[i]), len(X)
    )
    mcmc = MCMC(
        SubsampleAnnealedGibbs(model),
        num_warmup=2,
        num_samples=300,
        thinning=5,
        num_chains=40,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), X)
    z = np.asarray(mcmc.get_samples()["z"])
    index = testing.partition_index(z, exact.partitions)
    assert testing.goodness_of_fit(index, exact.probs).p_value > 1e-3


def explain_or_raise(x):
    mcmc = MCMC(SubsampleAnnealedGibbs(model), num_warmup=1, num_samples=1)
    mcmc.run(random.key(0), x)


class OwnNormal(NormalInverseGamma):
    pass


def test_ones_own_pairs_come_first_and_replace_themselves():
    built_in = known_pairs()
    assert built_in == PAIRS
    own = register_conjugate(OwnNormal())
    assert known_pairs() == (own, *PAIRS)
    again = register_conjugate(OwnNormal())
    assert known_pairs() == (again, *PAIRS)
    other = register_conjugate(InverseGammaLaplace())
    assert known_pairs() == (other, again, *PAIRS)
    assert registry.for_likelihood(dist.Normal)[0] is again


def test_refusals_say_what_is_registered_and_what_differs():
    def student(x):
        z = numpyro.sample("z", ChineseRestaurantProcess(1.0, size=len(x)))
        with numpyro.plate("clusters", 3):
            loc = numpyro.sample("loc", dist.StudentT(3.0, 0.0, 1.0))
            var = numpyro.sample("var", dist.InverseGamma(2.0, 1.0))
        numpyro.sample("x", dist.Normal(loc[z], jnp.sqrt(var[z])), obs=x)

    mcmc = MCMC(SubsampleAnnealedGibbs(student), num_warmup=1, num_samples=1)
    with pytest.raises(NotRecognised) as error:
        mcmc.run(random.key(0), X[:, 0])
    message = str(error.value)
    for words in (
        "'x' ~ Normal with cluster sites",
        "(InverseGamma, Normal)-Normal (needs loc ~ Normal, has no place for 'loc' ~ ",
        "(Gamma, Normal)-Normal (needs precision ~ Gamma and loc ~ Normal",
        "(InverseGamma)-Normal with known loc (has no place for 'loc' ~ StudentT)",
    ):
        assert words in message, message


@pytest.mark.parametrize(
    "pair, word",
    [
        (InverseGammaLaplace, "needs an instance"),
        ("Laplace", "AbstractConjugatePair"),
        (None, "AbstractConjugatePair"),
    ],
)
def test_what_is_no_pair_is_refused(pair, word):
    with pytest.raises(TypeError, match=word):
        register_conjugate(pair)


@pytest.mark.parametrize(
    "attribute, value, word",
    [
        ("likelihood", dist.Laplace, "tuple"),
        ("likelihood", ("Laplace",), "tuple"),
        ("prior", [dist.InverseGamma], "dict"),
        ("prior", {"a": dist.Gamma, "b": dist.Gamma}, "different types"),
    ],
)
def test_a_pair_that_states_the_wrong_things_is_refused(attribute, value, word):
    broken = type("Broken", (InverseGammaLaplace,), {attribute: value})
    with pytest.raises(TypeError, match=word):
        register_conjugate(broken())


def test_an_incomplete_pair_cannot_be_made():
    class Incomplete(AbstractConjugatePair):
        likelihood = (dist.Laplace,)

    with pytest.raises(TypeError, match="abstract"):
        register_conjugate(Incomplete())
