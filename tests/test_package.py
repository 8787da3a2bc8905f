"""The package's public names stay what they are, however often and in whatever order modules are imported."""

import importlib

import infinity


def test_initialize_is_a_function_every_time() -> None:
    importlib.import_module("infinity.engine.initialize")
    assert callable(infinity.initialize)
    assert infinity.initialize is infinity.initialize
    assert {infinity.Config.__name__, infinity.Engine.__name__} == {"Config", "TrainingEngine"}
