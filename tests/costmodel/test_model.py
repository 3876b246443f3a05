import dataclasses
import io
import subprocess
import sys
import zipfile

import numpy as np
import pytest

from tokamax._src import errors, serialization, shapes
from tokamax._src.costmodel import dataset, modelfile, rivals
from tokamax._src.costmodel.model import MIN_GROUPS, Calibration, CostModel

CHOOSERS = {
    "model": lambda: CostModel(iterations=20),
    "heuristic": rivals.Heuristic,
    "single": rivals.BestSingle,
    "nearest": rivals.NearestShape,
    "nearest 5": rivals.KNearest,
    "random": rivals.RandomConfig,
}


@pytest.mark.parametrize("name", CHOOSERS)
class TestChooserContract:
    """What every chooser keeps to."""

    def test_fit_returns_self_and_predictions_have_the_right_form(self, name, problems, facts, make_problem):
        chooser = CHOOSERS[name]()
        assert chooser.fit(problems, facts) is chooser
        problem = make_problem(200, 300, 400)
        found = chooser.predict(problem.arguments, problem.configs, facts, default=0)
        assert 0 <= found.index < len(problem.configs)
        assert sorted(found.order.tolist()) == list(range(len(problem.configs)))
        assert found.slowdown.shape == found.spread.shape == (len(problem.configs),)

    def test_same_data_same_choice(self, name, problems, facts, make_problem):
        problem = make_problem(200, 300, 400)
        orders = [
            CHOOSERS[name]().fit(problems, facts).predict(problem.arguments, problem.configs).order for _ in range(2)
        ]
        np.testing.assert_array_equal(*orders)

    def test_unmeasured_configs_do_not_break_it(self, name, problems, facts, make_problem):
        problem = make_problem(200, 300, 400)
        configs = [{"block_m": 7, "block_n": 9, "unroll": 1}]
        assert CHOOSERS[name]().fit(problems, facts).predict(problem.arguments, configs).index == 0


def test_predicts_good_configs_for_new_shapes(model, make_problems):
    fresh = make_problems(12, seed=5)
    predictions = [model.predict(p.arguments, p.configs, default=p.default) for p in fresh]
    slowdowns = [np.exp(p.log_slowdown[f.index]) for p, f in zip(fresh, predictions, strict=True) if not f.abstain]
    assert len(slowdowns) >= 8
    assert np.mean(slowdowns) < 1.1


def test_prediction_says_what_it_knows(model, problems):
    found = model.predict(problems[0].arguments, problems[0].configs, default=0)
    assert found.abstain is None
    assert found.distance == 0.0 and "a[0]=" in found.nearest
    assert 1.0 <= found.expected_slowdown < 1.3
    assert np.all(found.slowdown >= 1.0)


def test_choose_takes_the_default_as_a_config(model, problems):
    p = problems[0]
    by_index = model.predict(p.arguments, p.configs, default=0)
    by_config = model.choose(p.arguments, p.configs, default=p.configs[0])
    assert by_index.index == by_config.index
    assert model.choose(p.arguments, p.configs, default="not a candidate").abstain is None


def test_default_stays_unless_the_gain_exceeds_the_noise(problems, facts):
    model = CostModel(iterations=20).fit(problems, facts)
    p = next(p for p in problems if model.predict(p.arguments, p.configs, default=0).index != 0)
    model.calibration_ = Calibration(**{**vars(model.calibration_), "min_gain": 100.0})
    assert model.predict(p.arguments, p.configs, default=0).index == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mode": "slow"}, "mode is text slow"),
        ({"a": shapes.ArraySpec((2**22, 64), np.dtype("float32"))}, "training saw"),
    ],
)
def test_abstains_outside_of_its_domain(model, make_problem, change, reason):
    p = make_problem(128, 64, 256)
    found = model.predict({**p.arguments, **change}, p.configs, default=3)
    assert reason in found.abstain
    assert found.index == 3 and found.order[0] == 3 and np.isnan(found.slowdown).all()


def test_a_new_dtype_falls_to_what_beat_the_default_nearby(model, make_problem):
    p = make_problem(512, 512, 512, dtype="float16")
    found = model.predict(p.arguments, p.configs, default=0)
    assert "dtype is f16" in found.abstain and found.index == 0
    assert found.fallback is not None and p.times_ms[found.fallback] < p.times_ms[0] / 1.02
    best = int(np.nanargmin(p.times_ms))
    assert model.predict(p.arguments, p.configs, default=best).fallback is None


def test_a_new_dtype_and_something_else_new_falls_to_the_default(model, make_problem):
    p = make_problem(512, 512, 512, dtype="float16")
    for more in ({"other": 1}, make_problem(512, 2**16, 512, dtype="float16").arguments):
        found = model.predict({**p.arguments, **more}, p.configs, default=0)
        assert found.abstain is not None and found.fallback is None


def test_abstains_where_the_config_space_has_changed(model, make_problem):
    p = make_problem(128, 64, 256)
    assert "config space has changed" in model.predict(p.arguments, [{"block_m": 16, "stages": 3}]).abstain


def test_configs_beyond_the_measured_ones_come_last(model, make_problem):
    p = make_problem(128, 64, 256)
    configs = [{"block_m": 1024, "block_n": 128, "unroll": 1}, {"block_m": 64, "block_n": 128, "unroll": 1}]
    found = model.predict(p.arguments, configs)
    assert found.order.tolist() == [1, 0] and np.isnan(found.slowdown[0])


def test_abstains_when_the_members_disagree(problems, facts):
    model = CostModel(iterations=20).fit(problems, facts)
    model.calibration_ = Calibration(**{**vars(model.calibration_), "max_doubt": -1.0})
    p = problems[0]
    assert "members disagree" in model.predict(p.arguments, p.configs).abstain


def test_on_another_device_only_what_gains_much_replaces_the_default(model, problems, facts):
    other = dataclasses.replace(facts, kind="cpu-another-4c")
    stood_by = 0
    for problem in problems:
        for default in range(len(problem.configs)):
            told = {"device": other, "default": default}
            found = model.predict(problem.arguments, problem.configs, **told)
            own = model.predict(problem.arguments, problem.configs, facts, default=default)
            np.testing.assert_array_equal(found.order, own.order)
            if found.abstain is None:
                stood_by += 1
                assert found.slowdown[default] > 1.19 * found.expected_slowdown
                assert found.expected_slowdown > own.expected_slowdown
            elif found.fallback is None:
                assert "cpu-test-4c" in found.abstain
    assert stood_by > 10


def test_on_another_device_a_search_begins_with_a_wider_spread(model, problems, facts):
    other, p = dataclasses.replace(facts, kind="cpu-another-4c"), problems[0]
    expected, spread = model.expect(p.arguments, p.configs, other)
    at_home, spread_at_home = model.expect(p.arguments, p.configs, facts)
    np.testing.assert_array_equal(expected, at_home)
    assert (spread > spread_at_home).all() and (spread > 0.05).all()


def test_abstains_far_from_the_training_shapes(problems, facts):
    model = CostModel(iterations=20).fit(problems, facts)
    model.calibration_ = Calibration(**{**vars(model.calibration_), "max_distance": -1.0})
    p = problems[0]
    assert "octaves away" in model.predict(p.arguments, p.configs).abstain


def test_learns_which_configs_fail(make_problems, facts):
    data = make_problems(fails=True)
    model = CostModel(iterations=30).fit(data, facts)
    assert model.failures_ is not None
    for p in make_problems(8, seed=3, fails=True):
        found = model.predict(p.arguments, p.configs, default=0)
        assert found.abstain or p.works[found.index]
        assert not np.isnan(p.times_ms[found.order[: int(p.works.sum()) // 2]]).any()


def test_optional_arrays_may_be_absent(make_problems, facts):
    data = make_problems(16) + make_problems(16, seed=1, flag=True)
    model = CostModel(iterations=20).fit(data, facts)
    for p in (data[0], data[-1]):
        assert model.predict(p.arguments, p.configs).abstain is None


def test_extra_features_are_used_and_required(problems, facts):
    import dataclasses

    data = [dataclasses.replace(p, extra=tuple({"half": (c.block_m or 0) / 2} for c in p.configs)) for p in problems]
    model = CostModel(iterations=20).fit(data, facts)
    assert model.spec_.extra == ("half",)
    p = data[0]
    assert model.predict(p.arguments, p.configs, extra=p.extra).abstain is None
    assert "own features are missing" in model.predict(p.arguments, p.configs, extra=[{}] * len(p.configs)).abstain


def test_fit_refuses_what_it_cannot_learn_from(problems, facts):
    import dataclasses

    with pytest.raises(errors.ArgumentError, match=f"at least {MIN_GROUPS} measured shapes"):
        CostModel().fit(problems[: MIN_GROUPS - 1], facts)
    with pytest.raises(errors.ArgumentError, match="one op on one device"):
        CostModel().fit([*problems, dataclasses.replace(problems[0], device_kind="other")], facts)
    with pytest.raises(errors.ArgumentError, match="at least one config"):
        CostModel(iterations=5).fit(problems, facts).predict(problems[0].arguments, [])


def test_fits_the_fewest_shapes(problems, facts):
    model = CostModel(iterations=5).fit(problems[:MIN_GROUPS], facts)
    assert 0 <= model.calibration_.coverage <= 1


def test_same_data_gives_the_same_bytes_in_any_order(problems, facts, model):
    assert CostModel(iterations=40).fit(problems[::-1], facts).dumps() == model.dumps()


def test_file_keeps_everything(model, problems, tmp_path):
    model.save(tmp_path / "m.npz")
    again = CostModel.load(tmp_path / "m.npz")
    buffer = io.BytesIO()
    again.save(buffer)
    assert buffer.getvalue() == model.dumps() and again.digest == model.digest
    p = problems[3]
    np.testing.assert_array_equal(
        again.predict(p.arguments, p.configs, default=0).slowdown,
        model.predict(p.arguments, p.configs, default=0).slowdown,
    )
    assert (tmp_path / "m.npz").stat().st_size < 2**20
    with np.load(tmp_path / "m.npz", allow_pickle=False) as archive:
        assert "manifest" in archive.files


def test_digest_changes_with_the_content(model, problems, facts):
    assert CostModel(iterations=40, seed=1).fit(problems, facts).digest != model.digest


def _repacked(model, change_manifest=None, change_arrays=None):
    arrays, manifest = modelfile.unpack(io.BytesIO(model.dumps()))
    if change_manifest:
        change_manifest(manifest)
    if change_arrays:
        change_arrays(arrays)
    return io.BytesIO(modelfile.pack(arrays, manifest))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.update(version=99),
        lambda m: m.update(schema="other"),
        lambda m: m.pop("spec"),
        lambda m: m["spec"]["names"].pop(),
        lambda m: m["spec"]["names"].append("log2(nothing)"),
        lambda m: m.update(spec_digest="0"),
        lambda m: m["calibration"].pop("min_gain"),
        lambda m: m["calibration"].update(min_gain="1"),
        lambda m: m["facts"].update(cores=0),
        lambda m: m["facts"].update(cores="4"),
        lambda m: m["facts"].update(surprise=1),
        lambda m: m.update(settings={"depth": 3}),
        lambda m: m.update(spec=7),
    ],
)
def test_damaged_manifests_are_refused(model, change):
    with pytest.raises(errors.FormatError):
        CostModel.load(_repacked(model, change_manifest=change))


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.pop("near.numbers"),
        lambda a: a.update({"near.numbers": a["near.numbers"][:, :-1]}),
        lambda a: a.update({"near.numbers": a["near.numbers"] * np.float32(np.inf)}),
        lambda a: a.update({f"near.{n}": a[f"near.{n}"][:0] for n in ("numbers", "codes", "measured", "costs")}),
        lambda a: a.update({"near.codes": a["near.codes"].astype(np.int64)}),
        lambda a: a.update(surprise=a["near.codes"]),
        lambda a: a.update({"near.surprise": a["near.codes"]}),
        lambda a: a.update({"scores.surprise": a["near.codes"]}),
        lambda a: a.pop("scores.roots"),
        lambda a: a.update({"scores.feature": a["scores.feature"].astype(np.uint16) + np.uint16(1000)}),
    ],
)
def test_damaged_arrays_are_refused(model, change):
    with np.errstate(invalid="ignore"):
        file = _repacked(model, change_arrays=change)
    with pytest.raises(errors.FormatError):
        CostModel.load(file)


def test_files_that_are_no_models_are_refused(model, tmp_path):
    content = model.dumps()
    for i, bad in enumerate([b"", b"nonsense", content[:1000], content[:-100], b"PK\x03\x04" + content[4:50]]):
        (tmp_path / f"{i}.npz").write_bytes(bad)
        with pytest.raises(errors.FormatError):
            CostModel.load(tmp_path / f"{i}.npz")
    with pytest.raises(FileNotFoundError):
        CostModel.load(tmp_path / "absent.npz")


def test_flipped_bytes_are_refused_or_harmless(model):
    content = bytearray(model.dumps())
    rng = np.random.default_rng(0)
    for place in rng.integers(0, len(content), 40):
        damaged = content.copy()
        damaged[place] ^= 0x55
        try:
            CostModel.load(io.BytesIO(bytes(damaged)))
        except errors.FormatError:
            pass


def test_pickles_are_refused():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        content = io.BytesIO()
        np.lib.format.write_array(content, np.array([print], dtype=object), version=(1, 0), allow_pickle=True)
        archive.writestr("manifest.npy", content.getvalue())
    with pytest.raises(errors.FormatError):
        modelfile.unpack(buffer)


def test_prediction_does_not_import_scikit_learn(model, problems, tmp_path):
    model.save(tmp_path / "m.npz")
    arguments = {n: str(v) for n, v in problems[0].arguments.items() if isinstance(v, shapes.ArraySpec)}
    code = f"""
import sys
from tokamax._src import shapes
from tokamax._src.costmodel.model import CostModel
model = CostModel.load({str(tmp_path / "m.npz")!r})
arguments = {{n: shapes.ArraySpec.parse(v) for n, v in {arguments!r}.items()}}
arguments |= dict(bias=None, scale=0.5, mode="fast")
found = model.predict(arguments, [dict(block_m=32, block_n=32, unroll=1), dict(block_m=64, block_n=128, unroll=2)])
assert found.abstain is None or "disagree" in found.abstain, found
assert "sklearn" not in sys.modules and "scipy" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_training_data_enters_the_digest(problems, facts):
    import dataclasses

    changed = [dataclasses.replace(problems[0], times_ms=problems[0].times_ms * 2), *problems[1:]]
    digests = {CostModel(iterations=5).fit(p, facts).data_digest_ for p in (problems, changed)}
    assert len(digests) == 2


def test_manifest_is_canonical_json(model):
    _, manifest = modelfile.unpack(io.BytesIO(model.dumps()))
    assert manifest["op"] == "toy" and manifest["device_kind"] == "cpu-test-4c"
    assert serialization.loads(serialization.dumps(manifest)) == manifest


def test_best_single_prefers_what_is_good_everywhere(make_problem):
    data = [make_problem(64, 64, 64), make_problem(64, 64, 128)]
    chooser = rivals.BestSingle().fit(data)
    found = chooser.predict(data[0].arguments, data[0].configs)
    costs = [np.exp(data[0].log_slowdown[found.index]), np.exp(data[0].log_slowdown).max()]
    assert costs[0] < costs[1]


def test_nearest_shape_returns_that_shapes_winner(problems):
    chooser = rivals.NearestShape().fit(problems)
    p = problems[4]
    assert chooser.predict(p.arguments, p.configs).index == int(np.argmin(p.times_ms))
    assert isinstance(p, dataset.Problem)


def test_of_a_large_space_only_the_most_promising_are_judged_by_all(model, make_problem, monkeypatch):
    from tokamax._src.costmodel import model as model_lib

    problem = make_problem(200, 300, 400)
    whole = model.predict(problem.arguments, problem.configs, default=0)
    monkeypatch.setattr(model_lib, "_SHORTLIST", 8)
    last = int(whole.order[-1])
    short = model.predict(problem.arguments, problem.configs, default=last)
    assert sorted(short.order) == list(range(len(problem.configs)))
    judged = np.flatnonzero(np.isfinite(short.slowdown))
    assert len(judged) == 8 and set(judged) == set(short.order[:8].tolist()) and last in judged
    assert short.order[0] == whole.order[0]
    np.testing.assert_allclose(short.spread[judged], whole.spread[judged])


def test_a_member_on_its_own_says_what_it_says_in_the_ensemble(model, make_problem):
    problem = make_problem(200, 300, 400)
    fields = [dict(vars(c)) for c in problem.configs]
    from tokamax._src.costmodel import features

    x = model.spec_.matrix(features.describe(problem.arguments), fields, model.facts_)
    together = model.forest_.predict(x)
    for i in range(model.forest_.members):
        np.testing.assert_array_equal(model.forest_.member(i).predict(x)[0], together[i])
