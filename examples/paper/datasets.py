# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""
The data sets of the paper, as tables that the models take (Obermeyer et al., 2014,
section 4).

========  ==================  =====================================================
name      rows x columns      what it is
========  ==================  =====================================================
hospital  307 x 63            Dartmouth Atlas of Health Care 2008, hospital referral
                              regions; all columns real
network   10^4 to 10^6 x 40   KDD Cup 1999, network connections; 31 real columns, 4
                              categorical, 5 binary
census    10^4 to 10^6 x 68   US census of 1990, categorical and binary columns
income    10^4, 10^5 x 40     Census-Income (KDD): census data of other years and
                              columns, in place of the census where real rows count
========  ==================  =====================================================

They are read from a folder with these files, of which those named first are used. None
is downloaded.

- ``dha/dha.csv``: the table of the Dartmouth Atlas as CrossCat's examples have it,
  https://github.com/probcomp/crosscat (www/data/dha.csv). SHA-256
  e4a06c113f68a4b5411740110fa16181773191aa406be07130dd236a64b59e3d
- ``kddcup99/kddcup.data.gz``: all 4,898,431 rows,
  http://kdd.ics.uci.edu/databases/kddcup99/kddcup99.html; or
  ``kddcup99/kddcup.data_10_percent.gz``: 494,021 of them. SHA-256 of that
  8045aca0d84e70e622d1148d7df782496f6333bf6eb979a1b0837c42a9fd9561
- ``census1990/USCensus1990.data.txt``: all 2,458,285 rows,
  https://archive.ics.uci.edu/dataset/116/us+census+data+1990; or
  ``census1990/us_census_1990_first1000.csv``: the first 1,000, which are in random
  order. SHA-256 of that
  4c5c60d66a06e57dc41e3e5f08d2427b3dabd393839b2d8592e7038f55a3ee99
- ``census_income_kdd/census-income.test.gz``: 99,762 rows,
  https://archive.ics.uci.edu/dataset/117/census+income+kdd. SHA-256
  5ac4cacd3ca9f1ecb10de1a0a41e4ac68fdc419e3fec190f5c0c6cc03b2ea659

A table of N rows is N random ones of the file, without replacement: the network's are
in the order in which they were captured. Where the file has fewer, the rest is made up
(:func:`more_rows`), :attr:`Dataset.num_made_up` says how many rows that are, and
:attr:`Dataset.note` says so in words. Made-up rows are near copies of real ones, so
that what is held out is easier to predict than real rows would be.

Of the network, the label is left out, and `num_outbound_cmds`, which is constant;
amounts (bytes, seconds, and counts from 0 up) are on the scale log(1 + x). Of
Census-Income, the label and the sampling weight are left out.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from numpyro_subanneal import Table

# Names in the order of the file; what the documentation of the data calls symbolic.
_NETWORK = """
duration protocol_type service flag src_bytes dst_bytes land wrong_fragment urgent hot
num_failed_logins logged_in num_compromised root_shell su_attempted num_root
num_file_creations num_shells num_access_files num_outbound_cmds is_host_login
is_guest_login count srv_count serror_rate srv_serror_rate rerror_rate srv_rerror_rate
same_srv_rate diff_srv_rate srv_diff_host_rate dst_host_count dst_host_srv_count
dst_host_same_srv_rate dst_host_diff_srv_rate dst_host_same_src_port_rate
dst_host_srv_diff_host_rate dst_host_serror_rate dst_host_srv_serror_rate
dst_host_rerror_rate dst_host_srv_rerror_rate label
""".split()
_NETWORK_CATEGORICAL = "protocol_type service flag su_attempted".split()
_NETWORK_BINARY = "land logged_in root_shell is_host_login is_guest_login".split()
_NETWORK_AMOUNTS = """
duration src_bytes dst_bytes wrong_fragment urgent hot num_failed_logins num_compromised
num_root num_file_creations num_shells num_access_files count srv_count dst_host_count
dst_host_srv_count
""".split()

_INCOME = """
age class_of_worker industry_code occupation_code education wage_per_hour enrolled
marital_status major_industry major_occupation race hispanic sex union
reason_for_unemployment full_or_part_time capital_gains capital_losses dividends
tax_filer region_before state_before household household_summary weight migration_msa
migration_region migration_within lived_here sunbelt num_persons_worked family_under_18
father_born mother_born born citizenship own_business questionnaire veterans_benefits
weeks_worked year label
""".split()
_INCOME_AMOUNTS = "wage_per_hour capital_gains capital_losses dividends".split()
_INCOME_REAL = [*_INCOME_AMOUNTS, "age", "weeks_worked"]


@dataclass(frozen=True)
class Dataset:
    """
    - **name** - such as "network 10000 x 40".
    - **table** - its rows; ``table.model_args`` are arguments of
      :func:`models.crosscat.mixed <numpyro_subanneal.models.crosscat.mixed>`.
    - **num_made_up** - how many rows are not of the file.
    - **note** - where the rows are from, in words.
    """

    name: str
    table: Table
    num_made_up: int
    note: str

    @property
    def num_rows(self) -> int:
        return len(self.table.index)


def load(
    name: str,
    data: str | Path,
    num_rows: int | None = None,
    num_columns: int | None = None,
    seed: int = 0,
) -> Dataset:
    """
    One of the data sets.

    :param name: "hospital", "network", "census" or "income".
    :param data: folder with the files, see above.
    :param num_rows: number of rows N; those of the file by default.
    :param num_columns: for a smaller table, the first so many columns.
    :param seed: of which rows, and of those that are made up.
    """
    if name not in _READERS:
        raise ValueError(f"There is no data set {name!r}; there are {[*_READERS]}.")
    frame, types, file = _READERS[name](Path(data))
    keep = frame.columns[:num_columns]
    frame, types = frame[keep], {c: types[c] for c in keep}
    if num_rows is None:
        num_rows = len(frame)
    rng = np.random.default_rng(seed)
    real = min(num_rows, len(frame))
    chosen = frame.iloc[rng.permutation(len(frame))[:real]]
    note = f"{real} of the {len(frame)} rows of {file}"
    if real < num_rows:
        made_up = more_rows(frame, num_rows - real, rng)
        chosen = pd.concat([chosen, made_up])
        note += f"; the other {num_rows - real} rows are MADE UP from them"
        # Made-up rows are anywhere in the table.
        chosen = chosen.iloc[rng.permutation(num_rows)]
    table = Table.from_dataframe(
        chosen.reset_index(drop=True),
        types,
        missing={c: ("?",) if name == "income" else () for c in keep},
    )
    return Dataset(
        f"{name} {num_rows} x {len(keep)}", table, num_rows - real, f"{name}: {note}"
    )


def more_rows(
    frame: pd.DataFrame,
    num: int,
    rng: np.random.Generator,
    share: float = 0.2,
) -> pd.DataFrame:
    """
    Rows for where the real ones run out: each is a real row, drawn with replacement, in
    which each cell is, with probability `share`, replaced by that of another random
    row. So columns keep their distribution, and depend on each other somewhat less.
    """
    rows = rng.integers(len(frame), size=num)
    columns = {}
    for name in frame:
        redrawn = rng.random(num) < share
        source = np.where(redrawn, rng.integers(len(frame), size=num), rows)
        columns[name] = frame[name].to_numpy()[source]
    return pd.DataFrame(columns)


def _labels(column: pd.Series) -> list | str:
    """The type of a column of categories: binary, or its labels in the whole file, so
    that they are the same in every table of it."""
    labels = sorted(x for x in column.unique() if x != "?")
    return "binary" if set(labels) <= {0, 1} and len(labels) == 2 else labels


def _hospital(data):
    path = data / "dha" / "dha.csv"
    frame = pd.read_csv(path).drop(columns="NAME").astype(float)
    return frame, dict.fromkeys(frame, "real"), path.name


def _network(data):
    path = _first(
        data / "kddcup99", "kddcup.data.gz", "kddcup.data_10_percent.gz", "kddcup.data"
    )
    frame = pd.read_csv(path, header=None, names=_NETWORK)
    frame = frame.drop(columns=["num_outbound_cmds", "label"])
    frame[_NETWORK_AMOUNTS] = np.log1p(frame[_NETWORK_AMOUNTS])
    types = dict.fromkeys(frame, "real")
    types |= {c: _labels(frame[c]) for c in _NETWORK_CATEGORICAL}
    types |= dict.fromkeys(_NETWORK_BINARY, "binary")
    return frame, types, path.name


def _census(data):
    path = _first(
        data / "census1990", "USCensus1990.data.txt", "us_census_1990_first1000.csv"
    )
    frame = pd.read_csv(path).drop(columns="caseid")
    return frame, {c: _labels(frame[c]) for c in frame}, path.name


def _income(data):
    path = data / "census_income_kdd" / "census-income.test.gz"
    frame = pd.read_csv(
        path, header=None, names=_INCOME, skipinitialspace=True, na_filter=False
    )
    frame = frame.drop(columns=["weight", "label"])
    frame[_INCOME_AMOUNTS] = np.log1p(frame[_INCOME_AMOUNTS])
    types = {c: _labels(frame[c]) for c in frame}
    return frame, types | dict.fromkeys(_INCOME_REAL, "real"), path.name


_READERS = {
    "hospital": _hospital,
    "network": _network,
    "census": _census,
    "income": _income,
}


def _first(folder: Path, *names: str) -> Path:
    for name in names:
        if (folder / name).exists():
            return folder / name
    raise FileNotFoundError(f"{folder} has none of {', '.join(names)}.")
