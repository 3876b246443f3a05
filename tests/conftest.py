"""What every test starts from: the CPU, an empty private cache, and no memory of earlier choices."""

import os

# Before anything imports JAX, which reads the variable once.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import pytest

# No deadline: the first example of a property may compile. Derandomised: a run says the same every time.
hypothesis.settings.register_profile("tokamax", deadline=None, max_examples=30, derandomize=True)
hypothesis.settings.load_profile("tokamax")


@pytest.fixture(autouse=True)
def private_cache_dir(tmp_path_factory, monkeypatch):
    """An empty private cache of the test's own; nobody's home folder is read or written."""
    path = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("TOKAMAX_CACHE_DIR", str(path))
    return path


@pytest.fixture(autouse=True)
def forget_choices(private_cache_dir):
    """Choices that dispatch remembers, and what JAX traced with them, end with the test."""
    yield
    from tokamax._src import dispatch

    dispatch.session_store.clear()
    dispatch.forget()


@pytest.fixture
def one_round(monkeypatch):
    """Every tuning takes one round, whatever it is told."""
    from tokamax._src.autotuning import session

    original = session.Settings.__init__

    def init(self, **kwargs):
        original(self, **(kwargs | {"rounds": 1}))

    monkeypatch.setattr(session.Settings, "__init__", init)
