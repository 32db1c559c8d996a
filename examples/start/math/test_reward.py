"""Tests of the reward: python test_reward.py, or pytest."""

from types import SimpleNamespace

from reward import reward


def graded(response, label):
    return reward(None, SimpleNamespace(response=response, label=label))


def test_the_right_number_earns_most():
    assert graded("12<|end|>", "12") == 1.0
    assert graded("7+5=12", "12") == 1.0


def test_digits_that_agree_earn_something():
    assert graded("13", "12") == 0.9 / 2 + 0.1
    assert 0 < graded("+33", "12") < graded("33", "12") == 0.1


def test_nothing_earns_nothing():
    assert graded("", "12") == graded("+,", "12") == 0.0


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print(f"{name}: good")
