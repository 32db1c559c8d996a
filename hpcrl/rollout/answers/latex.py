r"""One spelling for the many that LaTeX, Unicode and keyboards allow.

`normalise` gives text in which every command has one name (`\dfrac` is `\frac`), sizes and spacing are gone, words
stand in `\text{...}`, and Unicode symbols are commands.  Invariant: time linear in the length of the text; the meaning
stays.
"""

from __future__ import annotations

import re
import unicodedata


def word_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: symbols that NFKC would spoil, or that LaTeX has a command for
_SYMBOLS = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "×": r"\times ", "÷": r"\div ", "·": r"\cdot ", "⋅": r"\cdot ",
    "∙": r"\cdot ", "•": r"\cdot ", "∗": "*", "⁄": "/", "∕": "/", "π": r"\pi ", "𝜋": r"\pi ", "√": r"\sqrt ",
    "∛": r"\sqrt[3] ", "∞": r"\infty ", "≤": r"\leq ", "⩽": r"\leq ", "≥": r"\geq ", "⩾": r"\geq ", "≠": r"\neq ",
    "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "±": r"\pm ", "∓": r"\mp ", "°": r"^\circ ",
    "º": r"^\circ ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "λ": r"\lambda ",
    "φ": r"\phi ", "ϕ": r"\phi ", "ω": r"\omega ", "σ": r"\sigma ", "μ": r"\mu ", "ρ": r"\rho ", "δ": r"\delta ",
    "ε": r"\epsilon ", "Δ": r"\Delta ", "′": "'", "’": "'", "‘": "'", "“": '"', "”": '"', "…": r"\ldots ",
    "∠": r"\angle ", "△": r"\triangle ", "⟨": r"\langle ", "⟩": r"\rangle ", "⌊": r"\lfloor ", "⌋": r"\rfloor ",
    "⌈": r"\lceil ", "⌉": r"\rceil ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}",
    "ℂ": r"\mathbb{C}", "％": "%", "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}",
    "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "⅕": r"\frac{1}{5}", "⅖": r"\frac{2}{5}", "⅗": r"\frac{3}{5}",
    "⅘": r"\frac{4}{5}", "⅙": r"\frac{1}{6}", "⅚": r"\frac{5}{6}", "⅛": r"\frac{1}{8}", "⅜": r"\frac{3}{8}",
    "⅝": r"\frac{5}{8}", "⅞": r"\frac{7}{8}",
}  # fmt: skip
#: signs of money that become commands of these names; ¥ stands for yen and yuan
MONEY = dict(re.findall(r"(\S)(\w+)", "$dollar €euro £pound ¥yen ₹rupee ₩won ₽ruble ¢cent ₺lira ₫dong ₱peso ₪shekel"))
_TRANSLATION = str.maketrans(_SYMBOLS | {sign: f"\\{name} " for sign, name in MONEY.items() if sign != "$"})
_RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n", strict=True))
_LOWERED = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
_RAISED_RUN, _LOWERED_RUN = (re.compile(f"[{''.join(table)}]+") for table in (_RAISED, _LOWERED))

#: commands that are other names of one
_NAMES = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "nicefrac": "frac", "sfrac": "frac", "le": "leq",
    "leqslant": "leq", "ge": "geq", "geqslant": "geq", "ne": "neq", "lt": "<", "gt": ">", "lbrace": "{", "rbrace": "}",
    "lbrack": "[", "rbrack": "]", "lvert": "|", "rvert": "|", "vert": "|", "mid": "|", "ast": "*", "star": "*",
    "colon": ":", "dbinom": "binom", "tbinom": "binom", "infin": "infty", "varnothing": "emptyset",
    "degree": "^\\circ", "degrees": "^\\circ", "dots": "ldots", "cdots": "ldots", "land": "and", "lor": "or",
    "varphi": "phi", "varepsilon": "epsilon", "vartheta": "theta", "Reals": "mathbb{R}", "arcsec": "arcsec",
    "tg": "tan", "ctg": "cot", "cosec": "csc", "textdollar": "$", "EUR": "euro", "texteuro": "euro", "pounds": "pound",
    "textsterling": "pound", "textyen": "yen", "percent": "%", "union": "cup", "bigcup": "cup",
    "bigcap": "cap", "isin": "in", "overbar": "overline", "bar": "overline",
}  # fmt: skip
_GONE = word_set(
    "boxed fbox left right middle big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr displaystyle textstyle "
    "scriptstyle limits nolimits quad qquad thinspace medspace thickspace enspace hfill hspace vspace bf rm it em sf "
    "tt large Large small normalsize"
)
_TEXT = word_set(
    "text textbf textit textrm textsf texttt textnormal textup mathrm mathbf mathit mathsf mathtt mbox hbox "
    "operatorname bm boldsymbol emph underline mathnormal"
)
#: words that mean commands where the backslash is missing
_WORDS = word_set(
    "sqrt pi sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log exp infty theta alpha beta lambda pm "
    "cdot times frac"
)
_COMMAND = re.compile(r"\\(?:([a-zA-Z]+)\*?|(.))", re.DOTALL)
_PLAIN_WORD = re.compile(r"(?<![\\A-Za-z])(?:([Ii]nf(?:inity)?)|([a-z]{2,7}))(?![A-Za-z])")
_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:\{,\}|[ ~]|\\,|\\;|\\ |\\!|(?:\\! ?)?, ?\\!|\\! ?, ?)\d{3})+(?!\d)")
_SPACING = re.compile(r"(?<!\\)\\[,;:!> ]|~|&nbsp;")
_INFIX = re.compile(r"\{([^{}]*)\\(choose|over)(?![a-zA-Z])([^{}]*)\}")
_PHANTOM = re.compile(r"\\[hv]?phantom ?\{[^{}]*\}")
_MONEY_TEXT = re.compile(rf"\\(?:text|mathrm|textbf)\s*\{{\s*(\\(?:{'|'.join(MONEY.values())}))\s*\}}")
_SPACES = re.compile(r"\s+")
_ENDING = re.compile(r"[\s.,;:、。]+$")
_BASE_NAMES = "two three four five six seven eight nine ten twelve sixteen"
_BASES = dict(zip(_BASE_NAMES.split(), (*range(2, 11), 12, 16), strict=True))
_BASE_WORD = re.compile(rf"_\s*\{{?\s*\\text\{{\s*({'|'.join(_BASES)})\s*\}}\s*\}}?")
_BOLD = re.compile(r"\s*\*\*([^*]+)\*\*\s*")


def normalise(text: str) -> str:
    """The one spelling of `text`."""
    text = bold[1] if (bold := _BOLD.fullmatch(text)) else text
    text = _RAISED_RUN.sub(lambda m: "^{" + "".join(_RAISED[c] for c in m[0]) + "}", text)
    text = _LOWERED_RUN.sub(lambda m: "_{" + "".join(_LOWERED[c] for c in m[0]) + "}", text)
    text = unicodedata.normalize("NFKC", text.translate(_TRANSLATION)).translate(_TRANSLATION)
    text = (
        text.replace("\\$", "\\dollar ").replace("\\(", " ").replace("\\)", " ").replace("\\[", " ").replace("\\]", " ")
    )
    if "\\begin" not in text:
        text = text.replace("\\\\", "\\")  # written twice where it was escaped; only the rows of a matrix end so
    text = text.replace("$", " ").replace("\\%", "%")
    text = _INFIX.sub(lambda m: f"\\{'binom' if m[2] == 'choose' else 'frac'}{{{m[1]}}}{{{m[3]}}}", text)
    text = _GROUPED.sub(lambda m: re.sub(r"\D", "", m[0]), text).replace("{,}", ",")
    text = _SPACING.sub(" ", _PHANTOM.sub("", _MONEY_TEXT.sub(r"\1 ", text)))
    text = _COMMAND.sub(_command, text)
    text = _PLAIN_WORD.sub(_plain_word, text)
    text = _BASE_WORD.sub(lambda m: f"_{{{_BASES[m[1]]}}}", text)
    text = _ENDING.sub("", _SPACES.sub(" ", text).strip()).removeprefix("\\approx ")
    return text[1:-1].strip() if encloses(text, "{", "}") else text


def _command(found: re.Match[str]) -> str:
    """One command under its one name; commands without meaning become a space."""
    name, sign = found[1], found[2]
    if sign is not None:
        return " " if sign.isspace() else found[0]
    if name in _GONE:
        return " "
    if name in _TEXT:
        return "\\text"
    name = _NAMES.get(name, name)
    if name in ("{", "}"):
        return "\\" + name
    if name in ("and", "or"):
        return f"\\text{{ {name} }}"
    return name if not name[0].isalpha() else f"\\{name} "


def _plain_word(found: re.Match[str]) -> str:
    if found[1]:
        return "\\infty "
    return f"\\{found[2]} " if found[2] in _WORDS else found[0]


def encloses(text: str, left: str, right: str) -> bool:
    """Whether `text` is one group between `left` and `right`, where `right` closes `left`."""
    if not (text.startswith(left) and text.endswith(right) and len(text) >= len(left) + len(right)):
        return False
    depth = 0
    position = 0
    last = len(text) - len(right)
    while position < len(text):
        if text.startswith(left, position):
            depth, position = depth + 1, position + len(left)
        elif text.startswith(right, position):
            depth -= 1
            if not depth:
                return position == last
            position += len(right)
        else:
            position += 2 if text[position] == "\\" else 1
    return False


def split(text: str, separators: tuple[str, ...]) -> list[str]:
    """`text` cut at every separator that stands in no bracket, brace or environment; parts stripped."""
    return cut(text, separators)[0]


def cut(text: str, separators: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """(parts as of `split`, the separators between them).  Of several that fit, the first given is taken."""
    parts = []
    found = []
    depth = 0
    begin = 0
    position = 0
    while position < len(text):
        sign = text[position]
        hit = next((s for s in separators if text.startswith(s, position)), None) if depth <= 0 else None
        if hit:
            parts.append(text[begin:position])
            found.append(hit)
            begin = position = position + len(hit)
        elif sign == "\\":
            if text.startswith(("\\{", "\\begin", "\\langle", "\\lfloor", "\\lceil"), position):
                depth += 1
            elif text.startswith(("\\}", "\\end", "\\rangle", "\\rfloor", "\\rceil"), position):
                depth -= 1
            position += 2
        else:
            depth += (sign in "([{") - (sign in ")]}")
            position += 1
    parts.append(text[begin:])
    return [part.strip() for part in parts], found


def words(text: str) -> str:
    r"""`text` as plain words: the content of \text{...}, lower case, single spaces, no punctuation at the ends."""
    text = re.sub(r"\\text\s*\{", "{", text)
    text = re.sub(r"[{}\\]", "", text)
    return _SPACES.sub(" ", text).strip(" \t.,;:!?\"'()").casefold()


def canonical(text: str) -> str:
    """`text` without white space but that between two numbers or words, for comparing what is not understood."""
    return re.sub(
        r" (?![\da-zA-Z])|(?<![\da-zA-Z]) |(?<=\d) (?=[a-zA-Z])|(?<=[a-zA-Z]) (?=\d)",
        "",
        re.sub(r"\\text\{([^{}]*)\}", r"\1", text),
    )
