import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest

from gracekv.errors import ConfigError, GracekvError, UnknownStrategyError, suggestion
from gracekv.pipeline import Pipeline
from gracekv.registry import Configurable, Registry, Strategy
from gracekv.segment import Segmenter, Tokens
from gracekv.value import SCORERS, ReadAhead

TOYS: Registry["Toy"] = Registry("toy", "what is played")
DICE: Registry["Dice"] = Registry("dice", "what is thrown")


class Toy(Strategy):
    registry = TOYS


class Dice(Strategy):
    registry = DICE


@DICE.register("fair")
@dataclass(frozen=True)
class Fair(Dice):
    """Every side alike."""

    sides: int = 6


@DICE.register("loaded")
class Loaded(Dice):
    share: float
    side: int = 1


@dataclass(frozen=True)
class Paint(Configurable):
    coats: int = 1
    shades: tuple[float, ...] = (0.5,)


@TOYS.register("top")
@dataclass(frozen=True)
class Top(Toy):
    """A spinning top.

    Not this line.
    """

    speed: float = 1.0
    twists: int = 2
    loud: bool = False
    label: str = "a"
    side: Literal["left", "right"] = "left"
    limit: int | None = None
    pair: tuple[int, float] = (1, 0.5)
    paint: Paint = dataclasses.field(default_factory=Paint)
    dice: Dice = dataclasses.field(default_factory=Fair)


@TOYS.register("ball")
class Ball(Toy):
    """A ball."""

    bounce: float = 0.5


def test_lists_sorted_names_and_first_lines():
    assert list(TOYS) == ["ball", "top"]
    assert len(TOYS) == 2
    assert "top" in TOYS
    assert "tip" not in TOYS
    assert Top.summary() == "A spinning top."


def test_registering_makes_a_class_a_frozen_dataclass():
    assert Ball() == Ball(bounce=0.5) != Ball(bounce=1.0)
    assert hash(Ball()) == hash(Ball(bounce=0.5))
    assert dataclasses.replace(Ball(), bounce=2.0).to_dict() == {"name": "ball", "bounce": 2.0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        Ball().bounce = 1.0
    # A class that is already a dataclass keeps its own definition.
    assert {field.name for field in dataclasses.fields(Top)} >= {"paint", "dice"}


def test_unknown_name_offers_the_nearest():
    with pytest.raises(UnknownStrategyError, match=r"'topp'.*Did you mean 'top'\?.*ball, top"):
        TOYS.build("topp")
    with pytest.raises(UnknownStrategyError) as caught:
        TOYS.build("zzzzzz")
    assert "Did you mean" not in str(caught.value)
    assert suggestion("bal", list(TOYS)) == " Did you mean 'ball'?"


def test_duplicate_names_are_refused():
    with pytest.raises(
        ConfigError, match=r"\.Top needs another name: 'ball' is already registered by .*\.Ball"
    ):
        TOYS.register("ball")(Top)
    assert TOYS.get("ball") is Ball


@pytest.mark.parametrize(("fields", "message"), [
    ({"speed": "fast"}, r"Top\.speed takes a number; got 'fast'"),
    ({"speed": True}, r"Top\.speed takes a number"),
    ({"twists": 2.0}, r"Top\.twists takes a whole number; got 2\.0"),
    ({"twists": True}, r"Top\.twists takes a whole number"),
    ({"loud": 1}, r"Top\.loud takes True or False"),
    ({"label": None}, r"Top\.label takes a string"),
    ({"side": "up"}, r"Top\.side takes one of 'left', 'right'; got 'up'"),
    ({"limit": "3"}, r"Top\.limit takes a whole number"),
    ({"sped": 1.0}, r"no field 'sped'\. Did you mean 'speed'\? Fields: speed, twists"),
    ({"paint": {"coat": 1}}, r"Paint has no field 'coat'\. Did you mean 'coats'"),
    ({"paint": 3}, r"Paint takes a mapping"),
    ({"paint": {"shades": 0.5}}, r"Paint\.shades takes a tuple .in plain data: a list"),
    ({"paint": {"shades": [0.5, "x"]}}, r"Paint\.shades takes a number"),
    ({"dice": "fare"}, r"Unknown dice strategy 'fare'\. Did you mean 'fair'"),
    ({"dice": "midpoint"}, r"was removed after 0\.2; use .'name': 'binary'"),
    ({"dice": {"sides": 4}}, r"Expected a dice strategy: .* a mapping with a 'name'"),
    ({"dice": 4}, r"Expected a dice strategy"),
    ({"dice": "loaded"}, r"Loaded needs share; got \{\}"),
    ({"pair": [1.0, 2]}, r"Top\.pair takes a whole number; got 1\.0"),
    ({"pair": [1]}, r"Top\.pair takes 2 items; got \(1,\)"),
    ({"pair": [1, 2, 3]}, r"Top\.pair takes 2 items; got \(1, 2\.0, 3\)"),
])  # fmt: skip
def test_bad_configurations_say_what_is_allowed(fields, message):
    with pytest.raises(ConfigError, match=message) as caught:
        TOYS.build("top", **fields)
    assert isinstance(caught.value, GracekvError)
    assert isinstance(caught.value, ValueError)


def test_a_strategy_of_another_stage_is_refused():
    with pytest.raises(ConfigError, match="Expected a toy strategy"):
        TOYS.parse(Fair())


def test_nested_data_becomes_objects():
    inside = {"paint": {"shades": [1, 0.25]}, "dice": {"name": "fair"}}
    top = TOYS.parse({"name": "top", "speed": 3, "pair": [3, 2], **inside})
    assert top == Top(speed=3.0, pair=(3, 2.0), paint=Paint(shades=(1.0, 0.25)))
    assert [*map(type, (top.speed, *top.pair))] == [float, int, float]
    data = top.to_dict()
    assert data["dice"] == {"name": "fair", "sides": 6}
    # Lists, not tuples: YAML's safe writer refuses tuples.
    assert type(data["paint"]["shades"]) is list


def test_a_field_of_another_class_is_refused():
    with pytest.raises(ConfigError, match=r"Top\.dice takes an instance of Dice; got 'fair'"):
        Top(dice="fair")
    with pytest.raises(ConfigError, match=r"Top\.speed takes a number; got 10{400}"):
        TOYS.build("top", speed=10**400)


def test_what_works_over_processes_says_so_when_it_is_registered():
    kites: Registry[Toy] = Registry("kite", "what flies")

    class Tough(Toy):
        works_sharded = True

    @kites.register("red", works_sharded=True)
    class Red(Toy): ...

    @kites.register("blue")
    class Blue(Toy): ...

    @kites.register("grey")
    class Grey(Tough): ...

    assert [kite.works_sharded for kite in (Red, Blue, Grey)] == [True, False, True]


LOOSE = dataclass(type("Loose", (Toy,), {}))
TAKEN = type("Taken", (Toy,), {"__annotations__": {"summary": str}})


@pytest.mark.parametrize(("cls", "message"), [
    (LOOSE, r"Loose can change: write @dataclass\(frozen=True\)\."),
    (TAKEN, r"Taken has fields \['summary'\], names that the stage uses: rename them"),
    (type("Heir", (Toy, Tokens), {}), r"Heir derives from .*Tokens'\], .* hold one in a field"),
])  # fmt: skip
def test_classes_that_make_no_strategy_are_refused(cls, message):
    with pytest.raises(ConfigError, match=message):
        TOYS.register("new")(cls)
    assert "new" not in TOYS
    with pytest.raises(ConfigError, match=r"as in @register\('mine'\); got "):
        TOYS.register(cls)


def test_annotations_that_only_a_type_checker_can_read_are_named():
    @TOYS.register("checked")
    class Checked(Toy):
        scales: "ClassVar[Nowhere]" = ()  # noqa: F821

    with pytest.raises(ConfigError, match=r"annotations of Checked .*'Nowhere'"):
        Checked()


def test_a_pipeline_holds_registered_strategies():
    def define():
        return type("Mine", (Segmenter,), {"__call__": lambda self, prefill, region: None})

    registry = Registry("own", "slots for tests")
    for spec, message in (
        (dataclass(frozen=True)(define())(), r"Mine is not registered: decorate Mine with @reg"),
        (registry.register("mine")(define())(), r"Mine was defined again since Mine\(\) was made"),
    ):
        # A class that is defined again takes its own place.
        again = registry.register("mine")(define())
        assert registry.get("mine") is again is not type(spec)
        with pytest.raises(ConfigError, match=message):
            dataclasses.replace(Pipeline.named("gracekv"), segment=spec)


def test_a_removed_field_is_read_with_its_last_value_only():
    assert SCORERS.parse({"name": "read_ahead", "kernel": "geometric"}) == ReadAhead()
    with pytest.raises(ConfigError, match="ReadAhead has no field 'kernel'"):
        SCORERS.parse({"name": "read_ahead", "kernel": "box"})


def test_a_class_without_the_base_of_its_stage_is_refused():
    with pytest.raises(ConfigError, match=r"Stray must derive from Scorer\."):

        @SCORERS.register("stray")
        class Stray:
            pass

    assert "stray" not in SCORERS
