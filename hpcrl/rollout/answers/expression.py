r"""An expression as a tree, by a grammar of our own: no text is ever evaluated as code.

    expr    = term (("+" | "-") term)*          term   = factor (("*" | "/" | nothing) factor)*
    factor  = ("+" | "-") factor | power        power  = atom ("!" | "%" | "^\circ")* ("^" argument)?

A tree is a tuple: ("num", Fraction), ("sym", name), ("pi",), ("e",), ("i",), ("neg", a), ("deg", a), (op, a, b) with op
one of + - * / ^, ("root", a, n), ("abs", a), or ("fn", name, a) and ("fn", name, a, b).

Invariant: reading takes time linear in the length (at most LONGEST characters, DEEPEST brackets, MOST operations); what
the grammar does not know raises Unknown.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from hpcrl.rollout.answers.latex import word_set

Tree = tuple[Any, ...]
LONGEST = 2000  #: characters of an expression that is read
DEEPEST = 40  #: brackets in brackets, roots in roots
MOST = 200  #: operations, which bounds the depth of the tree as well

FUNCTIONS = word_set("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log lg exp")
GREEK = word_set(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi omega "
    "Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega ell hbar"
)
_CLOSING = {"(": ")", "[": "]", "{": "}", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
_NUMBER = re.compile(r"\d+(?:\.\d+)?[eE][+-]?\d{1,3}(?![\d.^])|\d+\.?\d*|\.\d+")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|dot)\s*(?:\{\s*(\d+)\s*\}|(\d))")
_MIXED = re.compile(
    r"(\d+)(?:\s*\\frac\s*(?:\{\s*(\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))|\s+(\d+)\s*/\s*(\d+))(?![\d.])"
)
_COMMAND = re.compile(r"\\([a-zA-Z]+) ?")
_SUBSCRIPT = re.compile(r"\s*_\s*(?:\{([^{}]*)\}|([0-9A-Za-z]))")
_LETTER_TEXT = re.compile(r"\\text\s*\{\s*([A-Za-z])\s*\}")


class Unknown(Exception):
    """The text is not an expression of this grammar, or its value cannot be found."""


def parse(text: str) -> Tree:
    """The tree of a normalised text (see latex.py).  Unknown if it is not an expression."""
    if len(text) > LONGEST:
        raise Unknown("too long")
    parser = _Parser(text)
    tree = parser.expr()
    parser.skip()
    if parser.at < len(text):
        raise Unknown(text[parser.at :][:20])
    return tree


class _Parser:
    """Recursive descent over one text.  at: the position; bars: how many |...| are open; depth: brackets that are
    open."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.bars = 0
        self.depth = 0
        self.operations = 0

    def count(self) -> None:
        self.operations += 1
        if self.operations > MOST:
            raise Unknown("too many operations")

    # ---- characters

    def skip(self) -> None:
        while self.at < len(self.text) and self.text[self.at] == " ":
            self.at += 1

    def peek(self) -> str:
        """The next sign, or the next command with its backslash; "" at the end."""
        self.skip()
        if found := _COMMAND.match(self.text, self.at):
            return f"\\{found[1]}"
        return self.text[self.at : self.at + (2 if self.text.startswith("\\", self.at) else 1)]

    def accept(self, sign: str) -> bool:
        if self.peek() != sign:
            return False
        self.at += len(sign)
        return True

    def need(self, sign: str) -> None:
        if not self.accept(sign):
            raise Unknown(f"no {sign}")

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        self.skip()
        if found := pattern.match(self.text, self.at):
            self.at = found.end()
        return found

    # ---- grammar

    def expr(self) -> Tree:
        tree = self.term()
        while (sign := self.peek()) in ("+", "-") and sign:
            self.count()
            self.at += 1
            tree = (sign, tree, self.term())
        return tree

    def term(self) -> Tree:
        tree = self.factor()
        while True:
            self.count()
            sign = self.peek()
            if sign in ("*", "\\cdot", "\\times", "/", "\\div"):
                self.accept(sign)
                tree = ("/" if sign in ("/", "\\div") else "*", tree, self.factor())
            elif self._begins_atom(sign):
                if sign.isdigit() and self.text[: self.at].rstrip(" ")[-1:].isdigit():
                    raise Unknown("two numbers side by side")
                tree = ("*", tree, self.power())
            else:
                return tree

    def factor(self) -> Tree:
        negative = False
        while (sign := self.peek()) in ("+", "-") and sign:
            negative ^= sign == "-"
            self.at += 1
        tree = self.power()
        return ("neg", tree) if negative else tree

    def _begins_atom(self, sign: str) -> bool:
        if not sign or sign in "+-*/^_!%)]}=<>,;:'\"&~?@#`":
            return False
        if sign == "|":
            return not self.bars
        return sign not in ("\\rfloor", "\\rceil", "\\}", "\\{", "\\\\")

    def power(self) -> Tree:
        tree = self.atom()
        while True:
            self.count()
            sign = self.peek()
            if sign == "!":
                self.at += 1
                tree = ("fn", "factorial", tree)
            elif sign == "%":
                self.at += 1
                tree = ("/", tree, ("num", Fraction(100)))
            elif sign == "^":
                self.at += 1
                if self.match(re.compile(r"\{?\s*\\circ ?\s*\}?")):
                    tree = ("deg", tree)
                else:
                    tree = ("^", tree, self.argument(exponent=True))
            else:
                return tree

    def argument(self, exponent: bool = False) -> Tree:
        """What a command applies to: a group, or what stands next to it (one digit; a whole number as an exponent)."""
        sign = self.peek()
        if sign == "{":
            return self.group("{")
        if exponent and sign in ("+", "-") and sign:
            self.at += 1
            inner = self.argument(exponent=True)
            return ("neg", inner) if sign == "-" else inner
        if sign.isdigit() and not exponent:
            self.at += 1
            return ("num", Fraction(int(sign)))
        return self.atom()

    def group(self, opening: str) -> Tree:
        self.need(opening)
        bars = self.bars
        self.bars = 0
        tree = self.expr()
        self.need(_CLOSING[opening])
        self.bars = bars
        return tree

    def atom(self) -> Tree:
        self.depth += 1
        if self.depth > DEEPEST:
            raise Unknown("too deep")
        tree = self._atom()
        self.depth -= 1
        return tree

    def _atom(self) -> Tree:
        sign = self.peek()
        if sign.isdigit() or sign == ".":
            return self.number()
        if sign in ("(", "[", "{"):
            return self.group(sign)
        if sign in ("\\lfloor", "\\lceil"):
            return ("fn", sign[2:], self.group(sign))
        if sign == "|" and not self.bars:
            self.at += 1
            self.bars = 1
            tree = self.expr()
            self.need("|")
            self.bars = 0
            return ("abs", tree)
        if sign.isalpha() and sign.isascii():
            self.at += 1
            return self.symbol(sign)
        if sign.startswith("\\") and len(sign) > 1:
            return self.command(sign[1:])
        raise Unknown(sign)

    def number(self) -> Tree:
        if found := self.match(_REPEATING):
            whole = found[1]
            fixed = found[2]
            repeated = found[3] or found[4]
            digits = Fraction(int(fixed + repeated) - int(fixed or 0), 10 ** len(fixed) * (10 ** len(repeated) - 1))
            return ("num", int(whole or 0) + digits)
        start = self.at
        if found := self.match(_MIXED):
            parts = [int(part) for part in found.groups() if part is not None]
            if 0 < parts[1] < parts[2]:
                return ("num", parts[0] + Fraction(parts[1], parts[2]))
            self.at = start
        found = self.match(_NUMBER)
        if found is None:
            raise Unknown("no number")
        return ("num", Fraction(found[0].rstrip(".")))

    def symbol(self, name: str) -> Tree:
        """A variable with its subscript and primes; e and i alone are constants."""
        subscript = self.match(_SUBSCRIPT)
        if subscript:
            name += "_" + (subscript[1] or subscript[2] or "").replace(" ", "")
        while self.at < len(self.text) and self.text[self.at] == "'":
            self.at += 1
            name += "'"
        return (name,) if name in ("e", "i") else ("sym", name)

    def command(self, name: str) -> Tree:
        if letter := self.match(_LETTER_TEXT):
            return self.symbol(letter[1])
        self.accept(f"\\{name}")
        if name == "pi":
            return ("pi",)
        if name in GREEK:
            return self.symbol(f"\\{name}")
        if name == "frac":
            top = self.argument()
            return ("/", top, self.argument())
        if name == "sqrt":
            return self.root()
        if name == "binom":
            top = self.argument()
            return ("fn", "binom", top, self.argument())
        if name in FUNCTIONS:
            return self.function(name)
        if name == "overline":
            inner = re.compile(r"\{([^{}]*)\}|([A-Za-z])").match(self.text, self.at)
            if inner:
                self.at = inner.end()
                return ("sym", f"overline {(inner[1] or inner[2]).replace(' ', '')}")
        raise Unknown(name)

    def root(self) -> Tree:
        index: Tree = ("num", Fraction(2))
        if self.peek() == "[":
            index = self.group("[")
        sign = self.peek()
        inner = self.number() if sign.isdigit() else self.group("(") if sign == "(" else self.argument()
        return ("root", inner, index)

    def function(self, name: str) -> Tree:
        """sin^2 x, sin^{-1} x, log_2 8, sin 2x, ln(x) y: without brackets a function takes the product behind it."""
        exponent = base = None
        while (sign := self.peek()) in ("^", "_") and sign:
            self.at += 1
            if sign == "_":
                base = self.argument(exponent=True)
            else:
                exponent = self.argument(exponent=True)
        if exponent == ("neg", ("num", Fraction(1))) and name in ("sin", "cos", "tan"):
            name, exponent = f"arc{name}", None
        if self.peek() in ("(", "[", "{"):
            inner = self.group(self.peek())
        else:
            inner = self.power()
            while self._begins_atom(self.peek()) and self.peek().removeprefix("\\") not in FUNCTIONS | {
                "cdot",
                "times",
                "div",
            }:
                inner = ("*", inner, self.power())
        if base is not None and name != "log":
            raise Unknown(f"{name} with a base")
        tree: Tree = ("fn", name, inner) if base is None else ("fn", name, inner, base)
        return tree if exponent is None else ("^", tree, exponent)


def symbols(tree: Tree) -> set[str]:
    """The names of the variables in a tree."""
    if tree[0] == "sym":
        return {tree[1]}
    return set().union(*(symbols(part) for part in tree[1:] if isinstance(part, tuple)))
