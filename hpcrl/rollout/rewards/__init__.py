"""The rewards of --rm-type: one file each, which registers itself by its name.

A file `NAME.py` here is `--rm-type NAME`.  It has

    def reward(options, sample) -> float | dict    plain, or async if it waits for something
    LABELS = ("text", "number")                    the labels that an answer can match (default: text, number, truth,
                                                   list; json: also a list or an object as text; words: text
                                                   with more than punctuation and articles); (): it looks at none
    METADATA = ("correct_letter", ...)             keys of the metadata: a row must have one of them, or a label
    KEYS = ("score", ...)                          if it returns a dict: the keys with numbers, the reward first
    def check() -> None                            a self-check at the start: UsageError, or ImportError for a
                                                   missing package
    def boxed(content: str) -> str                 what it is given for boxed_NAME, if not the box's content alone

and is run in the processes of `hpcrl/rollout/grading/`.  A custom function (--custom-rm-path) is the same without the
file.

Invariant: LABELS, METADATA and KEYS are literals at the top of the file, because options are checked without importing
it; a file whose name begins with an underscore is not a reward.
"""
