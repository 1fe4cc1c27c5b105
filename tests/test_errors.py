from __future__ import annotations

import inspect

import pytest

from aftermap import errors

BUILT_IN_PARENTS = [
    (errors.InputError, ValueError),
    (errors.ShapeError, errors.InputError),
    (errors.DataError, errors.InputError),
    (errors.NotFittedError, RuntimeError),
    (errors.NumericalError, ArithmeticError),
    (errors.NumericalWarning, UserWarning),
    (errors.StatisticalWarning, UserWarning),
]


@pytest.mark.parametrize("child, parent", BUILT_IN_PARENTS)
def test_each_class_is_also_what_a_python_programmer_expects(child: type, parent: type) -> None:
    assert issubclass(child, parent)


def test_every_error_is_an_aftermap_error_and_no_warning_is() -> None:
    classes = [found for name in errors.__all__ if isinstance(found := getattr(errors, name), type)]
    assert len(classes) == 10
    for cls in classes:
        assert issubclass(cls, errors.AftermapError) != issubclass(cls, Warning)
        assert inspect.getdoc(cls)
        assert str(cls("what was got")) == "what was got"


def test_unsupported_is_not_an_input_error() -> None:
    with pytest.raises(errors.UnsupportedError, match="no rule for LSTM") as caught:
        raise errors.UnsupportedError("no rule for LSTM")
    assert not isinstance(caught.value, ValueError)


def test_a_warning_points_to_the_first_line_outside_of_the_package() -> None:
    inside = {
        "__name__": "aftermap.somewhere.deep",
        "warn_caller": errors.warn_caller,
        "Warned": errors.StatisticalWarning,
    }
    exec("def first(depth): return first(depth - 1) if depth else warn_caller('wide', Warned)", inside)
    for depth in (0, 3):
        with pytest.warns(errors.StatisticalWarning, match="wide") as said:
            inside["first"](depth)
        assert [w.filename for w in said] == [__file__]
    # A package whose name begins alike is a caller.
    outside = {"__name__": "aftermap_extras", "first": inside["first"]}
    exec(compile("def second(): first(1)", "extras.py", "exec"), outside)
    with pytest.warns(errors.StatisticalWarning) as said:
        outside["second"]()
    assert [w.filename for w in said] == ["extras.py"]
