"""The value of an expression, and whether two expressions are equal.

Rational numbers are computed exactly, everything else to DIGITS digits.  Expressions with variables are compared at
fixed points, positive and negative ones: polynomials and rational functions that agree there are equal up to a chance
that no written answer has (Schwartz, J. ACM 27, 1980).

Invariants: no module state that a comparison changes; what would take long or much memory (towers of powers, factorials
of large numbers) raises TooLarge before it is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

import mpmath

from hpcrl.rollout.answers.expression import Tree, Unknown, symbols
from hpcrl.rollout.answers.latex import word_set

DIGITS = 120
BITS = 20_000  #: of a rational number's numerator or denominator at most
_MP = mpmath.MPContext()
_MP.dps = DIGITS
_CLOSE = _MP.mpf(10) ** -(DIGITS - 20)

Value = Any  #: Fraction, or a number of mpmath


class TooLarge(Unknown):
    """The value would take long or much memory."""


class Undefined(Unknown):
    """No value here: a division by zero, the logarithm of 0 ..."""


def equal(a: Tree, b: Tree) -> bool:
    """Whether two expressions are equal.  Unknown if that cannot be told."""
    compared = 0
    for left, right in _values(a, b):
        if not same(left, right):
            return False
        compared += 1
    if not compared:
        raise Unknown("no point where both have a value")
    return True


def proportional(a: Tree, b: Tree) -> bool:
    """Whether a = c b with the same number c, not 0, everywhere, as the two sides of an equation may be scaled."""
    ratio = None
    for left, right in _values(a, b):
        if same(left, Fraction(0)) or same(right, Fraction(0)):
            return False
        quotient = _divide(left, right)
        if ratio is not None and not same(ratio, quotient):
            return False
        ratio = quotient
    return ratio is not None


def constant(tree: Tree) -> Value:
    """The value of an expression without variables.  Unknown if it has any, or no value."""
    if symbols(tree):
        raise Unknown("has variables")
    return evaluate(tree, {})


def _values(a: Tree, b: Tree) -> Iterator[tuple[Value, Value]]:
    """The values of both at every point where both have one."""
    names = sorted(symbols(a) | symbols(b))
    if not names:
        yield evaluate(a, {}), evaluate(b, {})
        return
    found = False
    for whole in (False, True):  # factorials and the like have values at whole numbers only
        for number in range(5):
            point = {name: _coordinate(k, number, whole) for k, name in enumerate(names)}
            try:
                pair = evaluate(a, point), evaluate(b, point)
            except Undefined:
                continue
            found = True
            yield pair
        if found:
            return


def _coordinate(variable: int, point: int, whole: bool) -> Fraction:
    """A fixed number: all are positive at point 0, negative at point 1, mixed at the others."""
    spread = (37 * (variable + 1) * (point + 2)) % 53
    if whole:
        return Fraction(2 + spread % 7 + 3 * (variable == 0))
    sign = -1 if point == 1 or (point > 1 and (variable + point) % 2) else 1
    return sign * Fraction(11 + spread, 29)


def same(a: Value, b: Value) -> bool:
    """Equal: exactly if both are rational, else to nearly all DIGITS."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b
    a, b = _mp(a), _mp(b)
    return bool(abs(a - b) <= _CLOSE * max(abs(a), abs(b), _CLOSE))


def _mp(value: Value) -> Any:
    return _MP.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def evaluate(tree: Tree, point: Mapping[str, Fraction]) -> Value:
    """The value of `tree` where its variables have the values of `point`."""
    kind = tree[0]
    if kind == "num":
        return tree[1]
    if kind == "sym":
        return point[tree[1]]
    if kind in _CONSTANTS:
        return _CONSTANTS[kind]
    if kind == "fn":
        return _function(tree[1], [evaluate(part, point) for part in tree[2:]])
    parts = [evaluate(part, point) for part in tree[1:]]
    return _checked(_OPERATIONS[kind](*parts))


def _checked(value: Value) -> Value:
    if isinstance(value, Fraction):
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > BITS:
            raise TooLarge("too large")
    elif not _MP.isfinite(value):
        raise Undefined("not finite")
    return value


def _both(operation: Callable[[Value, Value], Value]) -> Callable[[Value, Value], Value]:
    """`operation` on rational numbers if both are, else on mpmath's."""

    def apply(a: Value, b: Value) -> Value:
        exact = isinstance(a, Fraction) and isinstance(b, Fraction)
        return operation(a, b) if exact else operation(_mp(a), _mp(b))

    return apply


def _divide(a: Value, b: Value) -> Value:
    if b == 0:
        raise Undefined("division by zero")
    return _both(lambda x, y: x / y)(a, b)


def _power(a: Value, b: Value) -> Value:
    if isinstance(b, Fraction) and b.denominator == 1:
        if a == 0 and b <= 0:
            if b == 0:
                return Fraction(1)
            raise Undefined("division by zero")
        if isinstance(a, Fraction):
            if max(a.numerator.bit_length(), a.denominator.bit_length(), 1) * abs(b.numerator) > BITS and abs(
                a
            ) not in (0, 1):
                raise TooLarge("too large")
            return a ** int(b % 2 if abs(a) == 1 else b)
    if isinstance(a, Fraction) and isinstance(b, Fraction) and a >= 0 and b.denominator < 100:
        root = _root(a, Fraction(b.denominator))
        if isinstance(root, Fraction):
            return _power(root, Fraction(b.numerator))
    base, exponent = _mp(a), _mp(b)
    if base == 0:
        if _MP.re(exponent) > 0:
            return Fraction(0)
        raise Undefined("0 to such a power")
    if abs(exponent * _MP.log(base)) > 1e6:
        raise TooLarge("too large")
    return _MP.power(base, exponent)


def _root(a: Value, n: Value) -> Value:
    """The n-th root: exact where there is one, real of a negative number where n is odd."""
    if not (isinstance(n, Fraction) and n.denominator == 1 and 0 < n < 1000):
        return _power(a, _divide(Fraction(1), n))
    if isinstance(a, Fraction):
        if a < 0 and n % 2:
            root = _root(-a, n)
            return -root
        if a >= 0:
            top = _whole_root(a.numerator, int(n))
            bottom = _whole_root(a.denominator, int(n))
            if top is not None and bottom is not None:
                return Fraction(top, bottom)
    if n == 2:
        return _MP.sqrt(_mp(a))
    return _MP.power(_mp(a), 1 / _MP.mpf(int(n))) if a != 0 else Fraction(0)


def _whole_root(value: int, n: int) -> int | None:
    """The whole n-th root of a whole number, or None if it has none."""
    if n == 2:
        guess = math.isqrt(value)
    elif value.bit_length() > 5000:
        return None
    else:
        guess = int(_MP.nint(_MP.root(value, n)))
    return guess if guess**n == value else None


_CONSTANTS: dict[str, Value] = {"pi": +_MP.pi, "e": +_MP.e, "i": _MP.mpc(0, 1)}
_OPERATIONS: dict[str, Callable[..., Value]] = {
    "+": _both(lambda a, b: a + b),
    "-": _both(lambda a, b: a - b),
    "*": _both(lambda a, b: a * b),
    "/": _divide,
    "^": _power,
    "root": _root,
    "neg": lambda a: -a,
    "deg": lambda a: _mp(a) * _MP.pi / 180,
    "abs": lambda a: abs(a),
}
_PERIODIC = word_set("sin cos tan cot sec csc")
_NATURAL: dict[str, Callable[[Any], Any]] = {
    **{name: getattr(_MP, name) for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "exp")},
    **{f"arc{name}": getattr(_MP, f"a{name}") for name in ("sin", "cos", "tan")},
    "ln": _MP.ln,
    "log": _MP.log10,
    "lg": _MP.log10,
}


def _function(name: str, values: list[Value]) -> Value:
    a = values[0]
    if name in ("floor", "ceil"):
        if isinstance(a, Fraction):
            return Fraction(math.floor(a) if name == "floor" else math.ceil(a))
        if _MP.im(a) != 0 or abs(a) > 1e50:
            raise Unknown(name)
        return Fraction(int(_MP.floor(a) if name == "floor" else _MP.ceil(a)))
    if name == "factorial":
        return Fraction(math.factorial(_whole(a, 2000)))
    if name == "binom":
        return Fraction(math.comb(_whole(a, 5000), _whole(values[1], 5000)))
    x = _mp(a)
    if abs(x) > (1e40 if name in _PERIODIC or x == 0 else 1e5 if name in ("exp", "sinh", "cosh", "tanh") else 1e4000):
        raise TooLarge("too large")
    try:
        found = _NATURAL[name](x)
        if len(values) > 1:
            found = _MP.ln(x) / _MP.ln(_mp(values[1]))
    except (ZeroDivisionError, ValueError) as error:
        raise Undefined(name) from error
    return _rational(_checked(found))


def _rational(value: Value) -> Value:
    """A value that is a small fraction to nearly all digits as that fraction: sin 30° is 1/2, log_2 8 is 3."""
    if _MP.im(value) == 0 and abs(value) < 1e9:
        real = _MP.re(value)
        for denominator in (1, 2, 3, 5):
            whole = _MP.nint(real * denominator)
            if abs(real * denominator - whole) <= _CLOSE:
                return Fraction(int(whole), denominator)
    return value


def _whole(value: Value, most: int) -> int:
    """A whole number from 0 to `most`; Unknown, or Undefined for what is not a whole number."""
    if not isinstance(value, Fraction) or value.denominator != 1 or value < 0:
        raise Undefined("no whole number")
    if value > most:
        raise TooLarge("too large")
    return int(value)
