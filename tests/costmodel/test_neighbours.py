import numpy as np
import pytest

from tokamax._src import errors
from tokamax._src.costmodel import features
from tokamax._src.costmodel.neighbours import Neighbours, distances, unanimous


@pytest.fixture
def neighbours(problems):
    numbers = np.log2([[float(n) for n in p.key.split(",")[:3]] for p in problems]).astype(np.float32)
    return Neighbours.of(problems, numbers, np.zeros((len(problems), 0), np.int16))


def test_table_gives_back_the_slowdowns_to_a_hundredth(neighbours, problems):
    for i in (0, 5):
        p = problems[i]
        table = neighbours.table([features.config_fields(c) for c in p.configs], np.array([i]))
        want = np.minimum(p.log_slowdown, 2.54)
        np.testing.assert_allclose(table[0], want, atol=0.00501)


def test_unknown_configs_are_nan(neighbours):
    assert np.isnan(neighbours.table([{"block_m": 3, "block_n": 3, "unroll": 1}], np.array([0, 1]))).all()


def test_distance_counts_octaves_and_categories():
    numbers = np.array([[1.0, 2.0], [4.0, 6.0], [1.0, np.nan]], np.float32)
    codes = np.array([[0], [0], [1]], np.int16)
    found = distances(numbers[0], codes[0], numbers, codes)
    np.testing.assert_allclose(found, [0.0, 5.0, 2.0])


def test_unanimous_choice_beats_the_default_everywhere():
    nan = np.nan
    table = np.array([[0.5, 0.0, 0.1, 0.2], [0.4, 0.6, 0.2, nan]])
    assert unanimous(table, 0, least=0.02) == 2  # The second loses once, the last is unknown once.
    assert unanimous(table[:1], 0, least=0.02) == 1
    assert unanimous(table, 1, least=0.02) is None
    assert unanimous(np.array([[nan, 0.1]]), 0, least=0.02) is None


@pytest.mark.parametrize("part", ["numbers", "codes", "costs", "texts"])
def test_parts_that_do_not_fit_are_refused(neighbours, part):
    import dataclasses

    with pytest.raises(errors.FormatError, match="damaged"):
        dataclasses.replace(neighbours, **{part: getattr(neighbours, part)[:-1]}).check(3, 0)


def test_packed_parts_give_the_same_neighbours(neighbours):
    again = Neighbours.unpacked(neighbours.packed(), neighbours.texts)
    for part in ("numbers", "codes", "costs"):
        np.testing.assert_array_equal(getattr(again, part), getattr(neighbours, part))
    assert again.texts == neighbours.texts


@pytest.mark.parametrize("part", ["measured", "costs"])
def test_packed_parts_that_do_not_fit_are_refused(neighbours, part):
    packed = neighbours.packed()
    with pytest.raises(errors.FormatError, match="damaged"):
        Neighbours.unpacked({**packed, part: np.append(packed[part], packed[part])}, neighbours.texts)
    with pytest.raises(errors.FormatError, match="damaged"):
        Neighbours.unpacked({n: a for n, a in packed.items() if n != part}, neighbours.texts)
