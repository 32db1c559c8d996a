"""The turns: the model may write `<call>47*83`, reads `3901`, and continues; what does not call is the answer.

The tool runs in this process: give one that can hang or harm a process of its own (docs/algorithms.md).
"""

import re

CALL = "<call>"
CALLS = 2  #: of a response, at most
PRODUCT = re.compile(r"(\d{1,4})\*(\d{1,4})")


def value(expression):
    """What the tool answers: the product, or - where there is none."""
    found = PRODUCT.fullmatch(expression.replace("<|end|>", "").strip())
    return str(int(found[1]) * int(found[2])) if found else "-"


async def respond(args, sample, sampling_params):
    """One response of the model, with what the tool said in it; that is not learned from."""
    from hpcrl.rollout.samplers.conversation import Conversation

    talk = Conversation(args, sample, sampling_params)
    for _ in range(CALLS + 1):
        turn = await talk.turn()
        if turn.finish == "length" or not turn.text.startswith(CALL):
            break
        talk.tell_messages({"role": "tool", "content": value(turn.text.removeprefix(CALL))})
    return talk.sample()
