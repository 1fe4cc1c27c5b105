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
    classes = [getattr(errors, name) for name in errors.__all__]
    assert len(classes) == 9
    for cls in classes:
        assert issubclass(cls, errors.AftermapError) != issubclass(cls, Warning)
        assert inspect.getdoc(cls)
        assert str(cls("what was got")) == "what was got"


def test_unsupported_is_not_an_input_error() -> None:
    with pytest.raises(errors.UnsupportedError, match="no rule for LSTM") as caught:
        raise errors.UnsupportedError("no rule for LSTM")
    assert not isinstance(caught.value, ValueError)
