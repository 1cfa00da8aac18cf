"""``core.values.dataclass`` makes what the standard library's ``dataclass`` makes."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from dataclasses import FrozenInstanceError, field, fields, replace

import pytest

from core.values import dataclass


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: float = 0.0
    label: str = field(default="", compare=False)
    cache: dict[str, int] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sphere(Point):
    radius: float

    def __post_init__(self) -> None:
        if self.radius < 0:
            raise ValueError(self.radius)


@dataclass(slots=True)
class Counter:
    n: int = 0


@dataclass(frozen=True)
class Named:
    name: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Named) and self.name.lower() == other.name.lower()

    def __repr__(self) -> str:
        return f"<{self.name}>"


def test_values_are_equal_if_their_class_and_compared_fields_are() -> None:
    assert Point(1, 2, "a") == Point(1.0, 2.0, "b")
    assert Point(1) != Point(2)
    assert Point(1) != Sphere(x=1, radius=1)
    assert Sphere(x=1, radius=1) == Sphere(x=1, radius=1)
    assert Point(1).__eq__(1) is NotImplemented


def test_frozen_values_have_the_hash_of_their_compared_fields() -> None:
    assert hash(Point(1, 2, "a")) == hash(Point(1, 2, "b")) == hash((1, 2))
    assert len({Point(1), Point(1), Point(2), Sphere(x=1, radius=1)}) == 3
    with pytest.raises(TypeError, match="unhashable"):
        hash(Counter())


def test_a_text_has_the_fields_that_are_shown() -> None:
    assert repr(Point(1, label="a")) == "Point(x=1, y=0.0, label='a')"
    assert repr(Sphere(x=1, radius=2)) == "Sphere(x=1, y=0.0, label='', radius=2)"
    ring = Point(1)
    object.__setattr__(ring, "label", ring)
    assert repr(ring) == "Point(x=1, y=0.0, label=...)"


def test_methods_of_the_class_itself_stay() -> None:
    assert Named("A") == Named("a")
    assert repr(Named("A")) == "<A>"
    assert hash(Named("A")) == hash(("A",))


def test_values_are_made_checked_copied_and_pickled_as_dataclasses() -> None:
    sphere = Sphere(x=1, radius=2)
    with pytest.raises(ValueError, match="-1"):
        replace(sphere, radius=-1)
    with pytest.raises(TypeError):
        Sphere(1, 0.0, "", {}, 2)  # type: ignore[call-arg]
    assert [item.name for item in fields(Sphere)] == ["x", "y", "label", "cache", "radius"]
    assert copy.deepcopy(sphere) == pickle.loads(pickle.dumps(sphere)) == sphere
    assert dataclasses.asdict(Counter(3)) == {"n": 3}
    assert not hasattr(sphere, "__dict__")


def test_fields_of_a_frozen_value_are_guarded_by_the_type_checker_only() -> None:
    point = Point(1)
    try:
        point.y = 2.0  # type: ignore[misc]
    except FrozenInstanceError:
        pytest.fail("guards triple the cost of creating a value")
    assert point.y == 2.0
