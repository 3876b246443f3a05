"""Files from anywhere: mutations of real ones are read or refused with the one documented error, and do nothing else.

make slow    # 100,000 mutations; the plain suite tries 1,500
"""

import io
import json
import pathlib
import random
import sys
import tracemalloc
import warnings

import pytest

import tokamax
from tokamax import AutotuningResult
from tokamax._src import errors
from tokamax._src.autotuning import store
from tokamax._src.autotuning.journal import Journal
from tokamax._src.costmodel.model import CostModel
from toy import TableTimer, Toy, ToyConfig, arrays, by_block, entry

WORDS = ["", "tokamax", "os.system", "__class__", "builtins.eval", "f32[8,4]", "\ud800", "f32[999999999,999999999]"]
VALUES = [None, True, -1, 0, 1e308, 2**63, 10**400, float("inf"), [], {}, [[]], {"": {}}, *WORDS]
MOST_BYTES = 64 * 2**20


def mutated_bytes(content, rng):
    """Flips, cuts, doubles, or inserts a few bytes."""
    content = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(content) + 1)
        match rng.randrange(4):
            case 0:
                content[place : place + 1] = bytes([rng.randrange(256)])
            case 1:
                del content[place : place + rng.choice([1, 10, len(content)])]
            case 2:
                content[place:place] = content[place : place + rng.randrange(200)]
            case 3:
                content[place:place] = rng.choice(
                    [b"\x00", b'"', b"{", b"[" * 2000, b"9" * 5000, b"\xff\xfe", b"1e999"]
                )
        content = content or bytearray(b"\x00")
    return bytes(content)


def mutated_json(data, rng):
    """Replaces, drops or renames something, anywhere in JSON data."""
    data = json.loads(data)
    for _ in range(rng.randint(1, 3)):
        nodes = []

        def visit(node, nodes=nodes):
            for key, value in list(node.items() if isinstance(node, dict) else enumerate(node)):
                nodes.append((node, key))
                if isinstance(value, (dict, list)):
                    visit(value, nodes)

        visit(data)
        if not nodes:
            break
        node, key = rng.choice(nodes)
        match rng.randrange(4):
            case 0 | 1:
                node[key] = rng.choice(VALUES)
            case 2:
                del node[key]
            case 3 if isinstance(node, dict):
                node[rng.choice(WORDS)] = node.pop(key)
            case _:
                node[key] = [node[key]]
    return json.dumps(data).encode()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Name -> (content of a real file, what reads it)."""
    folder = tmp_path_factory.mktemp("fuzz")
    bound = [Toy.bind(*arrays(m)) for m in (16, 24, 32, 48, 64, 96)]
    result = tokamax.autotune(bound, timer=TableTimer(by_block), progress_bar=False, keep=False)
    (model,) = result.fit().models.values()
    few = AutotuningResult((entry(4), entry(8)))
    place = store.DirectoryStore(folder / "data", folder / "models")
    place.put(few.entries)
    (sweep,) = place.sweeps()
    winners = sweep.with_name(sweep.name.replace(".jsonl", ".best.json"))
    journal = Journal.open(folder / "journal.jsonl", ToyConfig, {"key": "k"})
    journal.runs(ToyConfig(2))
    journal.sampled(ToyConfig(2), 1.5)
    journal.close()
    kind = few.entries[0].device_kind

    def path_of(content):
        path = folder / "mutated"
        path.write_bytes(content)
        return path

    def read_journal(content):
        read = Journal.open(path_of(content), ToyConfig, {"key": "k"})
        read.close()

    return {
        "result": (few.dumps().encode(), AutotuningResult.loads),
        "result with a model": (result.fit().dumps().encode(), AutotuningResult.loads),
        "bound arguments": (
            tokamax.autotuning.bound_args_to_json(bound[:2]).encode(),
            lambda content: tokamax.autotuning.bound_args_from_json(path_of(content)),
        ),
        "sweep": (sweep.read_bytes(), lambda content: store.read_jsonl(path_of(content))),
        "winners": (winners.read_bytes(), lambda content: store.WINNERS.read(path_of(content), kind)),
        "journal": ((folder / "journal.jsonl").read_bytes(), read_journal),
        "model": (model.dumps(), lambda content: CostModel.load(io.BytesIO(content))),
    }


def _imported():
    """Modules in memory; Python itself loads a codec when a zip file asks for one."""
    return {name for name in sys.modules if not name.startswith("encodings.")}


def fuzz(files, name, count, seed):
    content, read = files[name]
    rng = random.Random(f"{name} {seed}")
    try:
        json.loads(content)
        mutations = (mutated_bytes, mutated_json)
    except ValueError:
        mutations = (mutated_bytes,)
    before = _imported()
    for _ in range(count):
        bad = rng.choice(mutations)(content, rng)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                read(bad)
            except errors.FormatError:
                pass
            except BaseException as error:
                pathlib.Path("/tmp/tokamax-fuzz").write_bytes(bad)
                raise AssertionError(f"{name}: {type(error).__name__}: {error}; see /tmp/tokamax-fuzz") from error
    assert _imported() <= before, "reading a file imported something"


NAMES = ["result", "result with a model", "bound arguments", "sweep", "winners", "journal", "model"]


@pytest.mark.parametrize("name", NAMES)
def test_mutated_files_are_read_or_refused(files, name):
    fuzz(files, name, 20 if name == "result with a model" else 250, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", NAMES)
def test_many_mutated_files_are_read_or_refused(files, name, seed):
    fuzz(files, name, 100 if name == "result with a model" else 1_650, seed=1 + seed)


@pytest.mark.parametrize("name", ["result", "bound arguments", "model"])
def test_memory_is_bounded_on_hostile_sizes(files, name):
    tracemalloc.start()
    try:
        fuzz(files, name, 40, seed=99)
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()
