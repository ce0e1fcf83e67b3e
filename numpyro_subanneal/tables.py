# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

r"""DataFrames as arguments of the ready-made models, and back.

:class:`Table` takes a DataFrame of pandas, polars, or another library that narwhals
reads, says what type each column has, and holds the arrays that
:func:`models.mixture.mixed <numpyro_subanneal.models.mixture.mixed>` and
:func:`models.crosscat.mixed <numpyro_subanneal.models.crosscat.mixed>` take. What comes
out of a model is given back its labels, types and names.

Types are guessed by these rules, the first that holds:

==================================================================  ===========
cells of the column                                                 type
==================================================================  ===========
none observed                                                       ignore (1)
true or false                                                       binary
strings of at least 20 rows, all different                          ignore (1)
strings, or categories of the DataFrame                             categorical
zeros and ones                                                      binary
numbers that are all the same                                       real
integers of at least 20 rows, all different, in increasing order
or without gaps                                                     ignore (1)
whole numbers with at most `max_categories` different values, each
seen 5 times on average                                             categorical
whole numbers from zero up whose variance is at most 10 times
their mean                                                          count
other numbers                                                       real
==================================================================  ===========

(1) with a warning. Anything else, such as dates, is an error. Floats that are all whole
count as whole numbers, because a column of integers with a gap is one of floats in
pandas. Few whole numbers are categories, which may be distributed in any way; counts
are Poisson within a cluster, with a variance that is their mean, and far from zero real
columns serve as well. Two strings are categories too: to be binary, one of them would
have to be the one.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
import datetime
from decimal import Decimal
from numbers import Integral, Real
from typing import Any, NamedTuple
import warnings

import jax
from narwhals.exceptions import DuplicateError
import narwhals.stable.v2 as nw
import numpy as np

__all__ = ["Column", "Table", "TableWarning"]

# In the order of the arguments of the models.
_TYPES = "real", "categorical", "binary", "count"

# Strings of fewer rows may well be all different.
_MIN_ROWS_OF_ID = 20
# Rows that a category needs, on average, for its frequency to tell something.
_ROWS_PER_CATEGORY = 5
# A mixture of Poissons has a larger variance than mean; where it is much larger, it
# takes a cluster for every few values.
_MAX_DISPERSION = 10

# What tables have where a cell is missing. None of it is taken as missing unasked.
_WORDS = {"", "?", "-", "--", ".", "na", "n/a", "#n/a", "<na>", "nan", "nat"}
_WORDS |= {"none", "null", "nil", "missing"}
_NUMBERS = {-1} | {sign * (10**k - 1) for k in range(1, 7) for sign in (1, -1)}

_LARGEST_COUNT = np.iinfo(np.int32).max


class TableWarning(UserWarning):
    """Something in a DataFrame that may be meant otherwise than it was taken."""


@dataclass(frozen=True)
class Column:
    """
    A column of a :class:`Table`.

    - **name** - its name in the DataFrame, a string or what else it is.
    - **type** - "real", "categorical", "binary", "count" or "ignore".
    - **why** - what decided its type.
    - **distinct**, **missing** - number of different values, and of missing cells.
    - **labels** - what the codes ``0, 1, ...`` of a categorical or binary column stand
      for; empty for others.
    - **position** - its place in the array of its type in :attr:`Table.arrays`.
    - **site**, **site_position** - the observed site of the models that it is in, and
      its place there: `real`, `binary`, `count`, or `categorical_C`, which has the
      columns with C categories.
    - **missing_codes** - values that stand for missing cells.
    - **place** - its place in the DataFrame.
    - **parsed** - whether its numbers are read off strings.

    Of an ignored column, positions and site are None.
    """

    name: Hashable
    type: str
    why: str
    distinct: int
    missing: int
    labels: tuple = ()
    position: int | None = None
    site: str | None = None
    site_position: int | None = None
    missing_codes: tuple = ()
    place: int = 0
    parsed: bool = False


@dataclass(frozen=True, eq=False, repr=False)
class Table:
    """
    A table in the form that the models take, made by :meth:`from_dataframe`.

    - **columns** - those of the model, in its order: real, categorical, binary, count,
      and within a type as in the DataFrame. The views of a cross-categorization are a
      partition of these.
    - **ignored** - the columns that are left out.
    - **arrays** - by type, the cells ``[N, columns]`` in row-major order, of the types
      that there are. Real ones are of JAX's default float type, float32 unless x64 is
      enabled when the table is made, and NaN where missing; others are int32, and -1
      where missing.
    - **index** - labels of the rows ``[N]``; numbers from zero if there are none.
    """

    columns: tuple[Column, ...]
    ignored: tuple[Column, ...]
    arrays: Mapping[str, np.ndarray]
    index: np.ndarray
    # For `decode`: the labels of the rows as pandas has them, the name of the column
    # that they come from, and the DataFrame without its rows, which has all types.
    _native_index: Any
    _index_name: Hashable | None
    _template: Any

    @classmethod
    def from_dataframe(
        cls,
        df: Any,
        types: Mapping[Hashable, str | Sequence] | None = None,
        *,
        index: Hashable | None = None,
        missing: Any = (),
        max_categories: int = 12,
    ) -> "Table":
        """
        The table of a DataFrame.

        NaN, None, NaT, NA and null are missing cells. Values that look as if they stood
        for one, such as "?" or a repeated -99, are so only if `missing` says it; a
        :class:`TableWarning` names them.

        :param df: DataFrame of pandas, polars or another library that narwhals reads,
            with at least one row. Names of columns are different, and of any kind.
        :param types: types of columns by name: "real", "categorical", "binary",
            "count", "ignore"; or a sequence of labels, which makes it categorical with
            these, also those that are not seen. Others are guessed, see
            :mod:`~numpyro_subanneal.tables`. Strings are read as numbers, such as
            "-12.5" or "1e3", where a type of numbers is given. In a binary column of
            two labels, the later in their order is the one.
        :param index: name of the column that names the rows, which is not in the model;
            by default the index of a pandas DataFrame.
        :param missing: values that stand for missing cells, one or a sequence, in all
            columns; or by name of the column, so that ``{"age": ()}`` says that there
            are none. Strings are compared with strings only, numbers with numbers.
        :param int max_categories: whole numbers with at most so many different values
            are guessed to be categories; 0 for none.
        :raises ValueError: naming every column that cannot be taken, a value in it, and
            a way out.
        :raises TypeError: if it is not a DataFrame.

        **Example**

        .. doctest::

            >>> import pandas as pd
            >>> from numpyro_subanneal.tables import Table

            >>> df = pd.DataFrame({"mass": [3.7, 4.1, -99.0], "sex": ["f", "m", "?"]})
            >>> table = Table.from_dataframe(df, missing=("?", -99))
            >>> table.model_args["categorical"].ravel().tolist()
            [0, 1, -1]
            >>> table
            3 rows, columns: 1 real, 1 categorical
            column  type         why      distinct  missing
            mass    real         numbers         2        1
            sex     categorical  strings         2        1
        """
        frame = _read_frame(df)
        if not isinstance(types, Mapping | None):
            raise ValueError(
                f"`types` must be a mapping of columns to types, such as {{'age': "
                f"'real'}}, got {types!r}."
            )
        names, types = frame.columns, dict(types or {})
        codes, default = _missing_codes(missing)
        for name in [*types, *codes, *([] if index is None else [index])]:
            if name not in names:
                raise ValueError(_unknown(name, names))
        if not isinstance(max_categories, Integral) or max_categories < 0:
            raise ValueError(
                "`max_categories` must be a nonnegative integer, 0 to guess no numbers "
                f"to be categories; got {max_categories!r}."
            )

        problems, found, cells_of, findings = [], [], {}, defaultdict(list)
        for place, name in enumerate(names):
            if index is not None and name == index:
                continue
            try:
                own = codes.get(name, default)
                cells = _read_column(frame.get_column(name), own)
                column = _describe(name, cells, types.get(name), max_categories)
                column = replace(column, missing_codes=own, place=place)
                if column.type != "ignore":
                    cells_of[name] = _encode(column, cells)
                    _check_precision(column, cells_of[name])
            except ValueError as error:
                problems.append(str(error))
            else:
                found.append(column)
                _note(findings, column, cells, name in types, name in codes)
        if problems:
            raise ValueError("\n".join(problems))
        columns = _in_model_order(found)
        if not columns:
            raise ValueError(
                "No column is left for the model: "
                + ", ".join(f"{c.name!r} ({c.why})" for c in found)
                + ". Give a type to one of them by `types`."
            )
        _warn(findings)
        return cls(
            columns,
            tuple(c for c in found if c.type == "ignore"),
            _stack(columns, cells_of),
            *_labels_of_rows(frame, index),
            index,
            # A copy, as a view would keep all rows.
            frame.head(0).clone().to_native(),
        )

    # --- into the model ---

    @property
    def model_args(self) -> dict[str, Any]:
        """
        Keyword arguments of :func:`models.mixture.mixed
        <numpyro_subanneal.models.mixture.mixed>` and :func:`models.crosscat.mixed
        <numpyro_subanneal.models.crosscat.mixed>`: :attr:`arrays`, and the tuple
        `num_categories` if there are categorical columns. With ``MCMC(...,
        jit_model_args=True)`` bind that one by :func:`functools.partial`.
        """
        args = dict(self.arrays)
        if "categorical" in args:
            own = [c for c in self.columns if c.type == "categorical"]
            args["num_categories"] = tuple(len(c.labels) for c in own)
        return args

    def encode(
        self,
        df: Any,
        *,
        absent: str = "error",
        extra: str = "error",
        unseen: str = "error",
    ) -> "Table":
        """
        The table of new rows: columns are matched by name, in any order, and have the
        types, labels and missing codes that they have here.

        :param df: DataFrame with the columns of the model, and with that of the
            `index`, if there is one. Ignored columns may be there.
        :param str absent: "missing" to take all cells of a column that is not there as
            missing.
        :param str extra: "ignore" to leave out columns that are not in this table.
        :param str unseen: "missing" to take cells whose category is not among the
            labels of their column as missing.
        :raises ValueError: naming every column that does not fit, a value in it, and a
            way out.
        :raises TypeError: if it is not a DataFrame.
        """
        for name, value, other in (
            ("absent", absent, "missing"),
            ("extra", extra, "ignore"),
            ("unseen", unseen, "missing"),
        ):
            if value not in ("error", other):
                raise ValueError(
                    f"`{name}` must be 'error' or {other!r}, got {value!r}."
                )
        frame = _read_frame(df)
        names, index = frame.columns, self._index_name
        known = {c.name for c in (*self.columns, *self.ignored)}
        if index is not None:
            known.add(index)
        problems, found, cells_of = [], [], {}
        if index is not None and index not in names:
            problems.append(f"Column {index!r}, which names the rows, is not there.")
        for name in names:
            if name not in known and extra == "error":
                problems.append(
                    f"Column {name!r} is not in the table that the rows are matched "
                    "with; drop it, or leave out all such by `extra='ignore'`."
                )
        for column in self.columns:
            cells = _Cells.none(len(frame))
            if column.name in names:
                series = frame.get_column(column.name)
                cells = _read_column(series, column.missing_codes)
            elif absent == "error":
                problems.append(
                    f"Column {column.name!r} is not there; `absent='missing'` takes "
                    "all cells of such a column as missing."
                )
            try:
                own = _encode(column, cells, unseen)
            except ValueError as error:
                problems.append(str(error))
                continue
            gone = np.isnan(own) if column.type == "real" else own == -1
            size = len(cells.distinct)
            found.append(replace(column, distinct=size, missing=int(gone.sum())))
            cells_of[column.name] = own
        if problems:
            raise ValueError("\n".join(problems))
        labels, native = _labels_of_rows(frame, index)
        return replace(
            self,
            columns=tuple(found),
            ignored=(),
            arrays=_stack(found, cells_of),
            index=labels,
            _native_index=native,
        )

    # --- out of the model ---

    def decode(self, arrays: Mapping[str, Any] | None = None) -> Any:
        """
        The DataFrame of cells in the form of the model: of the kind that the table was
        made from, with its labels, types, names and index. Columns whose cells are not
        given are left out, as are ignored ones.

        Columns of integers stay so if their cells are whole and fit, and become floats
        otherwise; those beyond 2^24 are rounded to what 32-bit floats hold, unless x64
        is on. Integers and booleans that are NumPy's cannot be missing; those of a
        pandas column with missing cells become pandas' own.

        :param arrays: by type, cells ``[N, columns]`` as in :attr:`arrays`, which is
            the default; or by the name of their site, as in draws of observed sites.
            What else it holds is not used. Rows are those of this table; others are
            those of the table that :meth:`encode` made of them.
        :raises ValueError: naming the column, and what is wrong with its cells.
        """
        arrays = self.arrays if arrays is None else arrays
        cells_of = {}
        for column in self.columns:
            cells = self._cells_of(column, arrays)
            if cells is None:
                continue
            if cells.shape != self.index.shape:
                raise ValueError(
                    f"The cells of column {column.name!r} have the shape "
                    f"{cells.shape}, but the table has {len(self.index)} rows. Give "
                    "`decode` one draw, and `decode_column` several; a table of other "
                    "rows is made by `encode`."
                )
            cells_of[column.name] = self.decode_column(column.name, cells)
        if not cells_of:
            raise ValueError(
                f"There are no cells of columns in {_spell(arrays)}; give some of "
                f"{_spell(self.arrays)}."
            )
        return self._frame(cells_of)

    def fill(self, imputed: Mapping[str, Any]) -> Any:
        """
        The DataFrame with its missing cells filled in, as :meth:`decode` makes it: what
        was observed is as it was.

        :param imputed: by observed site, what
            :meth:`~numpyro_subanneal.Posterior.impute` has found of this table: of each
            missing cell its `point` is taken, the mean of real columns and of counts,
            and else the most frequent category. Cells of sites that it does not hold
            stay missing.
        :raises ValueError: if it is nothing of the kind, or of another table.

        **Example**

        .. doctest::

            >>> import numpy as np
            >>> import pandas as pd
            >>> from numpyro_subanneal import Table
            >>> from numpyro_subanneal.posterior import Imputation

            >>> table = Table.from_dataframe(pd.DataFrame({"kg": [3.7, None, 4.1]}))
            >>> draws = np.array([[3.8], [4.0]])
            >>> cell = np.array([[1, 0]])  # row and column
            >>> found = Imputation(cell, draws, draws.mean(0), draws.std(0))
            >>> table.fill({"real": found})["kg"].round(1).tolist()
            [3.7, 3.9, 4.1]
        """
        sites = {column.site for column in self.columns}
        for name, found in imputed.items():
            if name not in sites or not hasattr(found, "point"):
                raise ValueError(
                    f"`imputed` holds {type(found).__name__} of {name!r}; it must be "
                    "what `Posterior.impute` returns, of a model of this table, whose "
                    f"sites are {_spell(sites)}."
                )
            if np.max(found.index[:, 0], initial=-1) >= len(self.index):
                raise ValueError(
                    f"`imputed` has a cell of row {found.index[:, 0].max()}, but the "
                    f"table has {len(self.index)} rows."
                )
        cells_of = {}
        for column in self.columns:
            cells = np.array(self._cells_of(column, self.arrays))
            if column.site in imputed:
                found = imputed[column.site]
                own = found.index[:, 1] == column.site_position
                point = np.asarray(found.point)[own]
                cells = cells.astype(np.result_type(cells, point))
                cells[found.index[own, 0]] = point
            if column.type == "count":  # of which means need not be whole
                cells_of[column.name] = np.where(cells == -1, np.nan, cells)
            else:
                cells_of[column.name] = self.decode_column(column.name, cells)
        return self._frame(cells_of)

    def decode_column(self, name: Hashable, cells: Any) -> np.ndarray:
        """
        Labels of cells of one column, such as draws of it.

        :param name: of the column.
        :param cells: codes, of any shape; numbers of a real or count column.
        :return: labels, in the same shape; objects, None where missing, if one is.
            Numbers are as they were, NaN where missing.
        :raises ValueError: if the column is not in the model, or naming a cell that is
            none of its codes.
        """
        column, cells = self.column(name), np.asarray(cells)
        if column.type == "ignore":
            raise ValueError(f"Column {name!r} is ignored: it is not in the model.")
        if column.type == "real":
            return cells
        size = len(column.labels) or np.inf
        missing = cells == -1
        # NB: written so that NaN fails it too.
        good = missing | ((cells >= 0) & (cells < size) & (cells == np.floor(cells)))
        if not good.all():
            limit = f", at most {size - 1}" if column.labels else ""
            raise ValueError(
                f"Column {name!r} has the cell {cells[~good].flat[0]}; its cells are "
                f"nonnegative integers{limit}, or -1 where a cell is missing."
            )
        if not column.labels:
            return np.where(missing, np.nan, cells) if missing.any() else cells
        labels = _array_of(column.labels)
        if missing.any():
            # The last label is that of -1.
            labels = np.append(labels.astype(object), [None])
        return labels[cells.astype(int)]

    def column(self, name: Hashable) -> Column:
        """
        The column of that name, ignored or not.

        :raises ValueError: if there is none.
        """
        columns = {c.name: c for c in (*self.columns, *self.ignored)}
        if not isinstance(name, Hashable) or name not in columns:
            raise ValueError(_unknown(name, columns))
        return columns[name]

    def sites(self, *names: Hashable) -> dict[str, list[int]]:
        """
        Where columns are in the models: by observed site, their places in it. So
        :class:`~numpyro_subanneal.Posterior` takes them, as `columns` and as `given`.

        :param names: their names in the DataFrame.
        :raises ValueError: if there is no column of a name, or it is not in the model.

        **Example**

        .. doctest::

            >>> import pandas as pd
            >>> from numpyro_subanneal import Table

            >>> cells = {"sex": ["f", "m"], "kg": [3.7, 4.1], "cm": [1.5, 2.5]}
            >>> Table.from_dataframe(pd.DataFrame(cells)).sites("cm", "sex")
            {'real': [1], 'categorical_2': [0]}
        """
        found: dict[str, list[int]] = {}
        for name in names:
            column = self.column(name)
            if column.site is None:
                raise ValueError(f"Column {name!r} is ignored: {column.why}.")
            found.setdefault(column.site, []).append(column.site_position)
        return found

    @property
    def coords(self) -> dict[str, np.ndarray]:
        """
        Coordinates for ArviZ: the labels of the `rows`; the names of all `columns` of
        the model in its order, and of those of each site, by `real_features` and so on.
        What is neither number, string nor date is spelled out, so that all can be
        written to a file.

        ``az.from_numpyro(mcmc, coords=table.coords, extra_event_dims=table.dims)``
        """
        names = defaultdict(list)
        for column in self.columns:
            names["columns"].append(column.name)
            names[f"{column.site}_features"].append(column.name)
        coords = {dim: _coordinate(_array_of(own)) for dim, own in names.items()}
        return {"rows": _coordinate(self.index), **coords}

    @property
    def dims(self) -> dict[str, list[str]]:
        """
        Names for ArviZ, as `extra_event_dims` of :func:`arviz.from_numpyro`, of the
        axes that are not plates of the model: rows of the partition, columns of that of
        the columns. (:func:`~numpyro_subanneal.inference_data.to_arviz` knows the rows,
        and takes ``dims={"view": ["columns"]}``.)
        """
        return {"z": ["rows"], "view": ["columns"]}

    def summary(self) -> str:
        """
        The columns as text, in the order of the DataFrame: the type of each and what
        decided it, the number of different values, and that of missing cells.
        """
        columns = sorted((*self.columns, *self.ignored), key=lambda c: c.place)
        lines = [("column", "type", "why", "distinct", "missing")]
        for c in columns:
            lines.append((str(c.name), c.type, c.why, str(c.distinct), str(c.missing)))
        widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
        text = [
            "  ".join(f"{s:{side}{width}}" for s, side, width in zip(*row, strict=True))
            for row in ((line, "<<<>>", widths) for line in lines)
        ]
        nums = Counter(c.type for c in columns)
        types = [f"{nums[t]} {t}" for t in (*_TYPES, "ignore") if nums[t]]
        head = f"{len(self.index)} rows, columns: {', '.join(types)}"
        return "\n".join([head, *text])

    __repr__ = summary

    def _cells_of(self, column: Column, arrays: Mapping[str, Any]) -> np.ndarray | None:
        """The cells of a column, if they are there."""
        for kind, place in (
            ("type", column.position),
            ("site", column.site_position),
        ):
            key = getattr(column, kind)
            if key not in arrays:
                continue
            if hasattr(arrays[key], "point"):
                raise ValueError("Imputed cells are for `fill`, not for `decode`.")
            cells = np.asarray(arrays[key])
            num = sum(getattr(c, kind) == key for c in self.columns)
            if cells.ndim < 2 or cells.shape[-1] != num:
                raise ValueError(
                    f"The cells of {key!r} have the shape {cells.shape}; their last "
                    f"axes are rows and {num} column(s)."
                )
            return cells[..., place]
        return None

    def _frame(self, cells_of: Mapping[Hashable, np.ndarray]) -> Any:
        """A DataFrame of labels and numbers by column."""
        template = nw.from_native(self._template, eager_only=True)
        values, dtypes = {}, {}
        for name, cells in cells_of.items():
            values[name], dtypes[name] = _typed(
                self.column(name), cells, template.get_column(name)
            )
        like = template.implementation
        if not like.is_pandas_like() and self._index_name is not None:
            values[self._index_name] = self.index.tolist()
            dtypes[self._index_name] = template.get_column(self._index_name).dtype
        names = [name for name in template.columns if name in values]
        if not like.is_pandas_like():
            return nw.from_dict(
                {
                    name: nw.new_series(name, values[name], dtypes[name], backend=like)
                    for name in names
                }
            ).to_native()
        pd = like.to_native_namespace()
        index = self.index if self._native_index is None else self._native_index
        # By place, since to pandas a name that is a tuple is several.
        places = [self.column(name).place for name in names]
        series = {
            place: pd.Series(values[name], index=index, dtype=dtypes[name])
            for place, name in zip(places, names, strict=True)
        }
        frame = pd.DataFrame(series, index=index)
        frame.columns = self._template.columns[places]
        return frame


# --- reading a DataFrame -----------------------------------------------------------


class _Cells(NamedTuple):
    """
    The cells of a column as they were found.

    - **family** - "bool", "int", "float", "text", "time", "mixed"; "other" if they are
      no labels, "none" if no cell is observed.
    - **values** - ``[N]``, an array of numbers, or a list that is None where missing.
    - **missing** - ``[N]``.
    - **distinct**, **counts** - the different values that were observed, numbers in
      their order, and how often each.
    - **declared** - the categories that the column's own type has, if it has some.
    """

    family: str
    values: Any
    missing: np.ndarray
    distinct: Sequence
    counts: Sequence[int]
    declared: tuple | None = None

    @classmethod
    def none(cls, num_rows: int, declared: tuple | None = None) -> "_Cells":
        missing = np.ones(num_rows, bool)
        return cls("none", np.zeros(num_rows), missing, (), (), declared)

    @classmethod
    def numbers(cls, family: str, values: np.ndarray, missing: np.ndarray) -> "_Cells":
        if missing.all():
            return cls.none(len(values))
        distinct, counts = np.unique(values[~missing], return_counts=True)
        return cls(family, values, missing, distinct, counts)

    @property
    def num_observed(self) -> int:
        return int(len(self.missing) - self.missing.sum())


def _read_frame(df: Any) -> nw.DataFrame:
    try:
        frame = nw.from_native(df, eager_only=True)
        names = frame.columns
    except TypeError as error:
        raise TypeError(
            "A table is made from a DataFrame of pandas, polars or another library "
            f"that narwhals reads, got {type(df).__name__}. `collect` a lazy one first."
        ) from error
    except DuplicateError as error:
        found = " ".join(str(error).split())
        raise ValueError(f"Columns must have different names. {found}") from error
    if not len(frame) or not names:
        raise ValueError(
            f"The DataFrame has {len(frame)} rows and {len(names)} columns; a table "
            "has at least one of each."
        )
    return frame


def _labels_of_rows(frame: nw.DataFrame, name: Hashable) -> tuple[np.ndarray, Any]:
    """Labels of the rows, and those that a DataFrame of pandas has."""
    indexed = frame
    if name is not None:
        indexed = nw.maybe_set_index(frame, column_names=name)
    native = nw.maybe_get_index(indexed)
    if native is not None:
        return native.to_numpy(), native
    if name is not None:
        return frame.get_column(name).to_numpy(), None
    return np.arange(len(frame)), None


def _read_column(series: nw.Series, codes: tuple) -> _Cells:
    """
    The cells of a column.

    :param codes: values that stand for missing cells.
    """
    dtype = series.dtype
    missing = np.asarray(series.is_null().to_numpy(), bool)
    if dtype.is_decimal():
        series, dtype = series.cast(nw.Float64), nw.Float64()
    wide = dtype in (nw.Int128, nw.UInt128)  # which NumPy does not have
    if dtype == nw.Boolean:
        values = series.fill_null(False).to_numpy()
        return _without("bool", values.astype(bool), missing, codes)
    if dtype.is_integer() and not wide:
        return _without("int", series.fill_null(0).to_numpy(), missing, codes)
    if dtype.is_float():
        return _without("float", series.to_numpy(), missing, codes)

    declared = None
    if isinstance(dtype, nw.Enum):
        declared = tuple(dtype.categories)
    elif dtype == nw.Categorical and series.implementation.is_pandas_like():
        # Elsewhere, categories are those of all such columns.
        declared = tuple(series.cat.get_categories().to_list())
    if declared is not None:
        declared = tuple(c for c in declared if c not in codes)
    values = series.to_list()
    gone = missing.tolist()
    try:
        counts = Counter(v for v, g in zip(values, gone, strict=True) if not g)
    except TypeError:  # cannot be hashed
        some = next(v for v, g in zip(values, gone, strict=True) if not g)
        return _Cells("other", values, missing, [some], [1])
    named = {v for v in counts if _is_code(v, codes)}
    if named or missing.any():
        values = [
            None if g or v in named else v for v, g in zip(values, gone, strict=True)
        ]
        missing = np.array([v is None for v in values])
    for v in named:
        del counts[v]
    if not counts:
        return _Cells.none(len(values), declared)
    family = "text"
    if dtype.is_temporal():
        family = "time"
    elif dtype not in (nw.String, nw.Categorical) and declared is None:
        family = _family_of({type(v) for v in values if v is not None})
    if family in ("bool", "int", "float"):
        kind = {"bool": bool, "int": np.int64, "float": float}[family]
        try:
            filled = np.array([0 if v is None else v for v in values], kind)
        except OverflowError:
            filled = np.array([0 if v is None else v for v in values], float)
        return _Cells.numbers(family, filled, missing)
    return _Cells(
        family, values, missing, list(counts), list(counts.values()), declared
    )


def _without(family, values, missing, codes) -> _Cells:
    """Numbers, without those that stand for missing cells."""
    if family == "float":
        missing = missing | np.isnan(values)
    for code in codes:
        if isinstance(code, Real) and isinstance(code, bool) == (family == "bool"):
            missing = missing | (values == code)
    return _Cells.numbers(family, values, missing)


def _is_code(value: Any, codes: tuple) -> bool:
    # True is not 1 here.
    return any(
        isinstance(value, bool) == isinstance(code, bool) and value == code
        for code in codes
    )


def _family_of(kinds: set[type]) -> str:
    """What objects of these types are."""
    for family, of in (
        ("bool", (bool, np.bool_)),
        ("int", Integral),
        ("float", (Real, Decimal)),
        ("text", str),
        ("time", (datetime.date, datetime.time, datetime.timedelta, np.datetime64)),
    ):
        if all(issubclass(kind, of) for kind in kinds):
            return family
        if family == "bool" and any(issubclass(kind, of) for kind in kinds):
            return "mixed"
    return "mixed"


def _missing_codes(missing: Any) -> tuple[dict[Hashable, tuple], tuple]:
    """Codes of the columns that have their own, and of the others."""

    def many(codes):
        # A string is one code, not its characters.
        if isinstance(codes, str) or not isinstance(codes, Sequence | set | np.ndarray):
            codes = (codes,)
        return tuple(c.item() if isinstance(c, np.generic) else c for c in codes)

    if isinstance(missing, Mapping):
        return {name: many(codes) for name, codes in missing.items()}, ()
    return {}, many(missing)


# --- types -------------------------------------------------------------------------


def _describe(name: Hashable, cells: _Cells, given: Any, most: int) -> Column:
    """A column whose type is given, or guessed if that is None."""
    labels, parsed = None, False
    is_type = isinstance(given, str) and given in (*_TYPES, "ignore")
    if not is_type or given != "ignore":
        _check_family(name, cells)
    if given is None:
        kind, why = _guess(name, cells, most)
    elif is_type:
        kind, why = given, "given"
        parsed = kind in ("real", "count") and cells.family in ("text", "mixed")
    else:
        kind, why, labels = "categorical", "labels given", _given_labels(name, given)
    if labels is None:
        labels = _labels(name, kind, cells)
    missing = int(cells.missing.sum())
    return Column(name, kind, why, len(cells.distinct), missing, labels, parsed=parsed)


def _check_family(name: Hashable, cells: _Cells) -> None:
    if cells.family == "other":
        raise ValueError(
            f"Column {name!r} has {cells.distinct[0]!r}, which is neither a number nor "
            f"a label; leave it out by `types={{{name!r}: 'ignore'}}`."
        )


def _guess(name: Hashable, cells: _Cells, most: int) -> tuple[str, str]:
    """A type, and why."""
    size, num = len(cells.distinct), cells.num_observed
    like_id = size == num >= _MIN_ROWS_OF_ID
    if cells.family == "none":
        return "ignore", "no observed cell"
    if cells.family == "bool":
        return "binary", "true or false"
    if cells.family == "text":
        if cells.declared is not None:
            return "categorical", f"{len(cells.declared)} categories of the DataFrame"
        if like_id:
            return "ignore", "strings, all different"
        return "categorical", "strings"
    if cells.family == "time":
        raise ValueError(
            f"Column {name!r} has dates or times, such as {cells.distinct[0]!s}. Make "
            "numbers of them, for example days since the first or a month; or leave it "
            f"out by `types={{{name!r}: 'ignore'}}`."
        )
    if cells.family == "mixed":
        kinds = {type(v).__name__: v for v in cells.distinct}
        shown = ", ".join(f"{value!r} ({kind})" for kind, value in kinds.items())
        raise ValueError(
            f"Column {name!r} has values that are not all numbers, strings, or true "
            f"and false: {shown}. If some stand for missing cells, name them in "
            "`missing`; else give its type by `types`: 'categorical' takes them all as "
            "labels."
        )
    distinct = cells.distinct
    if size == 1 and cells.family == "float":
        return "real", "all the same"
    if not np.isfinite(distinct).all() or (distinct != np.floor(distinct)).any():
        return "real", "numbers"
    low, high = distinct[0].item(), distinct[-1].item()
    if {low, high} <= {0, 1} and size <= 2:
        return "binary", "zeros and ones"
    if size == 1:
        return "real", "all the same"
    if cells.family == "int" and like_id:
        observed = cells.values[~cells.missing]
        if (observed[1:] > observed[:-1]).all():
            return "ignore", "integers, all different, in increasing order"
        if high - low == size - 1:
            return "ignore", "integers, all different, without gaps"
    if size <= most and num >= _ROWS_PER_CATEGORY * size:
        return "categorical", f"{size} whole numbers, {num // size} cells each"
    mean = np.average(distinct.astype(float), weights=cells.counts)
    variance = np.average((distinct - mean) ** 2, weights=cells.counts)
    if low == 0 and variance <= _MAX_DISPERSION * mean:
        ratio = variance / mean
        return "count", f"whole numbers from zero up, variance {ratio:.1f} of mean"
    return "real", "whole numbers"


def _given_labels(name: Hashable, given: Any) -> tuple:
    # The codes are in the order of the labels, which a set does not have, and of a
    # mapping they may be the values.
    if isinstance(given, str | Set | Mapping) or not isinstance(given, Iterable):
        raise ValueError(
            f"Column {name!r} was given the type {given!r}; types are "
            f"{_spell((*_TYPES, 'ignore'))}, or a sequence of labels, such as a list, "
            "in the order of their codes."
        )
    labels = tuple(given.tolist() if isinstance(given, np.ndarray) else given)
    if not all(isinstance(label, Hashable) for label in labels):
        raise ValueError(
            f"The labels of column {name!r} must be such as cells may be, not lists of "
            f"them; got {_spell(labels)}."
        )
    if not labels or len(set(labels)) < len(labels) or None in labels:
        raise ValueError(
            f"The labels of column {name!r} must be at least one, all different, and "
            f"none of them None; got {_spell(labels)}."
        )
    return labels


def _labels(name: Hashable, kind: str, cells: _Cells) -> tuple:
    """What codes stand for, by the cells of a column."""
    if kind not in ("categorical", "binary"):
        return ()
    if kind == "binary" and cells.family in ("bool", "int", "float"):
        zero_one = np.array([0, 1], cells.values.dtype)
        if np.isin(cells.distinct, zero_one).all():
            return tuple(zero_one.tolist())
    labels = cells.declared
    if labels is None or (kind == "binary" and len(labels) != 2):
        labels = _in_order(cells.distinct)
    if kind == "binary" and len(labels) != 2:
        raise ValueError(
            f"Column {name!r} has {len(labels)} different value(s), {_spell(labels)}; "
            f"a binary one has two. Name both by `types={{{name!r}: [...]}}`, give it "
            "the type 'categorical', or name what stands for missing cells in "
            "`missing`."
        )
    if not labels:
        raise ValueError(
            f"Column {name!r} has no observed cell, and so no categories; give its "
            f"labels, `types={{{name!r}: [...]}}`, or the type 'ignore'."
        )
    return labels


def _in_order(labels: Sequence) -> tuple:
    labels = labels.tolist() if isinstance(labels, np.ndarray) else list(labels)
    try:
        return tuple(sorted(labels))
    except TypeError:  # of several types
        return tuple(sorted(labels, key=lambda v: (type(v).__name__, str(v))))


def _in_model_order(columns: Sequence[Column]) -> tuple[Column, ...]:
    found, nums = [], Counter()
    for kind in _TYPES:
        for column in columns:
            if column.type != kind:
                continue
            site = kind
            if kind == "categorical":
                site = f"categorical_{len(column.labels)}"
            place = {"position": nums[kind], "site_position": nums["site", site]}
            found.append(replace(column, site=site, **place))
            nums.update([kind, ("site", site)])
    return tuple(found)


# --- cells -------------------------------------------------------------------------


def _stack(columns: Sequence[Column], cells_of: Mapping) -> dict[str, np.ndarray]:
    arrays = {}
    for kind in _TYPES:
        own = [cells_of[c.name] for c in columns if c.type == kind]
        if own:
            dtype = _float_type() if kind == "real" else np.int32
            arrays[kind] = np.stack(own, 1).astype(dtype, order="C", copy=False)
    return arrays


def _float_type() -> np.dtype:
    return np.dtype(jax.dtypes.canonicalize_dtype(np.float64))


def _encode(column: Column, cells: _Cells, unseen: str | None = None) -> np.ndarray:
    """
    Cells in the form of the model, ``[N]``; real ones in float64.

    :param unseen: what is done about labels that the column does not have, of new rows.
    """
    _check_family(column.name, cells)
    if column.labels:
        return _codes(column, cells, unseen)
    x = _numbers(column, cells)
    missing = np.isnan(x)
    if column.type == "real":
        _check_numbers(column, x, ~np.isinf(x), "real values are finite")
        # What sums of squares in the sampler need.
        dtype, largest = _float_type(), np.nanmax(abs(x), initial=0)
        if largest > np.sqrt(float(np.finfo(dtype).max) / (16 * len(x))):
            raise ValueError(
                f"Column {column.name!r} has the value {largest:.6g}, too large for "
                f"sums of squares in {dtype}; divide the column by a constant."
            )
        if 0 < largest < np.sqrt(float(np.finfo(dtype).tiny)):
            raise ValueError(
                f"Column {column.name!r} has no value above {largest:.6g} in size, too "
                f"small for squares in {dtype}; multiply the column by a constant."
            )
        return x
    good = missing | ((x >= 0) & (x == np.floor(x)) & (x <= _LARGEST_COUNT))
    what = f"counts are integers from 0 to {_LARGEST_COUNT}; give it the type 'real'"
    _check_numbers(column, x, good, what)
    return np.where(missing, -1, x).astype(np.int32)


def _numbers(column: Column, cells: _Cells) -> np.ndarray:
    """Cells as float64, NaN where missing."""
    name, family = column.name, cells.family
    if family in ("none", "bool", "int", "float"):
        return np.where(cells.missing, np.nan, cells.values.astype(float))
    if family == "time" or not column.parsed:
        kind = "dates or times" if family == "time" else "values that are no numbers"
        raise ValueError(
            f"Column {name!r} has {kind}, such as {cells.distinct[0]!r}; of the type "
            f"{column.type!r}, it has numbers. Make numbers of them, or name what "
            "stands for missing cells in `missing`."
        )
    number_of = {None: np.nan}
    for value in cells.distinct:
        number_of[value] = _number(value)
        if np.isnan(number_of[value]):
            raise ValueError(
                f"Column {name!r} has the value {value!r}, which is no number such as "
                "-12.5 or 1e3. If it stands for missing cells, name it in `missing`; "
                "else rewrite it, or give the column the type 'categorical'."
            )
    return np.array([number_of[v] for v in cells.values])


def _number(value: Any) -> float:
    """A cell as a number, NaN if it is none."""
    # Python reads its own notation, as in "1_0", and the digits of all scripts: rather
    # a code, or a slip, than a number of a table.
    if isinstance(value, str) and ("_" in value or not value.strip().isascii()):
        return np.nan
    try:
        return float(value)
    except (TypeError, ValueError):
        return np.nan


def _check_numbers(column: Column, x: np.ndarray, good: np.ndarray, what: str) -> None:
    if not good.all():
        row = int(np.argmin(good))
        raise ValueError(
            f"Column {column.name!r} has the value {x[row]:.15g} in row {row}; {what}, "
            "or name it in `missing` if it stands for missing cells."
        )


def _check_precision(column: Column, x: np.ndarray) -> None:
    """That real cells differ by more than the float type can resolve."""
    if column.type != "real" or np.isnan(x).all():
        return
    dtype, largest, spread = _float_type(), np.nanmax(abs(x)), np.nanstd(x)
    step = float(np.spacing(largest.astype(dtype)))
    if 16 * step > spread > 0:
        raise ValueError(
            f"Column {column.name!r} has the value {largest:.15g} and a standard "
            f"deviation of {spread:.3g}, which {dtype} cannot resolve (its steps are "
            f"{step:.3g} there). Subtract a constant from the column, or choose a "
            "smaller unit; or call `numpyro.enable_x64()` first."
        )


def _codes(column: Column, cells: _Cells, unseen: str | None) -> np.ndarray:
    """Codes of the cells' labels, -1 where missing."""
    if cells.family == "none":
        return np.full(len(cells.missing), -1, np.int32)
    known = {label: code for code, label in enumerate(column.labels)}
    by_number = isinstance(cells.distinct, np.ndarray)
    distinct = cells.distinct.tolist() if by_number else cells.distinct
    others = [label for label in distinct if label not in known]
    if others and unseen != "missing":
        way = "name it in `missing`, or add it to the labels in `types`"
        if unseen is not None:
            way = (
                "`unseen='missing'` takes its cells as missing. When the first table "
                f"is made, `types={{{column.name!r}: [...]}}` gives it labels that "
                "are not seen"
            )
        raise ValueError(
            f"Column {column.name!r} has {_spell(others)}, which is not among its "
            f"labels {_spell(column.labels)}; {way}."
        )
    code_of = {label: known.get(label, -1) for label in distinct}
    if by_number:
        codes = np.array([code_of[label] for label in distinct], np.int32)
        # Of missing cells, whatever there is in range.
        place = np.searchsorted(cells.distinct[:-1], cells.values)
        return np.where(cells.missing, np.int32(-1), codes[place])
    code_of[None] = -1
    return np.fromiter((code_of[v] for v in cells.values), np.int32, len(cells.values))


def _typed(column: Column, cells: np.ndarray, series: nw.Series) -> tuple[list, Any]:
    """
    Labels or numbers in Python's types, None where missing; and the type of a column of
    a DataFrame for them: that of its `series`, if it can hold them.
    """
    missing = cells == np.array(None) if cells.dtype == object else cells != cells
    if cells.dtype == np.float32:
        # The shortest number that is this one in float32: 39.1, not 39.099998.
        cells = cells.astype(str).astype(float)
    if missing.any():
        cells = cells.astype(object)
        cells[missing] = None
    values, dtype = cells.tolist(), series.dtype
    pandas = series.implementation.is_pandas_like()
    native = series.to_native().dtype if pandas else dtype
    if column.labels:
        categories = None
        if isinstance(dtype, nw.Enum):
            categories = dtype.categories
        elif pandas and dtype == nw.Categorical:
            categories = native.categories
        if categories is not None and not set(column.labels) <= set(categories):
            return values, None
    elif dtype.is_integer():
        found = cells[~missing]
        limits = np.iinfo(type(dtype).__name__.lower().replace("128", "64"))
        if all(v == v // 1 and limits.min <= v <= limits.max for v in found):
            values = [v if v is None else int(v) for v in values]
        else:
            native = "float64" if pandas else nw.Float64
    elif not dtype.is_float():
        native = "float64" if pandas else nw.Float64
    if isinstance(native, np.dtype) and native.kind in "iub" and missing.any():
        # Those of pandas, which may be missing.
        name = native.name.replace("int", "Int").replace("u", "U")
        native = "boolean" if native.kind == "b" else name
    return values, native


def _array_of(labels: Sequence) -> np.ndarray:
    """Labels in an array ``[num]``: of numbers, if all are, or else of objects."""
    kinds = {type(label) for label in labels}
    if len(kinds) == 1 and kinds <= {bool, int, float}:
        return np.array(labels)
    array = np.empty(len(labels), object)
    for i, label in enumerate(labels):  # a tuple is one label
        array[i] = label
    return array


def _coordinate(labels: np.ndarray) -> np.ndarray:
    """Labels in a type that files have."""
    if labels.dtype.kind in "iufM":
        return labels
    kinds = {type(label) for label in labels.tolist()}
    if kinds == {int}:
        return np.array(labels.tolist())
    return np.array([str(label) for label in labels])


# --- messages ----------------------------------------------------------------------


def _spell(values: Any, most: int = 8) -> str:
    values = list(values)
    shown = ", ".join(repr(v) for v in values[:most])
    left = len(values) - most
    return f"{shown} and {left} more" if left > 0 else shown


def _unknown(name: Hashable, names: Any) -> str:
    return f"There is no column {name!r}; columns are {_spell(names)}."


def _note(
    findings: dict, column: Column, cells: _Cells, is_given: bool, has_codes: bool
) -> None:
    """Notes what there is to warn of in a column."""
    name = column.name
    if column.type == "ignore":
        if not is_given:
            findings["none" if cells.family == "none" else "id"].append(column)
        return
    if not has_codes:
        for value in _suspects(cells):
            findings["codes"].append((name, value))
    if is_given or cells.family != "text" or cells.declared is not None:
        return
    size = len(cells.distinct)
    words = [v for v in cells.distinct if v.strip().lower() not in _WORDS]
    if words and not any(np.isnan(_number(v)) for v in words):
        findings["numbers"].append(column)
    elif size >= _MIN_ROWS_OF_ID and cells.num_observed < _ROWS_PER_CATEGORY * size:
        findings["rare"].append(column)


def _suspects(cells: _Cells) -> list:
    """Values that may stand for missing cells."""
    if cells.family == "text":
        strings = [v for v in cells.distinct if isinstance(v, str)]
        return [v for v in strings if v.strip().lower() in _WORDS]
    if cells.family not in ("int", "float") or len(cells.distinct) < 4:
        return []
    found = []
    for at, rest in ((0, cells.distinct[1:]), (-1, cells.distinct[:-1])):
        value, near, far = cells.distinct[at], rest[at], rest[-1 - at]
        # In floats: unsigned integers would wrap around.
        gap, width = abs(float(value) - float(near)), abs(float(near) - float(far))
        apart = gap > width or value < 0 <= near
        if cells.counts[at] > 1 and value in _NUMBERS and apart:
            found.append(value.item())
    return found


def _warn(findings: Mapping) -> None:
    def say(message):
        warnings.warn(message, TableWarning, stacklevel=4)

    def names(columns):
        return _spell(c.name for c in columns)

    if found := findings["codes"]:
        values = {value: [n for n, v in found if v == value] for _, value in found}
        shown = "; ".join(f"{v!r} in {_spell(own)}" for v, own in values.items())
        say(
            "These values may stand for missing cells, but were taken as they are: "
            f"{shown}. `missing={tuple(values)!r}` makes missing cells of them; "
            f"`missing={{{found[0][0]!r}: ()}}` says that a column has none."
        )
    if found := findings["id"]:
        shown = ", ".join(f"{c.name!r} ({c.why})" for c in found)
        name = found[0].name
        say(
            f"Left out, since they seem to name the rows: {shown}. `index={name!r}` "
            f"does name the rows by it, `types={{{name!r}: 'ignore'}}` leaves it out, "
            "any other type keeps it."
        )
    if found := findings["none"]:
        say(
            f"Left out, since no cell is observed: {names(found)}. "
            f"`types={{{found[0].name!r}: 'ignore'}}` says so, any other type keeps it."
        )
    if found := findings["numbers"]:
        name = found[0].name
        say(
            f"Strings that are numbers were taken as categories: {names(found)}. "
            f"`types={{{name!r}: 'real'}}` reads them as numbers, "
            f"`types={{{name!r}: 'categorical'}}` says that they are none."
        )
    if found := findings["rare"]:
        shown = ", ".join(f"{c.name!r} ({c.distinct})" for c in found)
        name = found[0].name
        say(
            f"Columns with fewer than {_ROWS_PER_CATEGORY} cells a category: {shown}. "
            f"They tell little and cost much; `types={{{name!r}: 'ignore'}}` leaves "
            f"one out, `types={{{name!r}: 'categorical'}}` keeps it."
        )
