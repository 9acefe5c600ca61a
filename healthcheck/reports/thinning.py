"""Fewer points of a series for a picture of it: none that a reader would miss.

Largest-Triangle-Three-Buckets (Steinarsson, 2013, https://hdl.handle.net/1946/15343) over the lowest and highest points of
small buckets (Van Der Donckt et al., MinMaxLTTB, 2023, arXiv:2305.00332). The extremes of coarser buckets are kept whatever
the triangles say, so that a spike of one sample stays. Values that are not finite are no points of a line: callers
draw them apart.
"""

from __future__ import annotations

from collections.abc import Sequence

POINTS = 600
"""Points of a line in a picture: about two for each pixel column that a reader can tell apart."""
COARSE = 150
"""Buckets of which the extremes are kept in any case."""
FINE = 4
"""Points per point of the result that the triangles choose from."""


def thinned(xs: Sequence[float], ys: Sequence[float], points: int = POINTS) -> list[int]:
    """Indices of the points to draw, in order; all of them where there are few.

    :param xs: ascending; ``ys``: finite.
    """
    count = len(xs)
    if count <= points:
        return list(range(count))
    chosen = extremes(ys, range(count), points * FINE // 2)
    kept = {0, count - 1, *largest_triangles(xs, ys, chosen, points)}
    kept.update(extremes(ys, chosen, COARSE))  # those of the whole are among those of the parts
    return sorted(kept)


def extremes(ys: Sequence[float], among: Sequence[int], buckets: int) -> list[int]:
    """Indices of the lowest and the highest value of each bucket, in order."""
    count = len(among)
    kept: list[int] = []
    for n in range(buckets):
        part = among[n * count // buckets : (n + 1) * count // buckets]
        if len(part):
            low, high = min(part, key=ys.__getitem__), max(part, key=ys.__getitem__)
            kept += [low] if low == high else [low, high] if low < high else [high, low]
    return kept


def largest_triangles(xs: Sequence[float], ys: Sequence[float], among: Sequence[int], points: int) -> list[int]:
    """LTTB: of each bucket the point that makes the largest triangle with the one before and the mean of the next."""
    count = len(among)
    if count <= points or points < 3:
        return list(among)
    size = (count - 2) / (points - 2)
    kept = [among[0]]
    for n in range(points - 2):
        here = among[int(n * size) + 1 : int((n + 1) * size) + 1]
        after = among[int((n + 1) * size) + 1 : int((n + 2) * size) + 1] or among[-1:]
        mean_x = sum(xs[i] for i in after) / len(after)
        mean_y = sum(ys[i] for i in after) / len(after)
        x, y = xs[kept[-1]], ys[kept[-1]]
        across, along = mean_y - y, x - mean_x
        kept.append(max(here, key=lambda i: abs((xs[i] - x) * across + (ys[i] - y) * along)))
    kept.append(among[-1])
    return kept


def medians(xs: Sequence[float], ys: Sequence[float], places: int = COARSE) -> tuple[list[float], list[float]]:
    """The usual course of a noisy series: the median of each of so many places, which no single value can move."""
    count = len(xs)
    places = min(places, count)
    at, usual = [], []
    for n in range(places):
        begin, end = n * count // places, (n + 1) * count // places
        part = sorted(ys[begin:end])
        at.append((xs[begin] + xs[end - 1]) / 2)
        usual.append(part[len(part) // 2] if len(part) % 2 else (part[len(part) // 2 - 1] + part[len(part) // 2]) / 2)
    return at, usual
