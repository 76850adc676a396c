"""The estimate of a batch: a few of its items are answered, and what the rest will take follows.

draw.py      draws the items, at random, of any source
census.py    counts the input by kind and size, and the tokens of its media
steps.py     what a step of the engine costs, and so any number of prompts
estimate.py  answers the items and adds up
page.py      the small report
faster.py    what would take less time, and how much less
result.py    the estimate, and its text
"""

NUM_ITEMS = 20  # that are answered, unless a caller says another number
