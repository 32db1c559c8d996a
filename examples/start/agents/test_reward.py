"""Tests of the game and its reward: python test_reward.py, or pytest."""

from agent import hint, score


def test_what_the_game_says():
    assert hint("7", "7") == "" and hint("3", "7") == "+" and hint("9", "7") == "," and hint("?", "7") == "="


def test_fewer_turns_earn_more():
    assert score(["7"], "7") == 1.0
    assert score(["3", "9", "7"], "7") == 0.6


def test_a_digit_earns_something():
    assert 0 < score(["?", "3", "?"], "7") < score(["1", "2", "3"], "7") <= 0.1
    assert score(["?", "?", "?"], "7") == score([], "7") == 0.0


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print(f"{name}: good")
