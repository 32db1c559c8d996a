"""Which hosts words allow, what they cover of each other, and what is no word."""

from __future__ import annotations

import pytest

from hpcrl.errors import UsageError
from hpcrl.utils.host_rules import NO_HOSTS, HostRules, rules_of, split_port, uncovered

RULES = rules_of(["Example.org.", "*.example.net", "registry.test:8080", "192.0.2.7", "[2001:db8::1]:443"], "--x")


@pytest.mark.parametrize(
    ("name", "port", "allowed"),
    [
        ("example.org", 443, True),
        ("EXAMPLE.ORG.", 80, True),
        ("example.org", 8080, False),
        ("www.example.org", 443, False),
        ("notexample.org", 443, False),
        ("example.org.evil.test", 443, False),
        ("a.example.net", 443, True),
        ("a.b.example.net", 80, True),
        ("example.net", 443, False),
        (".example.net", 443, False),
        ("badexample.net", 443, False),
        ("registry.test", 8080, True),
        ("registry.test", 443, False),
        ("192.0.2.7", 80, True),
        ("192.0.2.70", 80, False),
        ("2001:db8::1", 443, True),
        ("2001:db8::1", 80, False),
        ("", 443, False),
    ],
)
def test_what_is_allowed(name: str, port: int, allowed: bool) -> None:
    assert RULES.allow(name, port) is allowed
    assert not NO_HOSTS.allow(name, port)


def test_words_that_mean_the_same_are_equal() -> None:
    assert rules_of(["b.org", "A.org", "a.org."], "--x") == rules_of(("a.org", "b.org"), "--x")
    assert str(RULES).startswith("*.example.net, ") and str(NO_HOSTS) == "none"
    assert rules_of(RULES, "--x") is RULES


@pytest.mark.parametrize(
    ("word", "covered"),
    [
        ("example.org", True),
        ("example.org:443", True),
        ("example.org:8080", False),
        ("*.example.org", False),
        ("*.a.example.net", True),
        ("*.example.net", True),
        ("*.net", False),
        ("example.net", False),
        ("registry.test:8080", True),
        ("registry.test", False),
    ],
)
def test_what_rules_cover(word: str, covered: bool) -> None:
    """All of its ports, by one word or another."""
    assert uncovered(rules_of([word], "--x"), RULES) == ([] if covered else [word])


def test_ports_of_two_words() -> None:
    both = rules_of(["a.org:80", "a.org:443"], "--x")
    assert both.covers("a.org") and not both.covers("a.org:8080")


def test_this_node_is_covered_by_nothing_else() -> None:
    assert uncovered(HostRules(("example.org",), also_here=True), RULES) == ["this node itself"]


@pytest.mark.parametrize(
    "word",
    [
        *(
            "",
            "*",
            "*.",
            "a.*.org",
            "a b",
            "https://a.org",
            "a.org/path",
            "a.org:0",
            "a.org:99999",
            "a.org:x",
            "a..org",
        ),
        *("-a.org", "[::1", "::1", "10.0.0.0/8", "ä.org", "a@b.org", "a.org\n", "x" * 300, "a.org:80:80"),
    ],
)
def test_what_is_no_word(word: str) -> None:
    with pytest.raises(UsageError, match="--x: .* is no host"):
        rules_of([word], "--x")


def test_names_below_a_domain_are_names() -> None:
    rules = rules_of(["*.a.org"], "--x")
    assert rules.allow("x.a.org", 80) and rules.allow("x.y.a.org.", 443)
    for name in ("user@x.a.org", "b.org%2f.a.org", "x,y.a.org", "..a.org", ".a.org", "x y.a.org"):
        assert not rules.allow(name, 80), name


def test_names_with_ports() -> None:
    assert split_port("[::1]:80") == ("::1", 80) and split_port("a") == ("a", None)
    for text in ("a:", "a:-1", "a:65536", "[a]:80", "[::1]80", "a:٣"):
        with pytest.raises(ValueError, match="no port|no address"):
            split_port(text)
