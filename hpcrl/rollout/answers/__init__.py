"""Answers to mathematical questions: found in a response, read, and compared.

    labels.py      the last \\boxed{...} of a response; what a label says is right
    latex.py       one spelling for the many that LaTeX and Unicode allow
    expression.py  an expression as a tree, by a grammar (nothing is evaluated as code), and its value
    units.py       percent, money, degrees, lengths ... behind a number
    shapes.py      what kind of answer a text is: set, interval, list, assignment, number in a base, words ...
    compare.py     whether two answers are the same
    calculus.py    sums, integrals and limits, which math-verify reads

Invariants: pure functions of two texts; the same pair gives the same verdict in every process.  Whatever is not
understood is compared as text, so doubt never makes an answer right.
"""
