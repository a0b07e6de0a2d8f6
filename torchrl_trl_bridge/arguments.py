"""What users pass where a number is asked for."""

from __future__ import annotations

import math
import numbers


def is_integer(value: object, at_least: int | None = None) -> bool:
    """Whether a value is an integer, such as one of NumPy, and no smaller than another; ``int(value)`` then is that.

    Examples:
        >>> import numpy
        >>> is_integer(numpy.int64(3)), is_integer(3, at_least=4), is_integer(3.0), is_integer(True)
        (True, False, False, False)
    """
    return (
        isinstance(value, numbers.Integral)
        and not isinstance(value, bool)
        and (at_least is None or int(value) >= at_least)
    )


def is_number(value: object) -> bool:
    """Whether a value is a real number, such as one of NumPy; NaN is none.

    Examples:
        >>> is_number(3), is_number(0.5), is_number(float("nan")), is_number(True), is_number("1")
        (True, True, False, False, False)
    """
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and not math.isnan(value)
