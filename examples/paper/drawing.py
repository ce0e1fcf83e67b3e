# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""What the scripts' figures have in common."""

from io import BytesIO


def save(figure, path, dpi=100):
    """Write a PNG of 128 colours, which takes a third of the space."""
    # NB: what Matplotlib needs anyway, but only to draw.
    import matplotlib.pyplot as plt
    from PIL import Image

    whole = BytesIO()
    figure.savefig(whole, dpi=dpi)
    plt.close(figure)
    Image.open(whole).convert("RGB").quantize(128).save(path, "PNG", optimize=True)
