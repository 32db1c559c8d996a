"""A module of a reward whose import never ends."""

import time

time.sleep(600)
