import math

import pytest

from skyrl.utils.registry import Registry


@pytest.fixture
def shapes():
    registry: Registry[object] = Registry("shape")
    registry.register("square")("a square")
    registry.register("circle")("a circle")
    return registry


def test_a_registered_name_is_found(shapes):
    assert shapes.get("square") == shapes["square"] == "a square"


def test_the_decorator_returns_what_it_decorates(shapes):
    @shapes.register("line")
    def line():
        return "a line"

    assert line() == "a line" and shapes["line"] is line


def test_an_unknown_name_lists_the_known_ones(shapes):
    with pytest.raises(KeyError, match="no shape named 'oval'; known: circle, square"):
        shapes.get("oval")


def test_a_module_and_attribute_are_imported(shapes):
    assert shapes.get("math:pi") == math.pi


def test_indexing_never_imports(shapes):
    with pytest.raises(KeyError, match="no shape named 'math:pi'"):
        shapes["math:pi"]


def test_a_taken_name_is_refused(shapes):
    with pytest.raises(ValueError, match="a shape named 'circle' is registered already"):
        shapes.register("circle")("another circle")


def test_names_come_in_sorted_order(shapes):
    assert list(shapes) == ["circle", "square"] and len(shapes) == 2 and "circle" in shapes
