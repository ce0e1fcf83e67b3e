# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""What the scripts' figures have in common."""

from io import BytesIO

import numpy as np


def save(figure, path, dpi=100):
    """Write a PNG of 128 colours, which takes a third of the space."""
    # NB: what Matplotlib needs anyway, but only to draw.
    import matplotlib.pyplot as plt
    from PIL import Image

    whole = BytesIO()
    figure.savefig(whole, dpi=dpi)
    plt.close(figure)
    Image.open(whole).convert("RGB").quantize(128).save(path, "PNG", optimize=True)


def draw_times(lines, path, title, logx=True):
    """
    Mixing times against the number of rows.

    :param lines: a name, numbers of rows and times in sweeps for each line.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(5, 3.5), layout="constrained")
    for name, sizes, sweeps in lines:
        sweeps = np.where(sweeps > 0, sweeps, np.nan)  # none are needed
        ax.plot(sizes, sweeps, "o-", ms=4, label=name)
    ax.set_yscale("log")
    if logx:
        ax.set_xscale("log")
    ax.set_xlabel("balls")
    ax.set_ylabel("sweeps")
    ax.set_title(title, fontsize=10)
    ax.legend(frameon=False)
    save(figure, path)
