"""Tests of the reward and the tool: python test_reward.py, or pytest."""

from types import SimpleNamespace

from reward import reward
from tool import value


def graded(response, label):
    return reward(None, SimpleNamespace(response=response, label=label))


def test_the_tool():
    assert value("47*83") == "3901" and value("47*83<|end|>") == "3901"
    assert value("47") == value("9**9**9") == value("") == "-"


def test_the_right_number_earns_most():
    assert graded("<call>47*83<|end|>3901", "3901") == 1.0


def test_a_call_earns_something():
    assert graded("<call>4*8<|end|>32", "3901") == 0.6
    assert graded("<call>==<|end|>-", "3901") == 0.3
    assert graded("12", "3901") == 0.0


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print(f"{name}: good")
