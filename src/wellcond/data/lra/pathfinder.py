"""Pathfinder: two markers in an image of dashed paths; the question is whether one path joins them.

After Linsley et al., arXiv 1805.08315, and Kim et al. (ICLR 2020). The figures of `Scene` are those of the Long Range
Arena's Pathfinder-32, contour length 14 (google-research/long-range-arena, lra_benchmarks/data/pathfinder.py). The
images are drawn anew, by another program, and one thing is stricter. Distances are in pixels, the larger of the two
coordinates:

- dashes that follow each other on a path are `STEP` = 2 apart: one dark pixel lies between them;
- all other dashes are further apart: at least two dark pixels.

So the answer can be read off the pixels alone, by walking from a marker in steps of at most `STEP` (`trace`). In the
published images two paths may come as close as the dashes of one, and only the smoothness of the paths decides.
"""

from __future__ import annotations

import dataclasses
import math
import random

import numpy as np
import numpy.typing as npt

Image = npt.NDArray[np.uint8]
Cells = npt.NDArray[np.bool_]
Point = tuple[float, float]
"""(x, y), to the right and down."""
Places = tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]
"""Rows and columns."""

STEP = 2
DASH_VALUE = 160
"""Grey of a pixel that a dash covers; one that it covers in part is darker, and black below a quarter."""
MARKER_VALUE = 255
SUBPIXELS = 4
"""Of a pixel in both directions, for the share of it that a dash covers."""
PLACES = 60
"""Tried for a dash before its path goes back; most of them are outside the image, which costs little."""
RETREATS = 20
"""Times that long paths go back three dashes before the drawing begins anew."""


@dataclasses.dataclass(frozen=True)
class Scene:
    """What is drawn; lengths are in pixels.

    Attributes:
        size: of the square image.
        dashes: of each of the two long paths, whose ends may be marked.
        distractors: short paths, as many as find room.
        distractor_dashes: of each of those.
        dash: length of a dash with its round ends, whose radius is 0.5.
        continuity: dashes turn by an angle δ with a density as cos²(continuity·δ), up to 90°/continuity.
        seed_distance: between the beginnings of the two long paths; both begin near the middle.
        marker_radius: of the discs at the marked ends.
        padding: pixels at the border that stay black.
        attempts: to draw a distractor before it is left out.
    """

    size: int = 32
    dashes: int = 14
    distractors: int = 5
    distractor_dashes: int = 4
    dash: float = 2.0
    continuity: float = 1.0
    seed_distance: float = 7.0
    marker_radius: float = 1.5
    padding: int = 1
    attempts: int = 5

    def __post_init__(self) -> None:
        if self.padding < 1 or self.dash <= 1:
            raise ValueError(
                f"padding is at least 1 pixel, and a dash longer than its round ends, 1 pixel: {self}"
            )
        if self.dashes < 2 or self.distractor_dashes < 1 or self.continuity < 1:
            raise ValueError(
                f"a long path has two dashes or more, a short one one, and continuity is ≥ 1: {self}"
            )
        if self.marker_radius < 0.75:
            raise ValueError(
                f"a marker of radius {self.marker_radius} may cover no pixel's middle; 0.75 does"
            )
        if self.size < 4 * self.seed_distance:
            raise ValueError(
                f"paths that begin {self.seed_distance} pixels from each other and twice that from the border need an "
                f"image of {4 * self.seed_distance} pixels, not {self.size}"
            )


PUBLISHED = Scene()


@dataclasses.dataclass(frozen=True)
class Drawing:
    """An image and what it was drawn from.

    Attributes:
        image: ``(size, size)`` uint8.
        label: 1 if the markers are on one path, else 0.
        paths: the pixels ``(size, size)`` of each path's dashes, without markers; the two long ones first.
    """

    image: Image
    label: int
    paths: list[Cells]


def draw(scene: Scene, rng: random.Random) -> Drawing:
    """A drawing; ``rng.random()`` is all that is asked of the random numbers.

    >>> drawing = draw(Scene(), random.Random(0))
    >>> drawing.image.shape, drawing.label == trace(drawing.image)
    ((32, 32), True)
    """
    label = int(rng.random() < 0.5)
    while True:
        canvas = _Canvas(scene, rng)
        pair = canvas.two_long_paths()
        if pair is not None:
            break
    paths = [*pair, *canvas.distractors()]
    first = int(rng.random() < 0.5)
    second = first if label else 1 - first
    marks = canvas.disc(pair[first].dashes[0].start) | canvas.disc(pair[second].dashes[-1].end)
    grey = np.max([dash.grey for path in paths for dash in path.dashes], axis=0)
    image = np.where(marks, MARKER_VALUE, grey).astype(np.uint8)
    cells = [np.max([dash.grey for dash in path.dashes], axis=0) > 0 for path in paths]
    return Drawing(image, label, cells)


@dataclasses.dataclass(frozen=True)
class _Dash:
    """A dash and the pixels that it needs, room for a marker included.

    Attributes:
        start, end, angle: of its line.
        grey: ``(size, size)``.
        touching, around: ``(size, size)``, which pixels are at most one and at most `STEP` from those it needs.
        linked: ``(size, size)``, which are at most `STEP` from those it covers: a marker may be missing in the end.
    """

    start: Point
    end: Point
    angle: float
    grey: Image
    touching: Cells
    around: Cells
    linked: Cells


@dataclasses.dataclass
class _Path:
    """Dashes in order."""

    dashes: list[_Dash]


class _Canvas:
    """For every pixel how many dashes are within `STEP` of it."""

    def __init__(self, scene: Scene, rng: random.Random) -> None:
        self.scene = scene
        self.rng = rng
        self.near = np.zeros((scene.size, scene.size), np.int16)

    def two_long_paths(self) -> tuple[_Path, _Path] | None:
        """Both grow in turns, as in the source; None if one finds no room."""
        scene, rng = self.scene, self.rng
        room = scene.size - 4 * scene.seed_distance
        x, y = (2 * scene.seed_distance + room * rng.random() for _ in range(2))
        one = self.begin((x, y), marked=True)
        other = self.begin(_moved((x, y), 2 * math.pi * rng.random(), scene.seed_distance), marked=True)
        if one is None or other is None:
            return None
        retreats = RETREATS
        while len(one.dashes) < scene.dashes or len(other.dashes) < scene.dashes:
            path = min(one, other, key=lambda path: len(path.dashes))
            if self.extend(path, marked=len(path.dashes) == scene.dashes - 1):
                continue
            if retreats == 0:
                return None
            retreats -= 1
            for _ in range(min(3, len(path.dashes) - 1)):
                self.near -= path.dashes.pop().around
        return one, other

    def distractors(self) -> list[_Path]:
        """Short paths, as many as find room."""
        found = []
        for _ in range(self.scene.distractors * self.scene.attempts):
            near = self.near.copy()
            size = self.scene.size
            path = self.begin((size * self.rng.random(), size * self.rng.random()), marked=False)
            missing = self.scene.distractor_dashes - 1
            if path is not None and all(self.extend(path, marked=False) for _ in range(missing)):
                found.append(path)
                if len(found) == self.scene.distractors:
                    break
            else:
                self.near = near
        return found

    def begin(self, start: Point, *, marked: bool) -> _Path | None:
        """A path with one dash; ``marked``: leave room for a marker at its start. None if there is no room."""
        if self.near[int(start[1]), int(start[0])]:
            return None
        for _ in range(PLACES):
            angle = 2 * math.pi * self.rng.random()
            end = _moved(start, angle, self.scene.dash - 1)
            cells = self.free(start, end, self.near, marked=start if marked else None)
            if cells is not None:
                return _Path([self.put(start, end, angle, cells)])
        return None

    def extend(self, path: _Path, *, marked: bool) -> bool:
        """One dash more; ``marked``: leave room for a marker at its end. False if there is no room."""
        last = path.dashes[-1]
        near = self.near - last.around
        for _ in range(PLACES):
            turn = self.turn()
            angle = last.angle + turn
            # How long the gap must be for one dark pixel depends on its direction and on the grid.
            start = _moved(last.end, last.angle + turn / 2, 1.5 + 1.5 * self.rng.random())
            end = _moved(start, angle, self.scene.dash - 1)
            cells = self.free(start, end, near, marked=end if marked else None)
            if cells is None or last.touching[cells].any():
                continue
            dash = self.put(start, end, angle, cells)
            if (last.linked & (dash.grey > 0)).any():
                path.dashes.append(dash)
                return True
            self.near -= dash.around
        return False

    def free(
        self, start: Point, end: Point, near: npt.NDArray[np.int16], *, marked: Point | None
    ) -> Places | None:
        """The pixels that a dash needs, with room for a marker; None if one is in the padding or near another path."""
        low, high = self.scene.padding, self.scene.size - self.scene.padding
        if not (low < min(*start, *end) and max(*start, *end) < high):
            return None
        # Most places are out of the question by the pixels of the two ends, which is seen at little cost.
        if near[int(end[1]), int(end[0])] or near[int(start[1]), int(start[0])]:
            return None
        grey, top, left = _line(start, end)
        rows, columns = np.nonzero(grey)
        rows, columns = rows + top, columns + left
        if marked is not None:
            more_rows, more_columns = np.nonzero(self.disc(marked))
            rows, columns = np.append(rows, more_rows), np.append(columns, more_columns)
            reach = self.scene.marker_radius
            if min(marked) - reach < low or max(marked) + reach > high:
                return None
        if min(rows.min(), columns.min()) < low or max(rows.max(), columns.max()) >= high:
            return None
        return None if near[rows, columns].any() else (rows, columns)

    def put(self, start: Point, end: Point, angle: float, cells: Places) -> _Dash:
        """The dash that needs these pixels; from now on others keep away from it."""
        shape = self.near.shape
        grey = np.zeros(shape, np.uint8)
        own, top, left = _line(start, end)
        grey[top : top + own.shape[0], left : left + own.shape[1]] = own[: shape[0] - top, : shape[1] - left]
        covered = grey > 0
        needed = covered.copy()
        needed[cells] = True
        touching = _grown(needed)
        dash = _Dash(start, end, angle, grey, touching, _grown(touching), _grown(_grown(covered)))
        self.near += dash.around
        return dash

    def turn(self) -> float:
        """An angle with the density of `Scene.continuity`, by rejection."""
        widest = math.pi / 2 / self.scene.continuity
        while True:
            angle = widest * (2 * self.rng.random() - 1)
            if self.rng.random() < math.cos(self.scene.continuity * angle) ** 2:
                return angle

    def disc(self, centre: Point) -> Cells:
        """Pixels whose middle is in a marker."""
        middles = np.arange(self.scene.size) + 0.5
        square = (middles - centre[0]) ** 2 + (middles[:, None] - centre[1]) ** 2
        cells: Cells = square <= self.scene.marker_radius**2
        return cells


def _moved(place: Point, angle: float, length: float) -> Point:
    return place[0] + length * math.cos(angle), place[1] + length * math.sin(angle)


def _line(start: Point, end: Point) -> tuple[Image, int, int]:
    """Grey values of a line of width 1 with round ends, and the row and column of the first of them."""
    left, right = (math.floor(min(start[0], end[0]) - 0.5), math.ceil(max(start[0], end[0]) + 0.5))
    top, bottom = (math.floor(min(start[1], end[1]) - 0.5), math.ceil(max(start[1], end[1]) + 0.5))
    x = (np.arange((right - left) * SUBPIXELS) + 0.5) / SUBPIXELS + (left - start[0])
    y = ((np.arange((bottom - top) * SUBPIXELS) + 0.5) / SUBPIXELS + (top - start[1]))[:, None]
    dx, dy = end[0] - start[0], end[1] - start[1]
    along = (x * dx + y * dy) / (dx * dx + dy * dy)
    np.minimum(np.maximum(along, 0, out=along), 1, out=along)
    covered = (x - along * dx) ** 2 + (y - along * dy) ** 2 <= 0.25
    counts = covered.reshape(bottom - top, SUBPIXELS, right - left, SUBPIXELS).sum((1, 3))
    share = counts / SUBPIXELS**2
    return (DASH_VALUE * share * (share >= 0.25)).astype(np.uint8), top, left


def _grown(cells: Cells) -> Cells:
    """The cells and their eight neighbours."""
    wide = cells.copy()
    wide[1:] |= cells[:-1]
    wide[:-1] |= cells[1:]
    grown = wide.copy()
    grown[:, 1:] |= wide[:, :-1]
    grown[:, :-1] |= wide[:, 1:]
    return grown


def trace(image: Image) -> int:
    """Whether the two markers are on one path, read off the pixels.

    From a marker, walks to every lit pixel at most `STEP` away, and on from there.

    Args:
        image: ``(H, W)`` uint8; lit pixels are not 0, those of the markers are `MARKER_VALUE`.

    Returns:
        1 if the walk from one marker reaches the other, else 0.

    Raises:
        ValueError: there are not two markers.
    """
    from scipy.ndimage import label

    marked, count = label(image == MARKER_VALUE, structure=np.ones((3, 3)))
    if count != 2:
        raise ValueError(f"the image has {count} markers, not 2: they are the pixels of value {MARKER_VALUE}")
    return int(path_numbers(image)[marked == 1].max() == path_numbers(image)[marked == 2].max())


def path_numbers(image: Image) -> npt.NDArray[np.int64]:
    """The number of each lit pixel's path ``(H, W)``, from 1; 0 where it is dark.

    >>> path_numbers(np.array([[9, 0, 9, 0, 0, 9]], np.uint8))
    array([[1, 0, 1, 0, 0, 2]])
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components
    from scipy.spatial import KDTree

    lit = np.argwhere(image > 0)
    numbers = np.zeros(image.shape, np.int64)
    if len(lit):
        pairs = KDTree(lit).query_pairs(STEP, p=np.inf, output_type="ndarray")
        graph = coo_array((np.ones(len(pairs)), pairs.T), shape=(len(lit), len(lit)))
        numbers[tuple(lit.T)] = connected_components(graph, directed=False)[1] + 1
    return numbers
