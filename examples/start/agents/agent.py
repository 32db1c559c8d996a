"""An agent: it plays a game with the model, over several turns, at an endpoint as OpenAI's servers have.

`play` is called for each response; any program or framework that speaks with OpenAI's servers can be here instead, given
`args.base_url` and `args.api_key`. What the model said is recorded at the endpoint, token by token.
"""

import re

TURNS = 3


async def play(args, sample, sampling_params):
    """Guess the number: the model guesses a digit and reads whether the number is higher or lower."""
    import aiohttp

    messages = [*args.messages]
    guesses = []
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {args.api_key}"}) as http:
        for _ in range(TURNS):
            body = {"model": "policy", "messages": messages, "max_tokens": 4}
            async with http.post(f"{args.base_url}/chat/completions", json=body) as answer:
                if answer.status != 200:  # no room for another turn
                    break
                said = (await answer.json())["choices"][0]["message"]
            messages.append(said)
            guesses.append(said["content"] or "")
            told = hint(guesses[-1], sample.label)
            if not told:
                break
            messages.append({"role": "user", "content": told})
    sample.reward = score(guesses, sample.label)


def hint(guess, number):
    """What the game says to a guess; nothing if it was right."""
    found = re.match(r"\d", guess)
    if found is None:
        return "="
    return "" if found[0] == number else "+" if found[0] < number else ","


def score(guesses, number):
    """The reward of a game: 1 if the first guess is right, less for each further turn; 0.1 for a digit at all."""
    if guesses and not hint(guesses[-1], number):
        return 1.0 - 0.2 * (len(guesses) - 1)
    return 0.1 * (sum(guess[:1].isdigit() for guess in guesses) / TURNS)
