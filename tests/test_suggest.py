import pytest

import tokamax
from tokamax._src import dispatch, errors
from tokamax._src.autotuning import store
from tokamax._src.suggest import suggest
from tokamax._src.tools import cli
from toy import TableTimer, Toy, arrays, by_block, entry


def ba(m):
    return Toy.bind(*arrays(m))


def test_without_a_model_shapes_that_lie_apart_come_first():
    found = suggest([ba(16), ba(17), ba(18), ba(400)], 2)
    assert {s.bound_args for s in found} & {ba(400)}
    assert len(found) == 2 and found[0].need >= found[1].need
    assert "no model" in found[0].reason


def test_weights_decide_between_equals():
    assert suggest([ba(16), ba(400)], 1, weights=[1.0, 3.0])[0].bound_args == ba(400)
    assert suggest([ba(16), ba(400)], 1, weights=[3.0, 1.0])[0].bound_args == ba(16)


def test_measured_shapes_are_passed_over():
    store.private().put([entry(8)])
    dispatch.forget()
    assert [s.bound_args for s in suggest([ba(8), ba(16), ba(16)], 5)] == [ba(16)]


def test_what_dispatch_leaves_out_is_measured_all_the_same():
    store.private().put([entry(8)])
    with tokamax.config.private_cache(False):
        assert [s.bound_args for s in suggest([ba(8), ba(16)], 5)] == [ba(16)]


def test_what_the_model_does_not_know_comes_first():
    bound = [ba(m) for m in (16, 24, 32, 48, 64, 96, 128, 192)]
    result = tokamax.autotune(bound, timer=TableTimer(by_block), progress_bar=False, keep=False).fit()
    with result:
        first, *_ = suggest([ba(40), ba(50_000)], 2)
    assert first.bound_args == ba(50_000) and "abstains" in first.reason


def test_wrong_counts():
    with pytest.raises(errors.ArgumentError, match="count must be at least 1"):
        suggest([ba(8)], 0)
    with pytest.raises(errors.ArgumentError, match="2 weights for 1 candidates"):
        suggest([ba(8)], 1, weights=[1.0, 2.0])


def test_command_line_writes_what_tune_reads(tmp_path, capsys):
    among, out = tmp_path / "among.json", tmp_path / "next.json"
    among.write_text(tokamax.autotuning.bound_args_to_json([ba(8), ba(16), ba(64)]))
    assert cli.main(["train", "--suggest", "2", "--among", str(among), "--output", str(out)]) == 0
    assert len(tokamax.autotuning.bound_args_from_json(out)) == 2
    assert f"tokamax tune {out}" in capsys.readouterr().out
    assert cli.main(["train", "--suggest", "1", "--among", str(among)]) == 0
    assert len(tokamax.autotuning.bound_args_from_json(capsys.readouterr().out)) == 1
    assert cli.main(["train", "--suggest", "1"]) == 2
