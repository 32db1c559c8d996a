"""Answers and labels: the table of truth, and what must hold for any text."""

from __future__ import annotations

import re
import time
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.errors import DataError, UsageError
from hpcrl.rollout.answers import calculus, labels
from hpcrl.rollout.answers.compare import equivalent
from hpcrl.rollout.answers.labels import boxed, is_right, right_answers
from tests.support.answers import pairs
from tests.support.cpu_seconds import slowdown

TABLE = list(pairs())
PIECES = (
    *"0123456789+-*/^_=<>()[]{}.,;:|!%$&~ xyzabeifgn½−²٣",
    *(
        r"\frac",
        r"\sqrt",
        r"\{",
        r"\}",
        r"\text{",
        r"\pi",
        r"\infty",
        r"\cup",
        r"\pm",
        r"\in",
        r"\leq",
        r"\sin",
        r"\log_",
        r"\binom",
    ),
    *(r"\left(", r"\right)", r"\\", r"\boxed{", r"^\circ", r"\overline{", r"\begin{pmatrix}", r"\end{pmatrix}", " or "),
)
texts = st.lists(st.sampled_from(PIECES), max_size=25).map("".join) | st.text(max_size=30)


def test_the_table_of_truth() -> None:
    assert len(TABLE) >= 600 and sum(truth for *_, truth in TABLE) > 300
    wrong = [(answer, label, truth) for answer, label, truth in TABLE if equivalent(answer, label) != truth]
    accepted = [pair for pair in wrong if not pair[2]]
    assert not accepted, "wrong answers that are taken for right"
    assert len(wrong) <= 0.02 * len(TABLE), wrong


def test_answers_equal_themselves() -> None:
    """Every answer of the table equals itself."""
    for answer, label, _ in TABLE:
        for text in (answer.strip(), label.strip()):
            assert equivalent(text, text) == bool(text)


def test_comparison_is_symmetric() -> None:
    """The order of answer and label makes no difference."""
    for answer, label, truth in TABLE:
        if truth and not re.fullmatch(r"(\\text\{)?\(?[A-E]\)?\}?", label):  # but for multiple choice: (A) 12 chooses A
            assert equivalent(label, answer), (answer, label)
        elif not truth:
            assert not equivalent(label, answer), (answer, label)


@pytest.mark.soak
@settings(max_examples=300, deadline=None)
@given(texts, texts)
def test_no_text_of_many_takes_long(answer: str, label: str) -> None:
    compare(answer, label)


@settings(max_examples=30, deadline=None)
@given(texts, texts)
def test_no_text_raises_or_takes_long(answer: str, label: str) -> None:
    compare(answer, label)


def compare(answer: str, label: str) -> None:
    """AssertionError if that takes two seconds of an idle machine."""
    if calculus.is_calculus(answer + label):
        return
    begun = time.process_time()
    equivalent(answer, label)
    boxed(answer)
    assert time.process_time() - begun < 2 * slowdown()


@settings(max_examples=100, deadline=None)
@given(st.integers(-(10**6), 10**6), st.integers(1, 1000), st.integers(1, 50))
def test_a_fraction_is_the_same_in_every_spelling(top: int, bottom: int, factor: int) -> None:
    value = Fraction(top, bottom)
    sign, size = "-" if value < 0 else "", abs(value)
    whole, rest = divmod(size.numerator, size.denominator)
    spellings = [
        f"{top}/{bottom}",
        rf"\frac{{{top * factor}}}{{{bottom * factor}}}",
        rf"{sign}\dfrac{{{size.numerator}}}{{{size.denominator}}}",
        rf"$\left({top} \div {bottom}\right)$",
        rf"{top} \cdot {bottom}^{{-1}}",
        rf"x = {value}",
        *([rf"{sign}{whole}\frac{{{rest}}}{{{size.denominator}}}"] if whole and rest else []),
    ]
    for spelling in spellings:
        assert equivalent(spelling, str(value)), spelling
        assert not equivalent(spelling, str(value + Fraction(1, 10**7))), spelling


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-9, 9), min_size=1, max_size=4), st.integers(-5, 5).filter(bool))
def test_a_polynomial_is_its_expansion_and_no_other(roots: list[int], changed: int) -> None:
    factored = "".join(f"(x-{root})" if root >= 0 else f"(x+{-root})" for root in roots)
    coefficients = [1]
    for root in roots:
        coefficients = [a - root * b for a, b in zip([*coefficients, 0], [0, *coefficients], strict=True)]
    degree = len(roots)
    expanded = "+".join(f"({c})x^{{{degree - i}}}" for i, c in enumerate(coefficients))
    assert equivalent(factored, expanded)
    coefficients[-1] += changed
    other = "+".join(f"({c})x^{{{degree - i}}}" for i, c in enumerate(coefficients))
    assert not equivalent(factored, other)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-99, 99), min_size=2, max_size=6, unique=True), st.randoms(use_true_random=False))
def test_a_set_has_no_order_and_a_tuple_has(numbers: list[int], chance: Any) -> None:
    shuffled = chance.sample(numbers, len(numbers))
    one = ", ".join(map(str, numbers))
    other = ",".join(map(str, shuffled))
    assert equivalent(rf"\{{{one}\}}", rf"\{{{other}\}}") and equivalent(one, other)
    assert equivalent(f"({one})", f"({other})") == (numbers == shuffled)
    assert not equivalent(rf"\{{{one}\}}", rf"\{{{other}, 100\}}")


HOSTILE = [
    "9^{9^{9^{9}}}",
    "(" * 1000,
    "{" * 1000 + "}" * 1000,
    r"\frac" * 180,
    r"\sqrt" * 180,
    "1+" * 400 + "1",
    "2^" * 400 + "2",
    "!" * 400,
    "5" + "!" * 300,
    "x" * 900,
    "9" * 900,
    "1," * 400 + "1",
    r"\text{" * 150,
    r"\{" * 300,
    "(1," * 300,
    "a=" * 300,
    r"\pm" * 200,
    r"1\cup" * 150,
    r"\begin{pmatrix}" * 60,
    "|" * 500,
    "1e999",
    "10^{10^{10}}",
    "(10^{9999})!",
    r"\binom{10^9}{10^8}",
    r"\sin(10^{39})^{10^{9}}",
    r"\exp(\exp(\exp(\exp(5))))",
    "x^{999999}",
    "(x+y+z)^{9999}",
    "7^{7^{7}}" * 20,
    r"\sum_{n=1}^{1000000} \frac{1}{n}",
    r"\prod^{10^6}_{n=1} n",
    r"\sum_{n=-10^5}^{3} n^2",
    r"\sum_{k=1}^{100}\sum_{j=1}^{100}\sum_{i=1}^{100} \frac{1}{i+j+k}",
    r"\max(10^{10^{10}},1)",
    r"\max((2^{2500})^{2500},1)",
    r"\max(2^{2^{2^{2^{2^{2^{2^{2^{2^{2^{2^{2}}}}}}}}}}},1)",
    r"\max(1000000!,2)",
    r"\sum_{n=1}^{3} (10^7)!",
    r"\gcd(2^{100000000},\binom{1000000}{500000})",
    r"\sum_{n=1}^{3} \binom{10^9}{n}",
    "\\" * 900,
    "%" * 900,
    "__import__('os').system('sleep 9')",
    "\x00\ud83d",
    "٣٤",
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:12].encode("unicode_escape").decode())
def test_a_hostile_answer_is_wrong_at_once(text: str) -> None:
    begun = time.process_time()
    for label in ("7", r"\frac{\sqrt{2}}{3}", r"x^2+1", r"\{1,2\}", "yes"):
        assert not equivalent(text, label)
        assert not equivalent(label, text)
    assert time.process_time() - begun < (0.3 if calculus.is_calculus(text) else 3) * slowdown(), (
        "math-verify was not asked"
    )


def test_sums_of_few_terms_are_read() -> None:
    """What the bound on sums, powers and factorials leaves alone is still compared."""
    for text in (
        r"\sum_{k=1}^{n} 10^{k}",
        r"\sum_{n=1}^{\infty} x_{12}^n",
        r"\max(123456, 20!)",
        r"\int_0^1 x^{2500} dx",
    ):
        assert not calculus.is_too_large(text), text
    assert equivalent(r"\sum_{k=1}^{2024} \frac{1}{k(k+1)}", r"\frac{2024}{2025}")
    assert equivalent(r"\sum_{i=0}^{3}\binom{3}{i}", "8") and equivalent(r"\prod_{k=1}^{5} k", "5!")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"so \boxed{4}.", "4"),
        (r"\boxed{1} or \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed { 5 }", "5"),
        (r"\fbox{6}", "6"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\text{a \} b}}", r"\text{a \} b}"),
        (r"\boxed{3} and \boxed{4", "3"),
        (r"\boxed{}", ""),
        (r"\boxed 4", "4"),
        (r"\boxed{3}, no, \boxed 12.", "12"),
        (r"\boxed 12, no, \boxed{3}", "3"),
        (r"$\boxed -0.5$", "-0.5"),
        (r"\boxed B.", "B"),
        (r"\boxed{a \boxed 5 }", "5"),
        (r"\boxed five", None),
        (r"所以 \boxed 5。", "5"),
        (r"\boxed 5，因为", "5"),
        (r"选 \boxed B。", "B"),
        (r"\boxed 5或6", None),
        (r"\boxed 5万", None),
        (r"\\boxed 4", "4"),
        (r"$\boxed 12\sqrt{3}$", None),
        (r"\boxed 10^{6}", None),
        (r"\boxed 2x", None),
        (r"\boxed 3:4", None),
        (r"\boxed 10.5x", None),
        (r"\boxed 5 + x", None),
        (r"\boxed 5, because", "5"),
        ("\\boxed 4 \\boxed{" * 20000, "4"),
        ("4", None),
        ("", None),
        ("\\boxed{" * 20000, None),
        ("{}}}" * 20000, None),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\{ \boxed{8} \}", "8"),
        (r"a line ends here \\\boxed{9}", "9"),
        (r"\\boxed{9}", "9"),
        (r"\\boxed{\\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{3} and \\boxed{4}", "3"),
    ],
)
def test_the_last_boxed_answer(text: str, found: str | None) -> None:
    assert boxed(text) == found


def test_ten_megabytes_of_braces_take_no_time() -> None:
    begun = time.process_time()
    assert boxed("{}" * 5_000_000 + r"\boxed{7} " + "{}" * 400_000) == "7"
    assert boxed("{" * 10_000_000 + r"\boxed{" + "{" * 900_000) is None
    assert boxed(r"\boxed{" * 1_000_000) is None
    assert time.process_time() - begun < 10 * slowdown()


@pytest.mark.parametrize(
    ("label", "texts"),
    [
        ("1/2", ["1/2"]),
        (r"so \boxed{3}", ["3"]),
        (12, ["12"]),
        (0.5, ["0.5"]),
        (True, ["true"]),
        (["1", 2, [r"\boxed{3}"]], ["1", "2", "3"]),
    ],
)
def test_what_a_label_says(label: Any, texts: list[str]) -> None:
    assert right_answers(label) == texts
    assert all(is_right(text, label) for text in texts)
    assert not is_right("99", label) and not is_right("", label) and not is_right(None, label)


# ---- limits: what is within them is read


@pytest.mark.parametrize("count", [2, 8, 30, 49, 50])
def test_lists_up_to_the_limit_have_no_order(count: int) -> None:
    """Up to 50 items in any order; of more, only in the same."""
    items = [str(7 * number % 101) for number in range(count)]
    assert equivalent(", ".join(reversed(items)), ", ".join(items))
    assert equivalent(rf"\{{{', '.join(reversed(items))}\}}", rf"\{{{', '.join(items)}\}}")
    assert not equivalent(", ".join([*items[:-1], "777"]), ", ".join(items))
    more = [str(number) for number in range(51)]
    assert equivalent(", ".join(more), ", ".join(more) + " ") and not equivalent(
        ", ".join(reversed(more)), ", ".join(more)
    )


@pytest.mark.parametrize("size", [11, 50, 200, 900])
def test_long_answers_are_read(size: int) -> None:
    """Up to 1,000 characters, or twice the label's."""
    terms = (size - 2) // 2
    assert equivalent("1+" * terms + "1", str(terms + 1)) == (terms < 99)  # 200 operations are the most
    assert equivalent("0" * (size - 1) + "7", "7")
    assert equivalent("9" * size, "9" * size + ".0")
    assert not equivalent("9" * size, "9" * (size - 1) + "8")
    if size == 900:
        assert not equivalent("0" * 1000 + "7", "7")
        assert equivalent(" ".join(["0" * 1100 + "7"]), "0" * 600 + "7")


@pytest.mark.parametrize("depth", [1, 3, 6, 20, 38])
def test_brackets_in_brackets_are_read(depth: int) -> None:
    """Up to 40 in an expression; sets and tuples up to 8."""
    assert equivalent("(" * depth + "3+4" + ")" * depth, "7")
    assert equivalent(r"\sqrt{" * depth + "1" + "}" * depth, "1")
    if depth <= 6:
        for left, right in (("(1,", ")"), (r"\{1,", r"\}")):
            nested = left * depth + "2" + right * depth
            assert equivalent(nested.replace("2", "4/2"), nested)
            assert not equivalent(nested.replace("2", "3"), nested)


@pytest.mark.parametrize("digits", [5, 13, 40, 300, 2000])
def test_large_numbers_are_exact(digits: int) -> None:
    """Rational numbers of up to 20,000 bits, and powers of them."""
    power = rf"10^{{{digits}}}"
    assert (
        equivalent(power, "1" + "0" * digits) if digits < 900 else equivalent(power, rf"10^{{{digits - 1}}} \cdot 10")
    )
    assert not equivalent(rf"{power}+1", power)
    assert equivalent(rf"\frac{{{power}}}{{{power}}}", "1")
    assert not equivalent(rf"\frac{{{power}}}{{{power}+1}}", "1")


@pytest.mark.parametrize("places", [7, 15, 30, 60, 90])
def test_irrational_numbers_differ_in_any_digit(places: int) -> None:
    """What differs by 10^-90 is not the same."""
    assert not equivalent(rf"\sqrt{{2}}+10^{{-{places}}}", r"\sqrt{2}")
    assert not equivalent(rf"\pi-10^{{-{places}}}", r"\pi")
    assert equivalent(rf"\sqrt{{2}}+10^{{-{places}}}-10^{{-{places}}}", r"\frac{2}{\sqrt{2}}")


@pytest.mark.parametrize(
    ("answer", "label"),
    [
        ("x^2-1", "x-1"),
        ("x^3", "x"),
        ("x^2", "x"),
        (r"|x|", "x"),
        (r"\sqrt{x^2}", "x"),
        (r"\frac{x^2-4}{x-2}", "x-2"),
        ("x^5-5x^3+4x+y", "y"),
        (r"(29x-48)(29y-3)+x", "x"),
    ],
)
def test_expressions_that_agree_at_some_points_differ(answer: str, label: str) -> None:
    """Two expressions are compared at more than one point, and at negative ones."""
    assert not equivalent(answer, label) and not equivalent(label, answer)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from("abc"), min_size=3, max_size=5).map("".join), st.randoms(use_true_random=False))
def test_words_of_a_b_and_c_are_no_products(word: str, chance: Any) -> None:
    """Letters side by side that may be a word are the same in their own order alone; written apart they are a
    product."""
    other = "".join(chance.sample(word, len(word)))
    assert equivalent(other, word) == (other == word)
    assert equivalent(r" \cdot ".join(other), r" \cdot ".join(word))


@settings(max_examples=60, deadline=None)
@given(st.integers(1000, 10**12), st.sampled_from([",", r"\!,", r",\!", r"\!,\!", r"\,", "{,}", " ", r"\;"]))
def test_thousands_in_every_spelling(number: int, mark: str) -> None:
    """LaTeX's ways to set thousands apart are one number; a group that is not of three digits is none."""
    text = f"{number:,}".replace(",", mark)
    assert equivalent(text, str(number)) and equivalent(str(number), text)
    assert not equivalent(text, str(number + 1)) and not equivalent(text + "0", str(number))


@pytest.mark.parametrize("label", [None, {"answer": 1}, [None]])
def test_a_label_that_is_no_answer_is_named(label: Any) -> None:
    with pytest.raises(DataError, match="not an answer"):
        is_right("1", label)


def test_an_empty_label_is_never_right() -> None:
    assert not is_right("", "") and not is_right(" ", " ") and not is_right("0", "")


def test_model_text_is_not_evaluated(tmp_path: Any) -> None:
    mark = tmp_path / "mark"
    for text in (
        f"__import__('os').mkdir('{mark}')",
        rf"\text{{__import__('os').mkdir('{mark}')}}",
        f"\\sum_{{k=1}}^4 __import__('os').mkdir('{mark}')",
    ):
        assert not equivalent(text, "7")
        assert not equivalent(text, r"\sum_{k=1}^3 k")
    assert not mark.exists()


def test_the_self_check_names_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    labels.check()
    monkeypatch.setattr(calculus, "same", lambda label, answer: False)
    with pytest.raises(UsageError, match=r"call \\sum_\{k=1\}\^\{4\} k and 10 different; installed are math-verify \d"):
        labels.check()

    def raises(label: str, answer: str) -> bool:
        raise TypeError("verify() got an unexpected keyword argument 'timeout_seconds'")

    monkeypatch.setattr(calculus, "same", raises)
    with pytest.raises(UsageError, match="raise TypeError: verify.*math-verify .*latex2sympy2_extended"):
        labels.check()


NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
)


def test_words_that_are_numbers() -> None:
    """Numbers up to twenty, bases and scales are worth what they say, and no more."""
    for number, word in enumerate(NUMBERS.split()):
        assert equivalent(rf"\text{{{word}}}", str(number)), word
        assert not equivalent(rf"\text{{{word}}}", str(number + 1)), word
        if number in (*range(2, 11), 12, 16):
            assert equivalent(rf"11_{{\text{{{word}}}}}", f"11_{number}"), word
            assert not equivalent(rf"11_{{\text{{{word}}}}}", f"11_{number + 1}"), word
    scales = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
    for word, worth in scales.items():
        assert equivalent(rf"3\text{{ {word}}}", str(3 * worth)), word
        assert not equivalent(rf"3\text{{ {word}}}", str(30 * worth)), word
    for sign, worth in zip("½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞", PARTS.split(), strict=True):
        assert equivalent(sign, worth) and not equivalent(sign, "2/7"), sign


PARTS = "1/2 1/3 2/3 1/4 3/4 1/5 2/5 3/5 4/5 1/6 5/6 1/8 3/8 5/8 7/8"
UNITS = """1 m = 100 cm; 1 m = 1000 mm; 1 m = 10 dm; 1 km = 1000 m; 1 inch = 2.54 cm; 1 ft = 12 inches; 1 yd = 3 ft;
1 mile = 1609.344 m; 1 kg = 1000 g; 1 g = 1000 mg; 1 tonne = 1000 kg; 1 lb = 453.59237 g; 16 oz = 1 lb;
1 min = 60 seconds; 1 hour = 60 minutes; 1 day = 24 hours; 1 week = 7 days; 1 year = 12 months; 1 liter = 1000 ml;
1 liter = 1000 cm^3; 1 dollar = 100 cents; 1 m^2 = 10000 cm^2; 1 m^3 = 1000 liters; 36 km/h = 10 m/s;
60 mph = 1 mile per minute; 1 sq m = 10000 square cm; 1 cu m = 1000 liters"""


def written(quantity: str, factor: float = 1.0) -> str:
    number, unit = quantity.split(" ", 1)
    name, _, power = unit.partition("^")
    return f"{float(number) * factor:.10g}\\text{{ {name}}}" + (f"^{power}" if power else "")


def test_units_are_worth_each_other() -> None:
    for pair in UNITS.replace("\n", " ").split(";"):
        left, right = pair.strip().split(" = ")
        assert equivalent(written(left), written(right)), pair
        assert not equivalent(written(left), written(right, 1.5)), pair


def test_tuples_in_tuples_are_read_to_eight() -> None:
    """What lies deeper is compared letter by letter."""
    for depth in range(1, 12):
        nested = "(1," * depth + "0.5" + ")" * depth
        assert equivalent(nested, nested)
        assert equivalent(nested.replace("0.5", "1/2"), nested) is (depth <= 8), depth
