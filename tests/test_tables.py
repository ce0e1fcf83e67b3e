# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""DataFrames to arrays and back: types guessed, labels kept, what is amiss named."""

from datetime import date, datetime, timedelta
from decimal import Decimal
import pickle
import time
import warnings

import jax
from jax import random
import numpy as np
from palmerpenguins import load_penguins
import pandas as pd
import pandas.testing
import pytest

from numpyro import handlers

from numpyro_subanneal import Posterior
from numpyro_subanneal.models import crosscat, mixture
from numpyro_subanneal.posterior import Imputation
from numpyro_subanneal.tables import Table, TableWarning

pl = pytest.importorskip("polars")
make = Table.from_dataframe


def types(table):
    return {c.name: c.type for c in (*table.columns, *table.ignored)}


def guess(values, **kwargs):
    """The type of one column beside another."""
    df = pd.DataFrame({"x": values, "other": np.arange(len(values)) + 0.5})
    return types(make(df, **kwargs))["x"]


def polars_of(df):
    """The same in polars, nulls for what is missing."""
    return pl.DataFrame(
        {
            c: [None if m else v for v, m in zip(df[c], df[c].isna(), strict=True)]
            for c in df
        }
    )


def cells(table, name):
    column = table.column(name)
    return table.arrays[column.type][:, column.position].tolist()


PENGUINS = {
    "species": "categorical",
    "island": "categorical",
    "bill_length_mm": "real",
    "bill_depth_mm": "real",
    "flipper_length_mm": "real",
    "body_mass_g": "real",
    "sex": "categorical",
    "year": "categorical",
}


def votes(num_rows=60):
    rng = np.random.default_rng(0)
    data = {f"v{i}": rng.choice(["y", "n", "?"], num_rows) for i in range(5)}
    return pd.DataFrame({"party": rng.choice(["d", "r"], num_rows), **data})


# --- types ---


@pytest.mark.parametrize("like", [lambda df: df, polars_of], ids=["pandas", "polars"])
def test_penguins_are_guessed(like):
    table = make(like(load_penguins()))
    assert types(table) == PENGUINS
    assert [c.missing for c in table.columns if c.type == "real"] == [2, 2, 2, 2]
    assert table.column("sex").labels == ("female", "male")
    assert table.column("year").labels == (2007, 2008, 2009)
    assert table.model_args["num_categories"] == (3, 3, 2, 3)
    sites = {c.name: (c.site, c.site_position) for c in table.columns}
    assert sites["year"] == ("categorical_3", 2)
    assert sites["sex"] == ("categorical_2", 0)
    assert sites["body_mass_g"] == ("real", 3)


def test_votes_are_guessed_and_question_marks_are_warned_of():
    df = votes()
    with pytest.warns(TableWarning, match=r"'\?' in 'v0', 'v1'.*missing=\('\?',\)"):
        table = make(df)
    assert table.column("v0").labels == ("?", "n", "y")
    table = make(df, missing="?")
    assert set(types(table).values()) == {"categorical"}
    assert table.model_args["num_categories"] == (2,) * 6
    assert table.column("v0").missing == (df["v0"] == "?").sum()
    np.testing.assert_array_equal(np.array(cells(table, "v0")) == -1, df["v0"] == "?")
    make(df, missing={f"v{i}": () for i in range(5)})  # no warning


RNG = np.random.default_rng(0)
GUESSES = {
    "bool": ([True, False] * 10, "binary"),
    "nullable bool": (pd.array([True, None] * 10, dtype="boolean"), "binary"),
    "objects": (pd.Series([True, None, False], dtype=object), "binary"),
    "zeros and ones": ([0, 1, 1] * 5, "binary"),
    "zeros": ([0] * 9, "binary"),
    "zeros and ones with a gap": ([0.0, 1.0, np.nan], "binary"),
    "two strings": (["a", "b"] * 5, "categorical"),
    "strings of few rows": (["a", "b", "c"], "categorical"),
    "constant string": (["a"] * 5, "categorical"),
    "constant integer": ([7] * 5, "real"),
    "constant float": ([5.0] * 5, "real"),
    "zero floats": ([0.0] * 5, "real"),
    "few integers": ([1, 2, 3] * 5, "categorical"),
    "few whole floats": ([1.0, np.nan, 3.0] * 9, "categorical"),
    "few integers of few rows": ([1, 2, 3] * 2, "real"),
    "counts": (RNG.poisson([[1], [11]], (2, 150)).ravel(), "count"),
    "counts with a gap": ([*map(float, RNG.poisson(4, 30)), 0.0, np.nan], "count"),
    "far from zero": (RNG.poisson(300, 200), "real"),
    "half zeros": (RNG.integers(0, 9000, 200) * (RNG.random(200) < 0.5), "real"),
    "negative integers": (RNG.integers(-30, 30, 200), "real"),
    "ages": (RNG.integers(18, 90, 200), "real"),
    "floats": (RNG.normal(size=50), "real"),
    "halves": ([0.5, 1.0, 1.5] * 9, "real"),
    "decimals": ([Decimal("1.5"), Decimal("2.5"), None], "real"),
    "sorted strings of few rows": ([f"r{i}" for i in range(19)], "categorical"),
}


@pytest.mark.parametrize("values, expected", GUESSES.values(), ids=GUESSES)
def test_guess(values, expected):
    assert guess(values) == expected


def test_most_categories_are_settable():
    assert guess([*range(20)] * 9, max_categories=20) == "categorical"
    assert guess([*range(20)] * 9, max_categories=19) == "count"
    assert guess([1, 2, 3] * 9, max_categories=0) == "real"


def test_types_are_settable_and_strings_are_read_as_numbers():
    df = pd.DataFrame(
        {
            "age": ["31", "?", "40"],
            "sex": ["m", "f", "m"],
            "n": [3, 1, 2],
            "flag": [True, False, True],
            "code": [1.0, 2.0, 1.0],
        }
    )
    given = {"age": "real", "sex": "binary", "n": "count", "flag": "categorical"}
    table = make(df, given | {"code": "ignore"}, missing={"age": "?"})
    assert types(table) == given | {"code": "ignore"}
    np.testing.assert_array_equal(cells(table, "age"), [31, np.nan, 40])
    assert cells(table, "sex") == [1, 0, 1]
    assert cells(table, "n") == [3, 1, 2]
    assert cells(table, "flag") == [1, 0, 1]
    assert table.decode()["age"].dtype == "float64"
    assert [c.why for c in table.ignored] == ["given"]
    assert cells(table.encode(df.assign(age=["1", " 2", "3e0"])), "age") == [1, 2, 3]
    with pytest.raises(ValueError, match="'age' has the value '1_0', which is no"):
        table.encode(df.assign(age=["1", "1_0", "3"]))


def test_labels_may_be_given_beyond_those_seen():
    df = pd.DataFrame({"grade": ["b", "a"], "stars": [5, 3]})
    table = make(df, {"grade": ["c", "b", "a"], "stars": range(1, 6)})
    assert table.model_args["num_categories"] == (3, 5)
    assert cells(table, "grade") == [1, 2] and cells(table, "stars") == [4, 2]
    with pytest.raises(ValueError, match="'stars' has 5, .*labels 1, 2, 3;.*missing"):
        make(df, {"stars": [1, 2, 3]})
    of_numpy = make(df, {"grade": np.array(["c", "b", "a"])})
    assert cells(of_numpy, "grade") == [1, 2]
    for bad in ([], ["a", "a"], ["a", "b", None], [["a"], ["b"]]):
        with pytest.raises(ValueError, match="labels of column 'grade'"):
            make(df, {"grade": bad})


def test_categories_of_the_dataframe_are_kept_in_their_order():
    low = pd.Categorical(["low", None], ["low", "mid", "high"], ordered=True)
    table = make(pd.DataFrame({"x": low, "y": low.as_unordered()}))
    assert table.column("x").labels == table.column("y").labels
    assert table.column("x").labels == ("low", "mid", "high")
    kind = pl.Enum(["low", "mid", "high"])
    table = make(pl.DataFrame({"x": pl.Series(["high", None], dtype=kind)}))
    assert table.column("x").labels == ("low", "mid", "high")
    assert cells(table, "x") == [2, -1]
    # A binary column may have two of them.
    two = pd.DataFrame({"x": pd.Categorical(["b", "c"], ["a", "b", "c"])})
    assert make(two, {"x": "binary"}).column("x").labels == ("b", "c")
    # Codes of missing cells are no categories, whether they are seen or not.
    odd = pd.Categorical(["low", "?"], ["low", "?", "NA"])
    table = make(pd.DataFrame({"x": odd}), missing=("?", "NA"))
    assert table.column("x").labels == ("low",)


def test_columns_that_name_rows_are_warned_of():
    n = 30
    rng = np.random.default_rng(0)
    df = pd.DataFrame(
        {
            "name": [f"r{i}" for i in range(n)],
            "id": np.arange(n) * 3 + 7,
            "shuffled": rng.permutation(n) + 1,
            "x": rng.normal(size=n),
            "sorted": np.sort(rng.normal(size=n)),
        }
    )
    with pytest.warns(TableWarning, match="'name'.*'id'.*'shuffled'.*index='name'"):
        table = make(df)
    ignored = ["name", "id", "shuffled"]
    assert [c.name for c in table.ignored] == ignored
    assert list(table.decode()) == ["x", "sorted"]
    table = make(df, {"id": "ignore", "shuffled": "real"}, index="name")
    assert table.index.tolist() == df["name"].tolist()
    assert types(table)["shuffled"] == "real"
    assert make(df, dict.fromkeys(ignored, "categorical")).ignored == ()


def test_columns_without_cells_are_left_out_with_a_warning():
    df = pd.DataFrame({"x": [1.5, 2.5], "none": [None, np.nan], "nan": [np.nan] * 2})
    with pytest.warns(TableWarning, match="no cell is observed: 'none', 'nan'"):
        table = make(df)
    assert [c.name for c in table.columns] == ["x"]
    table = make(df, {"none": "real", "nan": "count"})
    assert np.isnan(cells(table, "none")).all() and cells(table, "nan") == [-1, -1]
    with pytest.raises(ValueError, match="'nan' has no observed cell.*labels"):
        make(df, {"none": "ignore", "nan": "categorical"})
    table = make(df, {"none": "ignore", "nan": ["a"]})
    assert cells(table, "nan") == [-1, -1]


def test_strings_that_are_numbers_and_rare_categories_are_warned_of():
    df = pd.DataFrame({"age": ["31", "40", "?"], "x": [0.5, 1, 2]})
    with pytest.warns(TableWarning, match="are numbers.*'age'.*'real'"):
        make(df, missing="?")
    make(df, {"age": "categorical"}, missing="?")
    owners = [f"o{i % 40}" for i in range(100)]
    with pytest.warns(TableWarning, match=r"5 cells a category: 'owner' \(40\)"):
        make(pd.DataFrame({"owner": owners}))
    make(pd.DataFrame({"owner": owners}), {"owner": "categorical"})


# --- missing cells ---


def test_whatever_is_missing_in_a_dataframe_is_recognised():
    df = pd.DataFrame(
        {
            "none": pd.Series(["a", None, "b"], dtype=object),
            "nan": pd.Series(["a", np.nan, "b"], dtype=object),
            "na": pd.array([1, pd.NA, 0], dtype="Int64"),
            "float": pd.array([1.5, pd.NA, 0], dtype="Float64"),
            "bool": pd.array([True, pd.NA, False], dtype="boolean"),
            "string": pd.array(["a", pd.NA, "b"], dtype="string"),
            "nat": pd.to_datetime(["2020-01-01", None, "2021-01-01"]),
            "category": pd.Categorical(["a", None, "b"]),
            "real": [0.5, np.nan, 1],
        }
    )
    table = make(df, {"nat": "categorical"})
    assert {c.name: c.missing for c in table.columns} == dict.fromkeys(df, 1)
    data = {
        "s": ["a", None, "b"],
        "i": [1, None, 0],
        "f": [1.5, None, float("nan")],
        "b": [True, None, False],
        "c": pl.Series(["a", None, "b"], dtype=pl.Categorical),
        "d": [Decimal("1.50"), None, Decimal("2.25")],
    }
    table = make(pl.DataFrame(data))
    assert [c.missing for c in table.columns] == [2, 1, 1, 1, 1, 1]


def test_codes_of_missing_cells():
    df = pd.DataFrame(
        {
            "age": [31, -99, 40],
            "mass": np.array([1.5, -99.9, 2.5], np.float32),
            "word": ["a", "", "-99"],
            "flag": [True, False, True],
            "mixed": [1, "?", 3],
        }
    )
    table = make(df, missing=("?", -99, -99.9, "", 1))
    # Numbers are no strings, and true is not 1.
    missing = {c.name: c.missing for c in table.columns}
    assert missing == {"age": 1, "mass": 1, "word": 1, "flag": 0, "mixed": 2}
    objects = pd.DataFrame({"x": pd.Series([True, None, False], dtype=object)})
    assert make(objects, missing=1).column("x").missing == 1
    # A string is one code.
    letters = pd.DataFrame({"x": ["N", "A", "NA"]})
    assert make(letters, missing="NA").column("x").labels == ("A", "N")
    with pytest.warns(TableWarning, match="'' in 'word'"):
        table = make(df, missing={"age": -99, "mixed": ["?"], "mass": {-99.9}})
    missing = {c.name: c.missing for c in table.columns}
    assert missing == {"age": 1, "mass": 1, "word": 0, "flag": 0, "mixed": 1}
    new = pd.DataFrame(df[:0], copy=True)
    new.loc[0] = [-99, 1.5, "a", True, "?"]
    assert make(df, missing=("?", -99, "")).encode(new).column("mixed").missing == 1
    with pytest.raises(ValueError, match="no column 'agee'; columns are 'age'"):
        make(df, missing={"agee": -99})


SUSPECTS = {
    "negative": [-99, -99, 3, 5, 20, 40],
    "minus one": [-1, -1, 3, 5, 20, 40],
    "large": [999, 999, 3, 5, 20, 40],
    "floats": [-999.0, -999.0, 3.5, -5.5, 20.5, np.nan],
    "unsigned": np.array([9999, 9999, 3, 5, 20, 40], np.uint16),
}
INNOCENT = {
    "once": [-99, 3, 5, 20, 40],
    "near others": [99, 99, 3, 5, 20, 40, 70, 90],
    "negative too": [-1, -1, -3, 5, 20, 40],
    "few values": [-1, -1, 0, 1, 1],
    "another number": [-77, -77, 3, 5, 20, 40],
}


@pytest.mark.parametrize("values", SUSPECTS.values(), ids=SUSPECTS)
def test_suspicious_numbers_are_warned_of_and_not_taken_as_missing(values):
    df = pd.DataFrame({"x": values})
    code = df["x"][0].item()
    with pytest.warns(TableWarning, match=rf"{code} in 'x'.*missing=\({code},\)"):
        table = make(df)
    assert cells(table, "x")[0] == code
    assert make(df, missing=code).column("x").missing > 1
    make(df, missing={"x": ()})


@pytest.mark.parametrize("values", INNOCENT.values(), ids=INNOCENT)
def test_other_numbers_are_not_suspicious(values):
    make(pd.DataFrame({"x": values}))


@pytest.mark.parametrize("word", ["?", "NA", " n/a ", "", "None", "-"])
def test_suspicious_strings_are_warned_of_and_not_taken_as_missing(word):
    with pytest.warns(TableWarning, match="may stand for missing"):
        table = make(pd.DataFrame({"x": ["a", word, "b"]}))
    assert table.column("x").missing == 0 and len(table.column("x").labels) == 3


# --- arrays ---


def test_arrays_are_those_of_the_models():
    df = pd.DataFrame({"n": [3, 7], "b": [True, None], "c": ["v", "u"], "r": [0.5, 1]})
    args = make(df, {"n": "count"}).model_args
    assert list(args) == ["real", "categorical", "binary", "count", "num_categories"]
    dtypes = {k: x.dtype for k, x in args.items() if k != "num_categories"}
    assert dtypes.pop("real") == np.float32
    assert set(dtypes.values()) == {np.dtype(np.int32)}
    assert all(x.flags.c_contiguous for k, x in args.items() if k in dtypes)
    assert args["binary"].tolist() == [[1], [-1]]
    assert args["categorical"].tolist() == [[1], [0]]
    only = make(df[["r"]])
    assert list(only.model_args) == ["real"] and only.model_args["real"].shape == (2, 1)
    with jax.enable_x64(True):
        assert make(df).arrays["real"].dtype == np.float64


@pytest.mark.parametrize("model", [mixture.mixed, crosscat.mixed])
def test_the_models_take_a_table(model):
    table = make(load_penguins()[::20].assign(n=1), {"n": "count"})
    trace = {}

    def run():
        seeded = handlers.trace(handlers.seed(model, 0))
        trace.update(seeded.get_trace(**table.model_args, num_clusters=3))

    jax.eval_shape(run)
    for column in table.columns:
        assert trace[column.site]["is_observed"]
        obs = trace[column.site]["value"][:, column.site_position]
        np.testing.assert_array_equal(obs, cells(table, column.name))


def test_model_order_is_by_type_then_as_in_the_dataframe():
    df = pd.DataFrame({"c": ["v", "u"], "s": [0.5, 1], "b": [True, False], "r": [2, 3]})
    table = make(df, {"r": "real"})
    assert [c.name for c in table.columns] == ["s", "r", "c", "b"]
    assert [c.position for c in table.columns] == [0, 1, 0, 0]
    assert list(table.decode()) == list(df)


def test_columns_are_found_in_the_sites_of_the_models():
    df = pd.DataFrame(
        {
            "a": ["u", "v", "w", "u"],
            "b": [0.5, 1.5, 2.5, 3.5],
            "c": ["x", "y", "x", "y"],
            "d": [1.5, 0.5, 3.5, 2.5],
            "e": ["r", "s", "t", "t"],
            "f": [None] * 4,
        }
    )
    table = make(df, types={"c": "categorical", "f": "ignore"})
    found = table.sites("e", "d", "c", "a")
    assert found == {"categorical_3": [1, 0], "real": [1], "categorical_2": [0]}
    # The places are those in the values that the models observe.
    with handlers.seed(rng_seed=0):
        trace = handlers.trace(mixture.mixed).get_trace(**table.model_args)
    for site, places in found.items():
        for place in places:
            (name,) = (n for n in "abcde" if table.sites(n) == {site: [place]})
            own = cells(table, name)
            assert trace[site]["value"][:, place].tolist() == own
    with pytest.raises(ValueError, match="'f' is ignored: "):
        table.sites("b", "f")
    with pytest.raises(ValueError, match="'g'"):
        table.sites("g")


def test_wide_tables_are_encoded_fast():
    n, rng = 100_000, np.random.default_rng(0)
    letters = np.array(list("abcdefghij"))
    df = pd.DataFrame(
        {
            **{f"s{i}": letters[rng.integers(10, size=n)] for i in range(10)},
            **{f"i{i}": rng.integers(8, size=n) for i in range(10)},
            **{f"f{i}": rng.normal(size=n) for i in range(10)},
            **{f"c{i}": rng.poisson(9, size=n) for i in range(10)},
        }
    )
    start = time.process_time()
    table = make(df)
    assert time.process_time() - start < 2
    assert [len(x.T) for x in table.arrays.values()] == [10, 20, 10]


# --- back ---


def everything():
    text = ["u", None, "w", "u"]
    return pd.DataFrame(
        {
            "float": [0.1, np.nan, 39.1, -1e-3],
            "float32": np.array([0.1, 2, 39.1, 5], np.float32),
            "Float64": pd.array([0.1, None, 3, 4], dtype="Float64"),
            "int": [2, 9, 4, 3],
            "uint8": np.array([2, 9, 4, 255], np.uint8),
            "Int64": pd.array([2, None, 4, 3], dtype="Int64"),
            "bool": [True, False, True, True],
            "boolean": pd.array([True, None, False, True], dtype="boolean"),
            "str": text,
            "object": pd.Series(text, dtype=object),
            "string": pd.array(text, dtype="string"),
            "category": pd.Categorical(text, categories=["w", "x", "u"]),
            "ordered": pd.Categorical(text, categories=["w", "u"], ordered=True),
            "of ints": pd.Categorical([3, None, 1, 3]),
            "cut": pd.cut([1, 2, 3, np.nan], 2),
            "when": pd.to_datetime(["2020-01-01", None, "2021-01-01", "2020-01-01"]),
            "binary": [0, 1, 1, 0],
        }
    )


GIVEN = {"when": "categorical", "uint8": "count", "Int64": "count"}


@pytest.mark.parametrize(
    "index",
    [
        None,
        ["r", "q", "r", "p"],
        [30, 10, 20, 0],
        pd.MultiIndex.from_tuples([("a", 1), ("a", 2), ("b", 1), ("b", 2)]),
        pd.Index(pd.array([1, None, 3, 4], dtype="Int64"), name="number"),
        pd.date_range("2020-01-01", periods=4, name="day"),
    ],
    ids=["none", "strings", "shuffled", "multi", "nullable", "dates"],
)
def test_pandas_round_trip(index):
    df = everything()
    if index is not None:
        df.index = index
    table = make(df, GIVEN)
    pandas.testing.assert_frame_equal(table.decode(), df)
    again = table.encode(df.iloc[::-1, ::-1])
    pandas.testing.assert_frame_equal(again.decode(), df.iloc[::-1])
    np.testing.assert_array_equal(again.index, table.index[::-1])


def test_polars_round_trip():
    text = ["u", None, "w", "u"]
    moments = [datetime(2020, 1, 1), None, datetime(2021, 1, 1), datetime(2020, 1, 1)]
    df = pl.DataFrame(
        {
            "float": [0.1, None, 39.1, -1e-3],
            "float32": pl.Series([0.1, 2, 39.1, None], dtype=pl.Float32),
            "int": [2, None, 4, 3],
            "uint8": pl.Series([2, 9, None, 255], dtype=pl.UInt8),
            "int16": pl.Series([0, 1, 1, None], dtype=pl.Int16),
            "int128": pl.Series([5, 1, 9, None], dtype=pl.Int128),
            "bool": [True, None, False, True],
            "str": text,
            "category": pl.Series(text, dtype=pl.Categorical),
            "enum": pl.Series(text, dtype=pl.Enum(["w", "x", "u"])),
            "when": moments,
        }
    )
    table = make(df, {"when": "categorical", "uint8": "count"})
    assert table.decode().equals(df) and table.decode().schema == df.schema
    named = df.with_columns(id=pl.Series(["a", "b", "c", "d"]))
    table = make(named, {"when": "categorical"}, index="id")
    assert table.index.tolist() == ["a", "b", "c", "d"]
    assert "id" not in [c.name for c in table.columns]
    assert table.decode().equals(named)
    assert table.encode(named[::-1]).decode().equals(named[::-1])
    with pytest.raises(ValueError, match="'id', which names the rows, is not there"):
        table.encode(df)


def test_pyarrow_round_trip():
    pa = pytest.importorskip("pyarrow")
    df = pd.DataFrame(
        {
            "s": pd.array(["a", None, "b"], dtype="string[pyarrow]"),
            "i": pd.array([1, None, 2], dtype="int64[pyarrow]"),
            "d": pd.array(
                [Decimal("1.5"), None, 2], dtype=pd.ArrowDtype(pa.decimal128(5, 2))
            ),
        }
    )
    back = make(df).decode()
    pandas.testing.assert_frame_equal(back[["s", "i"]], df[["s", "i"]])
    assert back["d"].dtype == "float64"
    frame = pa.table({"s": ["a", None, "b"], "x": [0.5, None, 1.0]})
    assert make(frame).decode().equals(frame)


def test_missing_draws_of_what_cannot_be_missing_become_nullable():
    df = pd.DataFrame({"i": [3, 1, 2], "b": [True, False, True], "c": ["u", "v", "u"]})
    table = make(df, {"i": "count"})
    back = table.decode({k: np.full_like(x, -1) for k, x in table.arrays.items()})
    assert back.dtypes.tolist() == ["Int64", "boolean", df["c"].dtype]
    assert back.isna().all(axis=None)


def test_reals_of_a_column_of_integers_are_floats_where_not_whole():
    df = pd.DataFrame({"u": np.array([3, 1, 200], np.uint8), "v": [1, 5, 9]})
    table = make(df)
    pandas.testing.assert_frame_equal(table.decode(), df)
    back = table.decode({"real": np.array([[256.0, 0.5], [0, 1], [1, 2]])})
    assert back.dtypes.tolist() == ["float64", "float64"]
    assert back["u"].tolist() == [256, 0, 1]


def test_labels_beyond_the_categories_of_the_dataframe_are_kept():
    kind = pl.Enum(["a", "b"])
    for df in (
        pd.DataFrame({"x": pd.Categorical(["a", "b"])}),
        pl.DataFrame({"x": pl.Series(["a", "b"], dtype=kind)}),
    ):
        table = make(df, {"x": ["a", "b", "z"]})
        back = table.decode({"categorical": np.array([[2], [0]])})
        assert back["x"].to_list() == ["z", "a"]


def test_columns_of_sites_and_of_types_are_decoded():
    table = make(load_penguins()[:50], {"year": "categorical"})
    codes = table.arrays["categorical"]
    names = [c.name for c in table.columns if c.site == "categorical_1"]
    draw = {"categorical_1": codes[:, [table.column(n).position for n in names]]}
    back = table.decode({**draw, "z": np.zeros(50)})
    assert list(back) == names
    pandas.testing.assert_frame_equal(back, load_penguins()[names][:50])
    with pytest.raises(ValueError, match=r"no cells of columns in 'z'.*'real'"):
        table.decode({"z": 1})
    with pytest.raises(ValueError, match=r"'real' have the shape \(50, 3\).*4 column"):
        table.decode({"real": table.arrays["real"][:, :3]})
    with pytest.raises(ValueError, match=r"shape \(2, 50\).*50 rows.*decode_column"):
        table.decode({"real": np.zeros((2, 50, 4))})
    with pytest.raises(ValueError, match=r"shape \(9,\).*50 rows.*encode"):
        table.decode({"real": table.arrays["real"][:9]})


def test_draws_of_a_column_are_decoded():
    df = pd.DataFrame(
        {"s": ["u", "v"], "i": [5, 7], "b": [True, False], "n": [1, 2], "r": [0.5, 1]}
    )
    table = make(df, {"i": "categorical", "n": "count"})
    draws = np.array([[[0, 1], [1, 1]]])
    words = table.decode_column("s", draws)
    assert words.tolist() == [[["u", "v"], ["v", "v"]]]
    assert table.decode_column("i", jax.numpy.array(draws)).dtype.kind == "i"
    assert table.decode_column("b", draws).dtype == bool
    assert table.decode_column("i", [-1, 1]).tolist() == [None, 7]
    assert table.decode_column("n", [4, 0]).tolist() == [4, 0]
    np.testing.assert_array_equal(table.decode_column("n", [4, -1]), [4, np.nan])
    assert table.decode_column("r", 0.25) == 0.25
    assert table.decode_column("s", 1) == "v"
    for bad in (2, -2, 0.5, np.nan):
        with pytest.raises(ValueError, match=rf"'s' has the cell {bad};.*at most 1"):
            table.decode_column("s", [0, bad])
    with pytest.raises(ValueError, match="'n' has the cell -3"):
        table.decode_column("n", -3)
    with pytest.raises(ValueError, match="no column 't'"):
        table.decode_column("t", 0)
    with pytest.raises(ValueError, match="'r' is ignored"):
        make(df, {"r": "ignore"}).decode_column("r", 0)


# --- new rows ---


def fitted():
    df = pd.DataFrame(
        {
            "id": ["p", "q", "r"],
            "sex": ["f", "m", "f"],
            "mass": [3.5, 4.5, 5.5],
            "n": [0, 3, 4],
            "skip": [1, 2, 3],
        }
    )
    return df, make(df, {"n": "count", "skip": "ignore"}, index="id")


def test_new_rows_are_matched_by_name():
    df, table = fitted()
    new = df[["n", "mass", "id", "sex"]][2:]
    found = table.encode(new)
    assert [c.name for c in found.columns] == ["mass", "sex", "n"]
    assert found.columns[1].labels == ("f", "m") and found.index.tolist() == ["r"]
    assert {k: x.tolist() for k, x in found.arrays.items()} == {
        "real": [[5.5]],
        "categorical": [[0]],
        "count": [[4]],
    }
    assert found.model_args["num_categories"] == (2,)
    assert found.decode().to_dict("list") == {"sex": ["f"], "mass": [5.5], "n": [4]}
    assert cells(table.encode(polars_of(new)), "sex") == [0]
    # Two rows that are nearly the same are no column that cannot be resolved.
    close = pd.concat([new, new]).assign(mass=[5.5, 5.500001])
    assert table.encode(close).arrays["real"].shape == (2, 1)


def test_what_does_not_fit_of_new_rows_is_named():
    df, table = fitted()
    both = df.drop(columns="sex").assign(odd=1, sax="m")
    with pytest.raises(ValueError) as error:
        table.encode(both)
    for part in ("'sex' is not there", "absent='missing'", "'odd'", "'sax'", "extra="):
        assert part in str(error.value)
    found = table.encode(both, absent="missing", extra="ignore")
    assert cells(found, "sex") == [-1] * 3 and found.column("sex").missing == 3
    strange = df.assign(sex=["f", "x", "y"])
    with pytest.raises(ValueError, match="'sex' has 'x', 'y', .*'f', 'm'.*unseen="):
        table.encode(strange)
    found = table.encode(strange, unseen="missing")
    assert cells(found, "sex") == [0, -1, -1] and found.column("sex").missing == 2
    wrong = df.assign(mass=["3", "heavy", "4"], n=[0, -1, 2])
    with pytest.raises(ValueError) as error:
        table.encode(wrong)
    for part in ("'mass' has values that are no numbers, such as '3'", "'n'", "-1"):
        assert part in str(error.value)
    with pytest.raises(ValueError, match="'sex' has 0, 1,"):
        table.encode(df.assign(sex=[1, 0, 1]))
    with pytest.raises(ValueError, match=r"'sex' has \[1\], which is neither"):
        table.encode(df.assign(sex=[[1], [2], [3]]))
    with pytest.raises(ValueError, match="`absent` must be 'error' or 'missing'"):
        table.encode(df, absent="ignore")
    with pytest.raises(ValueError, match="0 rows"):
        table.encode(df[:0])


def test_labels_that_are_numbers_are_matched_in_any_type():
    table = make(pd.DataFrame({"x": [3, 1, 2] * 5, "b": [0, 1, 1] * 5}))
    new = pd.DataFrame({"x": [2.0, np.nan, 3.0], "b": [True, False, True]})
    found = table.encode(new)
    assert cells(found, "x") == [1, -1, 2] and cells(found, "b") == [1, 0, 1]


# --- what cannot be taken ---

BAD = {
    "dates": ({"when": pd.to_datetime(["2020-01-01"])}, {}, "'when' has dates.*2020"),
    "durations": ({"t": [timedelta(1)]}, {}, "'t' has dates or times.*ignore"),
    "date objects": ({"t": [date(2020, 1, 1)]}, {}, "'t' has dates or times"),
    "dates as reals": (
        {"t": [date(2020, 1, 1)]},
        {"types": {"t": "real"}},
        "'t' has dates or times.*2020, 1, 1",
    ),
    "mixed": ({"x": [1, "?"]}, {}, r"'x' has values that are not all.*'\?' \(str\)"),
    "bool and int": ({"x": pd.Series([2, True], dtype=object)}, {}, "not all numbers"),
    "lists": ({"x": [[1], [2]]}, {}, r"'x' has \[1\], which.*ignore"),
    "infinite": ({"x": [1.5, np.inf]}, {}, "'x' has the value inf in row 1.*missing"),
    "too large": ({"x": [0.5, 1e300]}, {}, "'x' has the value 1e.300, too large"),
    "too small": ({"x": [0.5e-300, 0]}, {}, "'x' has no value above 5e-301 .*multiply"),
    "offset": ({"x": [1.7e9, 1.7e9 + 4]}, {}, "'x' has the value 17000.*128.*Subtract"),
    "tiny": (
        {"x": [1e-50, 2e-50]},
        {},
        "'x' has no value above 2e-50 .*float32; multiply",
    ),
    "negative count": (
        {"x": [3, -2]},
        {"types": {"x": "count"}},
        "'x' has the value -2 in row 1; counts are",
    ),
    "half a count": ({"x": [0.5]}, {"types": {"x": "count"}}, "0.5 in row 0; counts"),
    "large count": (
        {"x": [3, 2**31]},
        {"types": {"x": "count"}},
        "'x' has the value 2147483648 in row 1.*2147483647.*'real'",
    ),
    "not binary": (
        {"x": [1, 2, 3]},
        {"types": {"x": "binary"}},
        "3 different.*1, 2, 3",
    ),
    "one value": ({"x": ["a"]}, {"types": {"x": "binary"}}, "'x' has 1 different"),
    "word": (
        {"x": ["3", "heavy"]},
        {"types": {"x": "real"}},
        "'x' has the value 'heavy', which is no number.*missing",
    ),
    "nan as word": ({"x": ["3", "nan"]}, {"types": {"x": "real"}}, "'nan'.*no number"),
    "underscore": ({"x": ["3", "1_0"]}, {"types": {"x": "real"}}, "'1_0', which is no"),
    "digits": ({"x": ["3", "٤"]}, {"types": {"x": "count"}}, "'٤', which is no"),
    "unknown type": ({"x": [1]}, {"types": {"x": "ordinal"}}, "'ordinal'; types are"),
    "set of labels": ({"x": ["a"]}, {"types": {"x": {"a"}}}, "{'a'}; types.*a list"),
    "mapping": ({"x": ["a"]}, {"types": {"x": {"a": 0}}}, "{'a': 0}; types.*a list"),
    "type of Python": ({"x": [1]}, {"types": {"x": float}}, "'x'.*float.*; types are"),
    "unknown column": ({"x": [1]}, {"types": {"y": "real"}}, "no column 'y'.*'x'"),
    "unknown index": ({"x": [1]}, {"index": "y"}, "no column 'y'"),
    "all ignored": ({"x": [1]}, {"types": {"x": "ignore"}}, "No column is left.*'x'"),
    "no rows": ({"x": []}, {}, "0 rows and 1 columns"),
    "no columns": ({}, {}, "0 rows and 0 columns"),
    "most": ({"x": [1]}, {"max_categories": 1.5}, "`max_categories`.*1.5"),
    "negative most": ({"x": [1]}, {"max_categories": -1}, "`max_categories`.*-1"),
}


@pytest.mark.parametrize("data, kwargs, message", BAD.values(), ids=BAD)
def test_what_cannot_be_taken_is_named(data, kwargs, message):
    with pytest.raises(ValueError, match=message):
        make(pd.DataFrame(data), **kwargs)


def test_whatever_cannot_be_taken_can_be_left_out():
    odd = {"list": [[1], None], "t": [date(2020, 1, 1)] * 2, "mixed": [1, "?"]}
    odd |= {"period": pd.period_range("2020-01", periods=2), "complex": [1j, 2]}
    df = pd.DataFrame({"x": [0.5, 1], **odd})
    with pytest.raises(ValueError) as error:
        make(df)
    assert len(str(error.value).splitlines()) == len(odd)
    table = make(df, dict.fromkeys(odd, "ignore"))
    assert [c.name for c in table.ignored] == list(odd)
    assert make(df, dict.fromkeys(odd, "ignore") | {"period": "categorical"})


def test_all_columns_that_cannot_be_taken_are_named_at_once():
    df = pd.DataFrame({"x": [np.inf], "ok": [1], "t": [date(2020, 1, 1)]})
    with pytest.raises(ValueError, match=r"(?s)'x'.*\n.*'t'"):
        make(df)


def test_x64_resolves_what_float32_cannot():
    df = pd.DataFrame({"x": [1.7e9, 1.7e9 + 4, 1.7e9 + 9]})
    with jax.enable_x64(True):
        assert make(df).arrays["real"][1, 0] - 1.7e9 == 4


def test_only_dataframes_whose_columns_have_different_names_are_taken():
    twice = pd.DataFrame(np.zeros((2, 3)), columns=["a", "b", "a"])
    with pytest.raises(ValueError, match="different names.*'a'"):
        make(twice)
    for bad in (np.zeros((2, 2)), {"x": [1]}, pl.LazyFrame({"x": [1]}), None):
        with pytest.raises(TypeError, match="DataFrame.*got"):
            make(bad)


# --- the rest ---


def test_one_row_will_do():
    df = pd.DataFrame({"x": [2.5], "s": ["a"], "i": [3], "b": [True], "z": [0]})
    table = make(df)
    assert {k: x.shape for k, x in table.arrays.items()} == {
        "real": (1, 2),
        "categorical": (1, 1),
        "binary": (1, 2),
    }
    pandas.testing.assert_frame_equal(table.decode(), df)


def test_names_need_not_be_strings():
    df = pd.DataFrame([[0.5, "a", 3], [1.5, "b", 4]])
    table = make(df, {2: "count"}, missing={1: "?"})
    assert types(table) == {0: "real", 1: "categorical", 2: "count"}
    pandas.testing.assert_frame_equal(table.decode(), df)
    assert table.coords["columns"].tolist() == [0, 1, 2]
    df.columns = pd.MultiIndex.from_tuples([("a", 1), ("a", 2), ("b", 1)])
    table = make(df, {("b", 1): "count"})
    pandas.testing.assert_frame_equal(table.decode(), df)
    assert table.decode_column(("a", 2), [1]).tolist() == ["b"]
    df.columns = ["x", ("y", 1), None]
    assert list(make(df).decode()) == list(df)


def test_summary_is_a_table():
    df = load_penguins()
    lines = str(make(df, {"island": "ignore"})).splitlines()
    assert lines[0] == "344 rows, columns: 4 real, 3 categorical, 1 ignore"
    assert lines[1].split() == ["column", "type", "why", "distinct", "missing"]
    assert [line.split()[0] for line in lines[2:]] == list(df)
    assert lines[3].split() == ["island", "ignore", "given", "3", "0"]
    assert lines[8].split() == ["sex", "categorical", "strings", "2", "11"]
    assert len(set(map(len, lines[1:]))) == 1


@pytest.mark.parametrize(
    "index, rows, kind",
    [
        ([5, 3, 4], [5, 3, 4], "i"),
        (["b", "a", "b"], ["b", "a", "b"], "U"),
        ([1, "a", None], ["1", "a", "None"], "U"),
        (pd.array([1, None, 2], dtype="Int64"), [1.0], "f"),
        (pd.array([1, 3, 2], dtype="Int64"), [1, 3, 2], "i"),
        (pd.MultiIndex.from_product([["a"], [1, 2, 3]]), ["('a', 1)"], "U"),
    ],
    ids=["integers", "strings", "mixed", "nullable gap", "nullable", "multi"],
)
def test_coordinates_can_be_written_to_files(index, rows, kind):
    df = pd.DataFrame(
        {"s": ["u", "v", "u"], "x": [0.5, 1, 2], 7: [True, False, True]}, index=index
    )
    table = make(df)
    coords = table.coords
    assert coords["rows"].dtype.kind == kind
    assert coords["rows"].tolist()[: len(rows)] == rows
    assert coords["columns"].tolist() == ["x", "s", "7"]
    assert coords["real_features"].tolist() == ["x"]
    assert coords["categorical_2_features"].tolist() == ["s"]
    assert coords["binary_features"].tolist() == [7]
    assert table.dims == {"z": ["rows"], "view": ["columns"]}


def test_tables_are_frozen_and_pickled():
    for df in (everything(), polars_of(everything()[["float", "str", "bool"]])):
        table = make(df, {k: v for k, v in GIVEN.items() if k in df.columns})
        again = pickle.loads(pickle.dumps(table))
        assert again.columns == table.columns and again.decode().equals(table.decode())
        with pytest.raises(AttributeError):
            table.columns = ()


def test_a_table_leaves_the_dataframe_as_it_was():
    df = everything()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(df, GIVEN, missing=("u", 3)).decode()
    pandas.testing.assert_frame_equal(df, everything())


# --- Missing cells filled in ---------------------------------------------------------


def with_gaps():
    rng = np.random.default_rng(0)
    df = pd.DataFrame(
        {
            "sex": pd.Series(["f", None, "m"] * 20),
            "size": rng.normal(size=60),
            "calls": rng.poisson(20.0, 60).astype(float),
            "kind": rng.choice(["x", "y"], 60),
            "tail": rng.normal(size=60),
        }
    )
    df.loc[[3, 5], "tail"] = np.nan
    df.loc[4, "calls"] = np.nan
    return df


IMPUTED = {
    # Sites hold the columns of one type, or of as many labels: here `sex` and `kind`,
    # `size` and `tail`.
    "categorical_2": ([[r, 0] for r in range(1, 60, 3)], np.ones(20, int)),
    "real": ([[3, 1], [5, 1]], np.array([0.5, -0.25])),
    "count": ([[4, 0]], np.array([2.75])),
}


def imputation(index, point):
    return Imputation(np.array(index), point[None], point, 0 * point)


@pytest.mark.parametrize("of", [lambda df: df, polars_of], ids=["pandas", "polars"])
def test_missing_cells_are_filled_in(of):
    df = with_gaps()
    table = make(of(df), types={"calls": "count"})
    imputed = {name: imputation(*found) for name, found in IMPUTED.items()}
    filled = table.fill(imputed)
    assert type(filled) is type(of(df))
    expected = df.assign(
        sex=df["sex"].fillna("m"),
        tail=df["tail"].fillna({3: 0.5, 5: -0.25}),
        calls=df["calls"].fillna(2.75),
    )
    for name in df:
        values = filled[name].to_list()
        if df[name].dtype == float:
            np.testing.assert_allclose(values, expected[name], rtol=1e-6)
        else:
            assert values == expected[name].to_list()
    # Of what is not given the gaps remain.
    some = table.fill({"real": imputed["real"]})
    assert sum(v is None or v != v for v in some["calls"].to_list()) == 1


def test_cells_that_the_model_imputed_fill_the_table():
    table = make(with_gaps(), types={"calls": "count"})
    given = dict(concentration=1.0, discount=0.0, kappa=0.1, shape=2.0, strength=1.0)
    samples = {
        "z": np.arange(2 * 60).reshape(2, 60) % 3,
        "count_shape": np.ones((2, 1)),
    }
    posterior = Posterior(
        mixture.mixed, samples, (), {**table.model_args, **given, "num_clusters": 4}
    )
    filled = table.fill(posterior.impute(random.key(1)))
    assert not filled.isna().any().any()
    whole = with_gaps().notna()
    pandas.testing.assert_frame_equal(
        filled.where(whole), with_gaps().where(whole), rtol=1e-6
    )


def test_what_cannot_fill_a_table_is_refused():
    table = make(with_gaps())
    real = imputation(*IMPUTED["real"])
    with pytest.raises(ValueError, match="'x'; it must be what `Posterior.impute`"):
        table.fill({"x": real})
    with pytest.raises(ValueError, match="ndarray of 'real'"):
        table.fill({"real": np.zeros((60, 2))})
    with pytest.raises(ValueError, match="a cell of row 60, but the table has 60"):
        table.fill({"real": imputation([[60, 1]], np.zeros(1))})
    with pytest.raises(ValueError, match="Imputed cells are for `fill`"):
        table.decode({"real": real})
    with pytest.raises(ValueError, match=r"no column \['size'\]"):
        table.sites(["size"])
